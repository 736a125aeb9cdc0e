"""What happens in a session, from the stream of a watch to events for a person.

Pure: it reads no clock and does no I/O, and mutates no message. Deltas are ephemeral: whatever of them is lost or
repeated, what the recorded response says is told whole, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from clients.cli.call_text import call_title, content_text
from clients.cli.text import one_line
from clients.cli.view_events import (
    Call,
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
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

MAX_TAIL_CHARS = 8 * 1024
"""Live output kept per call: more than a screen shows."""

MAX_HELD_DELTAS = 256
"""Deltas kept until their turn begins; those of turns that were over drop out with the next turn."""


class SessionView:
    """Folds a watch of one session."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self.turns = 0
        """Turns since the beginning, or since `begin_run`; so are the tokens."""

        self.input_tokens = 0
        self.output_tokens = 0
        self.last_sequence = 0
        self.last_revision = 0
        self.rest = session_pb2.Rest()
        self.has_pending_work = False
        """True where the last turn is unanswered or something came after the last response."""

        self._calls: dict[str, Call] = {}
        self._ended: set[str] = set()
        self._begin_revisions: dict[str, int] = {}
        self._operations: dict[str, operation_pb2.Operation] = {}
        self._stream = _TextStream()
        self._is_compacting = False
        self._held: list[coordinator_pb2.ModelDelta] = []
        self._output_ends: dict[tuple[str, int], int] = {}

    @property
    def running_calls(self) -> list[Call]:
        """The calls that have no final result, in the model's order."""
        return [call for call_id, call in self._calls.items() if call_id not in self._ended]

    def begin_run(self, after_sequence: int, after_revision: int) -> None:
        """Let what was fed so far be history: what comes behind the two is counted and told anew.

        The watch begins where the oldest running call did, so that its operations, and with them their output, are sent
        once more.
        """
        self.turns = self.input_tokens = self.output_tokens = 0
        self.last_sequence = after_sequence
        begun = [self._begin_revisions.get(call.call_id, after_revision + 1) for call in self.running_calls]
        self.last_revision = min([after_revision, *(revision - 1 for revision in begun)])

    def feed(self, response: coordinator_pb2.WatchSessionResponse) -> list[ViewEvent]:
        """Return what one message of a watch tells, in order."""
        match response.WhichOneof("event"):
            case "change":
                change = response.change
                self.last_revision = max(self.last_revision, change.revision)
                rest = change.rest if change.HasField("rest") else None
                return self.feed_changes(change.items, change.operations, rest)
            case "model_delta":
                return self._feed_model_delta(response.model_delta)
            case "output_delta":
                return self._feed_output(response.output_delta)
            case "rest_reached":
                self.last_revision = max(self.last_revision, response.rest_reached.revision)
                return self._feed_rest(response.rest_reached.rest)
            case None:
                return []

    def feed_changes(
        self,
        items: Iterable[item_pb2.Item],
        operations: Iterable[operation_pb2.Operation],
        rest: session_pb2.Rest | None,
    ) -> list[ViewEvent]:
        """Return what items and operation states tell; also used for pages of history."""
        changed = self._keep_operations(operations)
        events: list[ViewEvent] = []
        told: set[str] = set()
        for item in items:
            if item.sequence and item.sequence <= self.last_sequence:
                continue
            self.last_sequence = item.sequence
            for event in self._feed_item(item):
                if isinstance(event, CallStarted | CallEnded):
                    told.add(event.call.call_id)
                events.append(event)
        running = [call_id for call_id in changed if call_id in self._calls and call_id not in self._ended | told]
        events += [CallChanged(call=self._refresh(call_id)) for call_id in running]
        return events + (self._feed_rest(rest) if rest is not None else [])

    def _keep_operations(self, operations: Iterable[operation_pb2.Operation]) -> list[str]:
        changed = []
        for operation in operations:
            known = self._operations.get(operation.operation_id)
            if known is None or operation.step >= known.step:
                self._operations[operation.operation_id] = operation
                if operation.call_id:
                    changed.append(operation.call_id)
        return changed

    def _refresh(self, call_id: str) -> Call:
        call = self._calls[call_id]
        newest = tuple(self._operations[key] for key in call.operation_ids if key in self._operations)
        call = self._calls[call_id] = replace(call, operations=newest)
        return call

    def _feed_item(self, item: item_pb2.Item) -> list[ViewEvent]:
        match item.WhichOneof("item"):
            case "input":
                return self._feed_input(item.input)
            case "turn":
                voided = self._stream.void("interrupted")
                return [*voided, *self._feed_turn(item.turn)]
            case "model_response":
                return self._feed_response(item)
            case "tool_call_status":
                self._begin_revisions.setdefault(item.tool_call_status.call_id, item.revision)
                return self._feed_status(item.tool_call_status)
            case "turn_failure":
                return self._feed_failure(item.turn_failure)
            case "compaction":
                return [Noted(text=f"turns up to item {item.compaction.through_sequence} are replaced by a summary")]
            case "fork":
                origin = item.fork.origin
                return [Noted(text=f"forked from {origin.parent_session_id} at item {origin.cut_sequence}")]
            case None:
                return []

    def _feed_turn(self, turn: item_pb2.Turn) -> list[ViewEvent]:
        self._stream = _TextStream(turn_id=turn.turn_id)
        self.has_pending_work = True
        self._is_compacting = turn.kind == item_pb2.TURN_KIND_COMPACTION
        if self._is_compacting:
            self._held.clear()
            return [Noted(text="summarising older turns, to make room in the model's context")]
        self.turns += 1
        events: list[ViewEvent] = [TurnStarted(turn_id=turn.turn_id, number=self.turns)]
        held, self._held = self._held, []
        for delta in held:
            events += self._feed_model_delta(delta)
        return events

    def _feed_model_delta(self, delta: coordinator_pb2.ModelDelta) -> list[ViewEvent]:
        if delta.turn_id == self._stream.turn_id:
            # A summary is the model's note to itself, nothing that it says to the user.
            return [] if self._is_compacting else self._stream.feed(delta)
        # Deltas may overtake the change that begins their turn, and with it what the model is answering to.
        if len(self._held) < MAX_HELD_DELTAS:
            self._held.append(delta)
        return []

    def _feed_input(self, entry: item_pb2.Input) -> list[ViewEvent]:
        match entry.WhichOneof("payload"):
            case "content":
                self.has_pending_work = True
                return [UserSaid(text=content_text(entry.content.parts), input_id=entry.input_id)]
            case "crash":
                return [Noted(text="the process that ran this session died; going on from its records")]
            case "control":
                return _control_notes(entry.control)
            case None:
                return []

    def _feed_response(self, item: item_pb2.Item) -> list[ViewEvent]:
        output = item.model_response.output
        self.input_tokens += output.usage.input_tokens
        self.output_tokens += output.usage.output_tokens
        if self._is_compacting:
            return []
        kinds = [entry.WhichOneof("item") for entry in output.items]
        # A response without calls ends its turn; calls owe the model their results.
        self.has_pending_work = "tool_call" in kinds
        texts = [entry.message.text for entry in output.items if entry.WhichOneof("item") == "message"]
        events = self._stream.end([text for text in texts if text])
        if output.stop_reason == llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS:
            events.append(Noted(text="the answer was cut off at the token limit"))
        elif output.stop_reason == llm_pb2.STOP_REASON_REFUSED:
            events.append(Noted(text="the model refused"))
        when = item.record_time.ToDatetime(tzinfo=UTC) if item.HasField("record_time") else None
        for entry in output.items:
            if entry.WhichOneof("item") == "tool_call":
                call = entry.tool_call
                self._calls[call.call_id] = Call(
                    call_id=call.call_id, tool_name=one_line(call.name), title=call_title(call), record_time=when
                )
        return events

    def _feed_status(self, status: item_pb2.ToolCallStatus) -> list[ViewEvent]:
        call = self._calls.get(status.call_id)
        if call is None:
            # The response lies before the history that was fed.
            call = Call(call_id=status.call_id, tool_name="", title=f"call {one_line(status.call_id)}")
        ids = tuple(status.operation_ids) or call.operation_ids
        self._calls[status.call_id] = replace(call, operation_ids=ids)
        call = self._refresh(status.call_id)
        if not status.HasField("result"):
            return [CallStarted(call=call)]
        if status.call_id in self._ended:
            return []
        self._ended.add(status.call_id)
        # The model has not seen it: the next turn shows it, where one follows.
        self.has_pending_work = True
        call = self._calls[status.call_id] = replace(call, result=status.result, tail="")
        return [CallEnded(call=call)]

    def _feed_failure(self, failed: item_pb2.TurnFailure) -> list[ViewEvent]:
        voided = self._stream.void("the request failed")
        resume = failed.resume_time.ToDatetime(tzinfo=UTC) if failed.HasField("resume_time") else None
        return [*voided, TurnFailed(failure=one_line(failed.failure.message), resume_time=resume)]

    def _feed_output(self, delta: coordinator_pb2.OutputDelta) -> list[ViewEvent]:
        operation = self._operations.get(delta.operation_id)
        if operation is None or operation.call_id not in self._calls or operation.call_id in self._ended:
            return []
        key = (delta.operation_id, delta.stream)
        known = self._output_ends.get(key, 0)
        fresh = delta.data[max(0, known - delta.offset) :]
        self._output_ends[key] = max(known, delta.offset + len(delta.data))
        if not fresh:
            return []
        call = self._calls[operation.call_id]
        # A character that is split between two pieces shows as a mark for a moment; the result has it whole.
        tail = call.tail + fresh.decode("utf-8", errors="replace")
        call = self._calls[operation.call_id] = replace(call, tail=tail[-MAX_TAIL_CHARS:])
        return [CallChanged(call=call)]

    def _feed_rest(self, rest: session_pb2.Rest) -> list[ViewEvent]:
        if rest == self.rest:
            return []
        self.rest = rest
        return [StateChanged(rest=rest)]


class _TextStream:
    """Words of the turn under way, as they came in pieces."""

    def __init__(self, *, turn_id: str = "") -> None:
        self.turn_id = turn_id
        self._attempt = 0
        self._text = ""
        self._has_gap = False

    def feed(self, delta: coordinator_pb2.ModelDelta) -> list[ViewEvent]:
        """Return what a delta of this turn adds; nothing of an older attempt."""
        if delta.attempt < self._attempt:
            return []
        events: list[ViewEvent] = []
        if delta.attempt > self._attempt:
            events += self.void("the request is repeated")
            self._attempt, self._has_gap = delta.attempt, False
        match delta.WhichOneof("delta"):
            case "text":
                events += self._add(delta.text, delta.offset)
            case "reasoning":
                events.append(Thought(text=delta.reasoning))
            case "tool_call":
                events.append(CallPrepared(tool_name=one_line(delta.tool_call.name)))
            case "attempt_failure":
                events += self.void("the request failed and is repeated")
                events.append(Noted(text=one_line(delta.attempt_failure.message)))
            case None:
                pass
        return events

    def _add(self, text: str, offset: int) -> list[ViewEvent]:
        known = len(self._text)
        if self._has_gap or offset > known:
            # What is missing comes with the response; telling the rest now would garble it.
            self._has_gap = True
            return []
        fresh = text[known - offset :]
        self._text += fresh
        return [TextPiece(text=fresh)] if fresh else []

    def void(self, reason: str) -> list[ViewEvent]:
        """Return that what was told so far does not count, if there was any."""
        had_text, self._text = bool(self._text), ""
        return [TextVoided(reason=reason)] if had_text else []

    def end(self, texts: list[str]) -> list[ViewEvent]:
        """Return what is missing of a response's texts, and their end."""
        whole = "".join(texts)
        told, self._text = self._text, ""
        if not whole:
            return [TextVoided(reason="not part of the recorded answer")] if told else []
        if whole.startswith(told):
            rest = whole[len(told) :] if told else "\n\n".join(texts)
            pieces: list[ViewEvent] = [TextPiece(text=rest)] if rest else []
        else:
            pieces = [TextVoided(reason="the recorded answer follows"), TextPiece(text="\n\n".join(texts))]
        return [*pieces, TextEnded(text="\n\n".join(texts))]


def _control_notes(control: item_pb2.Control) -> list[ViewEvent]:
    match control.WhichOneof("control"):
        case "stop":
            if control.stop.is_limit:
                return [Noted(text=_with_reason("stopped by a limit of the session", control.stop.reason))]
            how = "a stop" if control.stop.mode == item_pb2.STOP_MODE_HARD else "a stop when idle"
            return [Noted(text=_with_reason(f"{how} was asked for", control.stop.reason))]
        case "heartbeat":
            is_hint = not control.heartbeat.running_calls
            if is_hint:
                hint = control.heartbeat.reason.removeprefix("[hint] ").partition(". ")[0].removesuffix(".")
                return [Noted(text=_with_reason("the model is told", hint))]
            return [Noted(text=_with_reason("the model is woken", control.heartbeat.reason))]
        case "settings":
            names = sorted(field.name for field, _ in control.settings.ListFields())
            return [Noted(text=f"settings changed: {', '.join(names)}")]
        case "cancel_operation":
            target = control.cancel_operation
            return [Noted(text=_with_reason(f"cancelling operation {target.operation_id}", target.reason))]
        case "abandon_operation":
            target_given_up = control.abandon_operation
            told = f"operation {target_given_up.operation_id} is given up"
            return [Noted(text=_with_reason(told, target_given_up.reason))]
        case "retry_turn":
            return [Noted(text="the failed turn is tried again")]
        case "compact":
            return [Noted(text=_with_reason("a compaction was asked for", control.compact.reason))]
        case None:
            return []


def _with_reason(text: str, reason: str) -> str:
    return one_line(f"{text}: {reason}" if reason else text)


def seconds_since(when: datetime | None, now: datetime) -> float:
    """Return seconds from `when` to `now`, both aware or `when` naive UTC; 0 where `when` is None."""
    if when is None:
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (now - when).total_seconds())
