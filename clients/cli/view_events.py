"""What a person is told about a session, as values: made by the view, shown by the displays."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call as far as it is known."""

    call_id: str
    tool_name: str
    title: str
    """One cleaned line, for example "$ make test"."""

    operations: tuple[operation_pb2.Operation, ...] = ()
    """Newest states, in the order in which they were dispatched."""

    operation_ids: tuple[str, ...] = ()
    result: item_pb2.CallResult | None = None
    """Unset while the call runs."""

    tail: str = ""
    """End of the live output, at most a few KiB, as it came."""

    record_time: datetime | None = None
    """When the call was recorded."""

    @property
    def start_time(self) -> datetime | None:
        """When the first of its operations started; None before."""
        started = [op.start_time.ToDatetime() for op in self.operations if op.HasField("start_time")]
        return min(started) if started else None

    @property
    def elapsed_s(self) -> float | None:
        """How long its operations took from first start to last end; None where that is not known."""
        ended = [op.end_time.ToDatetime() for op in self.operations if op.HasField("end_time")]
        if self.start_time is None or not ended:
            return None
        return max(0.0, (max(ended) - self.start_time).total_seconds())


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSaid:
    """An input of a user was recorded."""

    text: str
    input_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Something happened that a person should know; one line."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted:
    """A model request was recorded and is about to be sent."""

    turn_id: str
    number: int
    """From 1, of those that this view has seen or was told of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece:
    """The model said more; pieces of one turn follow one another without gap."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextVoided:
    """What was streamed since the last end of text does not count."""

    reason: str
    """One line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEnded:
    """The model's words of one response are complete and recorded."""

    text: str
    """All of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """The model reasons; nothing of it need be shown but that it does."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPrepared:
    """The model is writing a call."""

    tool_name: str
    """Empty until known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted:
    """A call waits for its operations."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class CallChanged:
    """A running call's operations or output went on."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded:
    """A call has its final result."""

    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFailed:
    """A model request failed for good."""

    failure: str
    """One line."""

    resume_time: datetime | None
    """When the session goes on by itself; None where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged:
    """The session's state is another than before."""

    rest: session_pb2.Rest


ViewEvent = (
    UserSaid
    | Noted
    | TurnStarted
    | TextPiece
    | TextVoided
    | TextEnded
    | Thought
    | CallPrepared
    | CallStarted
    | CallChanged
    | CallEnded
    | TurnFailed
    | StateChanged
)
