"""What a suite hands over: figures by name, tables and charts as data. JSON in and out; draws and measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hdrh.histogram import HdrHistogram

PERCENTILES = (50, 90, 99)
COLUMNS = ("p50 ms", "p90 ms", "p99 ms", "max ms")
"""What `Latencies.row` gives."""

Size = Literal["tiny", "quick", "full"]
"""How much is measured: tiny and quick only show that everything works."""


class Latencies:
    """Durations in an HDR histogram: a microsecond to two minutes, three digits."""

    def __init__(self) -> None:
        self._histogram = HdrHistogram(1, 120_000_000, 3)

    def record(self, seconds: float) -> None:
        """Add one duration."""
        self._histogram.record_value(max(1, min(120_000_000, round(seconds * 1e6))))

    @property
    def count(self) -> int:
        """Return how many there are."""
        return int(self._histogram.get_total_count())

    def ms(self, percentile: float) -> float:
        """Return a percentile in milliseconds; 100 is the maximum."""
        return float(self._histogram.get_value_at_percentile(percentile)) / 1000

    def row(self) -> list[float]:
        """Return p50, p90, p99 and the maximum in milliseconds."""
        return [*(self.ms(one) for one in PERCENTILES), self.ms(100)]

    def spread(self) -> list[tuple[float, float]]:
        """Return points of the distribution: percentile, milliseconds."""
        return [(one, self.ms(one)) for one in (0, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of figures under a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn: named series of points, as lines, or as bars over the names of their points."""

    name: str
    """Part of the names of its files."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float | str, float]]]
    kind: Literal["lines", "bars", "stacked"] = "lines"
    is_log_x: bool = False
    is_log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one suite found."""

    suite: str
    figures: Mapping[str, float]
    """By name, the unit in the name: what the budgets look at."""

    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """Return what `to_json` was called on."""
        return cls(
            suite=data["suite"],
            figures=data["figures"],
            tables=[Table(**one) for one in data["tables"]],
            charts=[Chart(**one) for one in data["charts"]],
        )


def text_of(table: Table) -> str:
    """Return a table for a terminal."""
    cells = [[cell_text(cell) for cell in row] for row in table.rows]
    widths = [max([len(column), *(len(row[index]) for row in cells)]) for index, column in enumerate(table.columns)]
    is_text = [all(isinstance(row[index], str) for row in table.rows) for index in range(len(table.columns))]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_text, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([table.title, line(table.columns), *map(line, cells)])


def cell_text(cell: str | float) -> str:
    """Return a cell as it is shown."""
    if isinstance(cell, str):
        return cell
    if cell == 0 or abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"
