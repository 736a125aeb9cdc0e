"""Draws the charts of a run as PNG and SVG. Needs matplotlib, from the extra `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter

from benchmarks.results import Chart

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#666666")
"""Told apart by everybody (Okabe and Ito)."""

MARKERS = "osD^vPX"
_FEW = 5
"""More names than this go down the side."""


def draw(chart: Chart, directory: Path, prefix: str) -> str:
    """Write `PREFIX-NAME.png` and `.svg` and return their name without suffix."""
    is_side = chart.kind == "stacked" or (chart.kind == "bars" and len(_names(chart)) > _FEW)
    height = max(3.0, 0.34 * len(_names(chart)) + 1.6) if is_side else 4.8
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.add_subplot()
    match chart.kind:
        case "lines":
            _lines(axes, chart)
        case "bars" if is_side:
            _side_bars(axes, chart)
        case "bars":
            _bars(axes, chart)
        case "stacked":
            _stacked(axes, chart)
    axes.set_title(chart.title, loc="left", fontweight="bold")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="x" if is_side else "y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    if len(chart.series) > 1:
        figure.legend(loc="outside lower center", ncols=min(4, len(chart.series)), frameon=False)
    name = f"{prefix}-{chart.name}"
    for suffix in ("png", "svg"):
        # Dates would make each drawing differ.
        figure.savefig(directory / f"{name}.{suffix}", dpi=120, metadata={"Date": None} if suffix == "svg" else None)
    return name


def _names(chart: Chart) -> Sequence[str]:
    if chart.kind == "lines":
        return []
    return list(dict.fromkeys(str(x) for points in chart.series.values() for x, _ in points))


def _lines(axes: Axes, chart: Chart) -> None:
    is_percentiles = chart.x_label == "percentile"
    for index, (name, points) in enumerate(chart.series.items()):
        xs = list(range(len(points))) if is_percentiles else [float(x) for x, _ in points]
        marker = MARKERS[index % len(MARKERS)] if len(points) <= 12 else ""
        axes.plot(xs, [y for _, y in points], label=name, color=_colour(index), marker=marker, markersize=5)
        if is_percentiles:
            # Percentiles crowd at the end, where they matter: each gets the same room.
            axes.set_xticks(xs, [f"{float(x):g}" for x, _ in points])
    if chart.is_log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if chart.is_log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))
    else:
        axes.set_ylim(bottom=0)


def _bars(axes: Axes, chart: Chart) -> None:
    names = _names(chart)
    width = 0.8 / len(chart.series)
    for index, (label, points) in enumerate(chart.series.items()):
        offset = (index - (len(chart.series) - 1) / 2) * width
        bars = axes.bar(
            [names.index(str(x)) + offset for x, _ in points],
            [y for _, y in points],
            width * 0.95,
            label=label,
            color=_colour(index),
        )
        axes.bar_label(bars, fmt=lambda value: f"{value:,.3g}" if value < 1000 else f"{value:,.0f}", fontsize=8)
    axes.set_xticks(range(len(names)), names)


def _side_bars(axes: Axes, chart: Chart) -> None:
    """Draw the first series as bars and the others as marks, which name the same things."""
    names = _names(chart)
    for index, (label, points) in enumerate(chart.series.items()):
        places, values = [names.index(str(x)) for x, _ in points], [y for _, y in points]
        if index == 0:
            axes.barh(places, values, 0.7, label=label, color=_colour(0))
        else:
            axes.scatter(values, places, label=label, color=_colour(index), marker="|", s=80, zorder=3)
    _name_rows(axes, names)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _stacked(axes: Axes, chart: Chart) -> None:
    names = _names(chart)
    ends = dict.fromkeys(names, 0.0)
    for index, (label, points) in enumerate(chart.series.items()):
        values: Mapping[str, float] = {str(x): y for x, y in points}
        lefts = [ends[name] for name in names]
        widths = [values.get(name, 0.0) for name in names]
        axes.barh(range(len(names)), widths, 0.7, left=lefts, label=label, color=_colour(index))
        ends = {name: ends[name] + width for name, width in zip(names, widths, strict=True)}
    for place, name in enumerate(names):
        axes.text(ends[name], place, f" {ends[name]:.1f}", va="center", fontsize=9)
    axes.margins(x=0.1)
    _name_rows(axes, names)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
