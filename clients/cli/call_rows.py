"""Tool calls as rows of a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.cells import cell_len

from clients.cli.call_text import Verdict, call_lines, call_verdict
from clients.cli.style import Style
from clients.cli.text import clip, duration, last_lines
from clients.cli.view import seconds_since
from clients.cli.view_events import Call

MAX_TAIL_ROWS = 3
"""Rows of live output under a running call."""

_SHORT_S = 0.05


def ended_call_rows(call: Call, width: int, style: Style) -> list[str]:
    """Return the rows of a call that has its result: what it was, how it ended, the end of its output."""
    verdict = call_verdict(call)
    elapsed = call.elapsed_s
    facts = [] if verdict.is_good else [verdict.word]
    if elapsed is not None and elapsed >= _SHORT_S:
        facts.append(duration(elapsed))
    rows = [_title_row(_mark(verdict, style), call.title, " · ".join(facts), width, style)]
    lines, hidden = call_lines(call)
    if hidden:
        rows.append(_output_row(f"… {hidden}", width, style))
    return rows + [_output_row(line, width, style) for line in lines]


def running_call_rows(calls: Sequence[Call], now: datetime, width: int, room: int, style: Style) -> list[str]:
    """Return at most `room` rows of calls under way: what, for how long, the end of the output."""
    shown = calls if len(calls) <= room else calls[: max(room - 1, 0)]
    tail_rows = min(MAX_TAIL_ROWS, max(0, room // len(shown) - 1)) if shown else 0
    rows: list[str] = []
    for call in shown:
        started = call.start_time
        spinner = style.accent(style.spinner(now))
        time_text = duration(seconds_since(started, now)) if started is not None else "waiting"
        rows.append(_title_row(spinner, call.title, time_text, width, style))
        if tail_rows:
            rows += [_output_row(line, width, style) for line in last_lines(call.tail, tail_rows)[0]]
    if len(shown) < len(calls):
        rows.append(style.dim(f"    … and {len(calls) - len(shown)} more"))
    return rows


def started_call_row(call: Call, ran_s: float, width: int, style: Style) -> str:
    """Return the row of a call that still runs, for an output that shows only whole lines."""
    return _title_row("…" if style.marks.bar == "│" else "~", call.title, f"running {duration(ran_s)}", width, style)


def _mark(verdict: Verdict, style: Style) -> str:
    if verdict.is_good:
        return style.good(style.marks.good)
    return style.bad(style.marks.bad) if verdict.is_known else style.unsure(style.marks.unknown)


def _title_row(mark: str, title: str, right: str, width: int, style: Style) -> str:
    room = width - 4 - (cell_len(right) + 2 if right else 0)
    title = clip(title, room)
    if not right:
        return f"  {mark} {title}"
    return f"  {mark} {title}{' ' * (room - cell_len(title) + 2)}{style.dim(right)}"


def _output_row(line: str, width: int, style: Style) -> str:
    return style.dim(f"    {style.marks.bar} {clip(line, width - 6)}")
