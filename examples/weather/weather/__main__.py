"""python3 -m weather FILE: print what the readings of a file were like."""

import sys

from weather.readings import mean, median, read

temperatures = [reading.celsius for reading in read(sys.argv[1])]
print(f"{len(temperatures)} days, mean {mean(temperatures):.1f}, median {median(temperatures):.1f} degrees")
