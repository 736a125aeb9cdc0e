"""The kill matrix: real processes, SIGKILL at every fault point and at random times, and a checker of what is left.

`make kill-matrix`, or `python -m tests.faults.kill_matrix --kills 1000 --seed 7`.
"""
