"""Tables and facts on standard output."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp
from rich.cells import cell_len

from clients.cli.text import duration, one_line

_GAP = "  "


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Sequence[int] = ()) -> None:
    """Print rows in columns; what a cell holds is cleaned. Nothing is cut: the output may be a file."""
    cleaned = [[one_line(cell) for cell in row] for row in rows]
    table = [[head.upper() for head in heads], *cleaned]
    widths = [max(cell_len(row[index]) for row in table) for index in range(len(heads))]
    for row in table:
        cells = []
        for index, cell in enumerate(row):
            space = " " * (widths[index] - cell_len(cell))
            cells.append(space + cell if index in right_aligned else cell + space)
        print(_GAP.join(cells).rstrip())


def print_facts(*facts: tuple[str, str]) -> None:
    """Print names and values, one pair a line; without those that have no value."""
    shown = [(name, one_line(value)) for name, value in facts if value.strip()]
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        print(f"{name:<{width}}{_GAP}{value}")


def ago(stamp: Timestamp, now: datetime) -> str:
    """Return how long ago something was: "3 min ago", "5 days ago"."""
    seconds = max(0.0, (now - stamp.ToDatetime(tzinfo=UTC)).total_seconds())
    if seconds < 60:
        return f"{seconds:.0f} s ago"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    if seconds < 2 * 86400:
        return f"{seconds // 3600:.0f} h ago"
    return f"{seconds // 86400:.0f} days ago"


def took(seconds: float | None) -> str:
    """Return a length of time; empty where it is not known."""
    return "" if seconds is None else duration(seconds)
