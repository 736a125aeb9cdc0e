"""Contract of the displays: what shows a running session, to a person or to a program.

A display takes in what happens and hands out the text to be written; it writes nothing itself, so that a slow reader of
the output never holds up the session.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from clients.cli.text import duration, plural
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What a run begins with."""

    session_id: str
    provider: str
    model: str
    workspace: str
    is_resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run ends with."""

    word: str
    """How it ended: "done", "stopped", "failed"."""

    turns: int
    tokens: int
    elapsed_s: float
    session_id: str
    next_command: str
    """What to type to go on."""

    next_label: str
    """What that command does: "go on", "resume"."""


class Display(Protocol):
    """Shows one run."""

    @property
    def tick_s(self) -> float | None:
        """Seconds after which `frame` has news by itself; None where it never has."""
        ...

    def begin(self, heading: Heading) -> None:
        """Show what is run."""
        ...

    def receive(self, response: coordinator_pb2.WatchSessionResponse) -> None:
        """Take in one message of the watch."""
        ...

    def notice(self, text: str) -> None:
        """Say something in the command line's own words; one line."""
        ...

    def set_typed(self, text: str | None) -> None:
        """Show the line that is being typed; None where nothing can be typed."""
        ...

    def redraw(self) -> None:
        """Forget where the last frame was drawn: something else was written since."""
        ...

    def erase(self) -> str:
        """Return what takes everything that is not final off the screen: something else will be written next."""
        ...

    def end(self, summary: Summary) -> None:
        """Show how it ended. Nothing follows."""
        ...

    def frame(self, now: datetime) -> str:
        """Return what is to be written now; empty where nothing is."""
        ...


def heading_line(heading: Heading) -> str:
    """Return the first line of a run."""
    verb = "resuming session" if heading.is_resumed else "session"
    parts = (f"{verb} {heading.session_id}", model_words(heading.provider, heading.model), heading.workspace)
    return " · ".join(part for part in parts if part)


def model_words(provider: str, model: str) -> str:
    """Return provider and model, once where they are called the same."""
    return provider if model in ("", provider) else f"{provider} {model}"


def summary_tail(summary: Summary) -> str:
    """Return the last line of a run behind its first word."""
    parts = [plural(summary.turns, "turn")]
    if summary.tokens:
        parts.append(plural(summary.tokens, "token"))
    parts += [duration(summary.elapsed_s), f"session {summary.session_id}"]
    return "".join(f" · {part}" for part in parts)
