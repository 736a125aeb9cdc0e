"""Tests of weather.readings."""

import unittest

from weather.readings import mean, median, read


class TestReadings(unittest.TestCase):
    def test_reads_every_day(self):
        self.assertEqual(len(read("data/july.csv")), 31)

    def test_mean(self):
        self.assertEqual(mean([1.0, 2.0, 6.0]), 3.0)

    def test_median_of_an_odd_number(self):
        self.assertEqual(median([9.0, 1.0, 2.0]), 2.0)

    def test_median_of_an_even_number(self):
        self.assertEqual(median([1.0, 2.0, 3.0, 10.0]), 2.5)


if __name__ == "__main__":
    unittest.main()
