"""The HTML page of a run: machine, budgets, charts and tables in one file that needs no other."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.results import Result, Table, cell_text

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc }
svg { width: 100%; height: auto }
div.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
caption { text-align: left; font-weight: bold }
td, th { padding: 0.15rem 0.7rem 0.15rem 0; text-align: left; border-bottom: 1px solid #eee; white-space: nowrap }
td.number { text-align: right; font-variant-numeric: tabular-nums }
td.goal { color: #00694e } td.missed { color: #b3261e; font-weight: bold }
"""


def page(
    title: str,
    machine: Mapping[str, str | float],
    budgets: Table,
    results: Sequence[Result],
    drawings: Mapping[str, Path],
) -> str:
    """Return the page.

    Args:
        title: Of the run.
        machine: What it ran on.
        budgets: The table of budgets.
        results: What the suites found.
        drawings: SVG file of each chart, by the chart's name.
    """
    described = Table(title="machine", columns=("what", ""), rows=[[key, str(one)] for key, one in machine.items()])
    parts = [f"<h1>{html.escape(title)}</h1>", _table(budgets), _table(described)]
    for result in results:
        parts.append(f"<h2>{html.escape(result.suite)}</h2>")
        parts += [_drawing(drawings[chart.name], chart.name) for chart in result.charts]
        parts += [_table(table) for table in result.tables]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _drawing(path: Path, name: str) -> str:
    """Return a drawing without its prologue, its IDs made its own: two drawings on a page may share none."""
    drawn = path.read_text(encoding="utf-8")
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r'(\bid="|href="#|url\(#)', lambda found: f"{found.group(1)}{name}-", drawn)
    return f"<figure>{drawn}</figure>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    caption = f"<caption>{html.escape(table.title)}</caption>"
    return f'<div class="wide"><table>{caption}<tr>{head}</tr>\n{rows}</table></div>'


def _cell(cell: str | float) -> str:
    if not isinstance(cell, str):
        return f'<td class="number">{cell_text(cell)}</td>'
    kind = {"goal": ' class="goal"', "MISSED": ' class="missed"'}.get(cell, "")
    return f"<td{kind}>{html.escape(cell)}</td>"
