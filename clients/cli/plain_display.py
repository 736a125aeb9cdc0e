"""A session as plain lines, for a pipe, a file, or a terminal that can't move its cursor. Whole things only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import assert_never

from clients.cli.call_rows import ended_call_rows, started_call_row
from clients.cli.connection import Connection
from clients.cli.display import Heading, Summary, heading_line, summary_tail
from clients.cli.style import Style
from clients.cli.text import clean, one_line
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

WIDTH = 100
"""Cells of a row about a call; the model's words are never broken."""

SLOW_CALL_S = 2.0
"""A call that runs for longer is told of before it ends; so is a connection that is lost for longer."""

REMINDER_S = 30.0
"""How often it is told of again."""


class PlainDisplay:
    """Shows a run as lines."""

    def __init__(
        self, view: SessionView, style: Style, *, shows_history: bool = False, connection: Connection | None = None
    ) -> None:
        """Show what the view makes of a watch; `shows_history`: nothing runs, so nothing is said of slow calls."""
        self._connection = connection or Connection()
        self._has_told_of_loss = False
        self._view = view
        self._style = style
        self._shows_history = shows_history
        self._lines: list[str] = []
        self._block = ""
        self._told_of: dict[str, float] = {}
        self._has_received = False

    @property
    def tick_s(self) -> float | None:
        return None if self._shows_history else 1.0

    def begin(self, heading: Heading) -> None:
        self._emit("heading", [heading_line(heading)])

    def receive(self, response: coordinator_pb2.WatchSessionResponse) -> None:
        self._has_received = True
        for event in self._view.feed(response):
            self.show(event)

    def notice(self, text: str) -> None:
        self._emit("note", [f"{self._style.marks.bullet} {one_line(text)}"])

    def set_typed(self, text: str | None) -> None:
        """Nothing is typed into plain lines."""

    def redraw(self) -> None:
        """Nothing is drawn twice."""

    def erase(self) -> str:
        return ""

    def end(self, summary: Summary) -> None:
        line = f"{summary.word}{summary_tail(summary)}"
        self._emit("summary", [line, f"{summary.next_label}: {summary.next_command}"])

    def frame(self, now: datetime) -> str:
        if self._has_received and not self._shows_history:
            self._tell_of_loss()
            self._tell_of_slow_calls(now)
        lines, self._lines = self._lines, []
        return "".join(f"{line}\n" for line in lines)

    def show(self, event: ViewEvent) -> None:
        """Show one event."""
        match event:
            case UserSaid():
                first, *rest = clean(event.text).split("\n")
                self._emit("user", [f"{self._style.marks.prompt} {first}", *(f"  {line}" for line in rest)])
            case Noted():
                self.notice(event.text)
            case TextEnded():
                self._emit("text", clean(event.text).strip("\n").split("\n"))
            case CallEnded():
                self._told_of.pop(event.call.call_id, None)
                self._emit("calls", ended_call_rows(event.call, WIDTH, self._style))
            case TurnFailed():
                self.notice(f"the model could not answer: {event.failure}")
            case StateChanged():
                self._tell_of_waiting(event.rest)
            case (
                TextPiece() | TextVoided() | Thought() | TurnStarted() | CallPrepared() | CallStarted() | CallChanged()
            ):
                pass
            case _:
                assert_never(event)

    def _emit(self, block: str, lines: list[str]) -> None:
        if self._block and (block != self._block or block in ("user", "text")):
            self._lines.append("")
        self._block = block
        self._lines += [line.rstrip() for line in lines]

    def _tell_of_waiting(self, rest: session_pb2.Rest) -> None:
        if rest.session_state == session_pb2.SESSION_STATE_WAITING_FOR_PROVIDER:
            until = rest.wake_time.ToDatetime(tzinfo=UTC)
            self.notice(f"the provider asked to wait until {until:%H:%M:%S} UTC")

    def _tell_of_loss(self) -> None:
        lost_s = self._connection.lost_for_s
        if lost_s >= SLOW_CALL_S and not self._has_told_of_loss:
            self.notice("connection lost; going on when it is back")
        self._has_told_of_loss = lost_s >= SLOW_CALL_S

    def _tell_of_slow_calls(self, now: datetime) -> None:
        for call in self._view.running_calls:
            ran_s = seconds_since(call.start_time, now)
            if ran_s >= self._told_of.get(call.call_id, SLOW_CALL_S):
                told_again_s = ran_s + REMINDER_S
                self._told_of[call.call_id] = told_again_s
                self._emit("calls", [started_call_row(call, ran_s, WIDTH, self._style)])
