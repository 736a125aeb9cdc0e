"""A session on a terminal: finished things scroll up, what is under way is redrawn in a small region below them.

One frame is one write, holds only the rows that changed, and moves nothing outside the region: no flicker, and the
terminal's own scrolling, searching and copying work as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import assert_never

from rich.cells import cell_len

from clients.cli.call_rows import ended_call_rows, running_call_rows
from clients.cli.connection import Connection
from clients.cli.display import Heading, Summary, heading_line, summary_tail
from clients.cli.region import Region
from clients.cli.style import Style
from clients.cli.text import clean, clip, duration, one_line, plural, wrap
from clients.cli.view import SessionView, seconds_since
from clients.cli.view_events import (
    CallChanged,
    CallEnded,
    CallPrepared,
    CallStarted,
    Noted,
    StateChanged,
    TextEnded,
    TextPiece,
    TextVoided,
    Thought,
    TurnFailed,
    TurnStarted,
    UserSaid,
    ViewEvent,
)
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import session_pb2

MAX_TEXT_WIDTH = 100
"""Longer lines are hard to read, however wide the terminal."""

LOST_SHOWN_S = 0.5
"""A shorter break of the connection is nothing to look at."""

_TICK_S = 0.1


@dataclass
class _Phase:
    """What the model is at."""

    word: str = ""
    since: datetime | None = None
    """Set by the first frame that shows it."""


class LiveDisplay:
    """Shows a run on a terminal that can move its cursor."""

    def __init__(
        self,
        view: SessionView,
        style: Style,
        terminal_size: Callable[[], os.terminal_size],
        connection: Connection | None = None,
    ) -> None:
        """Draw on a terminal whose size is asked for at each frame."""
        self._view = view
        self._connection = connection or Connection()
        self._style = style
        self._terminal_size = terminal_size
        self._scroll: list[str] = []
        self._deferred: list[tuple[str, list[str]]] = []
        self._block = ""
        self._text_line: str | None = None
        self._phase = _Phase()
        self._begin_time: datetime | None = None
        self._typed: str | None = None
        self._is_ended = False
        self._region = Region()

    @property
    def tick_s(self) -> float | None:
        return _TICK_S

    def begin(self, heading: Heading) -> None:
        self._emit("heading", [self._style.dim(clip(heading_line(heading), self._width()))])

    def receive(self, response: coordinator_pb2.WatchSessionResponse) -> None:
        for event in self._view.feed(response):
            self._show(event)

    def notice(self, text: str) -> None:
        self._note(text)

    def set_typed(self, text: str | None) -> None:
        self._typed = text

    def redraw(self) -> None:
        self._region = Region()

    def erase(self) -> str:
        return self._region.erase(self._terminal_size().columns)

    def end(self, summary: Summary) -> None:
        self._close_text()
        first, *rest = wrap(f"{summary.word}{summary_tail(summary)}", self._width())
        emphasise = self._style.good if summary.word == "done" else self._style.bad
        rows = [emphasise(summary.word) + self._style.dim(first.removeprefix(summary.word))]
        rows += [self._style.dim(row) for row in rest]
        # The command stays in one piece, to be copied.
        rows.append(f"{self._style.dim(summary.next_label + ':')} {summary.next_command}")
        self._emit("summary", rows)
        self._is_ended = True

    def frame(self, now: datetime) -> str:
        self._begin_time = self._begin_time or now
        self._phase.since = self._phase.since or now
        scroll, self._scroll = self._scroll, []
        columns, rows = self._terminal_size()
        live = [] if self._is_ended else self._live_rows(now, max(columns, 20), max(rows, 6))
        shows_cursor = self._is_ended or self._typed is not None
        return self._region.draw(scroll, live, columns, shows_cursor=shows_cursor)

    def _width(self) -> int:
        return max(20, min(self._terminal_size().columns - 1, MAX_TEXT_WIDTH))

    def _show(self, event: ViewEvent) -> None:
        self._follow_phase(event)
        match event:
            case UserSaid():
                rows = [row for line in clean(event.text).split("\n") for row in wrap(line, self._width() - 2)]
                mark = self._style.accent(self._style.marks.prompt)
                self._emit("user", [f"{mark if i == 0 else ' '} {self._style.bold(r)}" for i, r in enumerate(rows)])
            case Noted():
                self._note(event.text)
            case TextPiece():
                self._add_text(event.text)
            case TextVoided():
                self._close_text(event.reason)
            case TextEnded():
                self._close_text()
            case CallEnded():
                self._emit("calls", ended_call_rows(event.call, self._width(), self._style))
            case TurnFailed():
                self._emit("note", self._wrapped(f"the model could not answer: {event.failure}", self._style.bad))
            case TurnStarted() | Thought() | CallPrepared() | CallStarted() | CallChanged() | StateChanged():
                pass  # the region shows them
            case _:
                assert_never(event)

    def _follow_phase(self, event: ViewEvent) -> None:
        match event:
            case TurnStarted():
                self._phase = _Phase("waiting for the model")
            case Thought():
                self._set_phase("thinking")
            case CallPrepared() if event.tool_name:
                self._set_phase(f"preparing {event.tool_name}")
            case TextPiece():
                self._set_phase("answering")
            case CallStarted() | TurnFailed() | TextEnded():
                self._phase = _Phase()
            case StateChanged() if event.rest.session_state != session_pb2.SESSION_STATE_RUNNING:
                self._phase = _Phase()
            case _:
                pass

    def _set_phase(self, word: str) -> None:
        if word != self._phase.word:
            self._phase = _Phase(word)

    def _note(self, text: str) -> None:
        self._emit("note", self._wrapped(one_line(text), self._style.dim))

    def _wrapped(self, text: str, style: Callable[[str], str]) -> list[str]:
        bullet = self._style.marks.bullet
        return [style(f"{bullet if i == 0 else ' '} {row}") for i, row in enumerate(wrap(text, self._width() - 2))]

    def _emit(self, block: str, rows: list[str]) -> None:
        """Let finished rows scroll up; not into the middle of what the model is saying."""
        if self._text_line is not None and block != "text":
            self._deferred.append((block, rows))
            return
        if self._block and (block != self._block or block == "user"):
            self._scroll.append("")
        self._block = block
        self._scroll += rows

    def _add_text(self, text: str) -> None:
        """Let whole rows scroll up; the last one stays in the region, since it grows."""
        if self._text_line is None:
            text = text.lstrip("\n")
            if not text:
                return
            self._block = "" if not self._block else "other"
            self._emit("text", [])
            self._text_line = ""
        *whole, last = clean(self._text_line + text).split("\n")
        for line in whole:
            self._emit("text", wrap(line, self._width()))
        *rows, self._text_line = wrap(last, self._width())
        self._emit("text", rows)

    def _close_text(self, void_reason: str = "") -> None:
        if self._text_line is None:
            return
        rows = [self._text_line] if self._text_line.strip() else []
        if void_reason:
            rows.append(self._style.dim(f"({void_reason})"))
        self._emit("text", rows)
        self._text_line = None
        deferred, self._deferred = self._deferred, []
        for block, held in deferred:
            self._emit(block, held)

    def _live_rows(self, now: datetime, columns: int, height: int) -> list[str]:
        width = min(columns - 1, MAX_TEXT_WIDTH)
        rows: list[str] = []
        if self._text_line is not None:
            rows.append(self._text_line)
            rows += [row for _, held in self._deferred for row in held][: height // 3]
        running = self._view.running_calls
        if running:
            if rows or (self._block and self._block != "calls"):
                rows.append("")
            room = max(1, height - len(rows) - 4)
            rows += running_call_rows(running, now, width, room, self._style)
        if rows or self._block:
            rows.append("")
        rows.append(self._style.dim(self._status(now, width)))
        if self._typed is not None:
            rows.append(f"{self._style.accent(self._style.marks.prompt)} {_end_of(self._typed, columns - 4)}")
        return rows

    def _status(self, now: datetime, width: int) -> str:
        view = self._view
        parts = [f"{self._style.spinner(now)} {self._doing(now)}"]
        if view.turns:
            parts.append(plural(view.turns, "turn"))
        if tokens := view.input_tokens + view.output_tokens:
            parts.append(plural(tokens, "token"))
        parts.append(duration(seconds_since(self._begin_time, now)))
        hints = ("type to steer, Ctrl-C stops", "Ctrl-C stops") if self._typed is not None else ("Ctrl-C stops",)
        lines = [" · ".join([*parts, hint]) for hint in hints]
        return next((line for line in lines if cell_len(line) <= width), clip(lines[-1], width))

    def _doing(self, now: datetime) -> str:
        rest = self._view.rest
        if (lost_s := self._connection.lost_for_s) >= LOST_SHOWN_S:
            return f"connection lost, waiting {duration(lost_s)}"
        if rest.session_state == session_pb2.SESSION_STATE_STOPPING:
            return "stopping"
        if rest.session_state == session_pb2.SESSION_STATE_WAITING_FOR_PROVIDER:
            wait_s = -seconds_before(rest.wake_time.ToDatetime(), now)
            return f"the provider asked to wait {duration(max(0.0, wait_s))}"
        if self._phase.word:
            waited = seconds_since(self._phase.since, now)
            return self._phase.word if waited < 1 else f"{self._phase.word} {duration(waited)}"
        running = len(self._view.running_calls)
        return f"{plural(running, 'call')} running" if running else "working"


def seconds_before(when: datetime, now: datetime) -> float:
    """Return seconds from naive UTC `when` to aware `now`; negative where `when` lies ahead."""
    return (now.replace(tzinfo=None) - when).total_seconds()


def _end_of(text: str, width: int) -> str:
    while cell_len(text) > width:
        text = text[1:]
    return text
