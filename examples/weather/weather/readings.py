"""Reads and sums up daily temperatures."""

import csv
from typing import NamedTuple


class Reading(NamedTuple):
    """The temperature of one day."""

    day: str
    celsius: float


def read(path):
    """Return the readings of a CSV file with the columns day and celsius."""
    with open(path, newline="", encoding="utf-8") as file:
        return [Reading(row["day"], float(row["celsius"])) for row in csv.DictReader(file)]


def mean(values):
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def median(values):
    """Return the middle value; of an even number of values, the mean of the two in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
