"""Watches of a session, made by hand: what a coordinator would send."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

BEGIN = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)

RUNNING = session_pb2.Rest(state=session_pb2.REST_STATE_WORKING, session_state=session_pb2.SESSION_STATE_RUNNING)
IDLE = session_pb2.Rest(state=session_pb2.REST_STATE_AT_REST, session_state=session_pb2.SESSION_STATE_IDLE)


class Watch:
    """Numbers what a session sends."""

    def __init__(self) -> None:
        """Begin at the first item."""
        self.sequence = 0
        self._offsets: dict[tuple[str, str], int] = {}

    def change(
        self,
        *items: item_pb2.Item,
        operations: Sequence[operation_pb2.Operation] = (),
        rest: session_pb2.Rest | None = None,
    ) -> coordinator_pb2.WatchSessionResponse:
        """Return the changes of one commit."""
        for item in items:
            self.sequence += 1
            item.sequence = item.revision = self.sequence
            item.record_time.FromDatetime(BEGIN)
        change = store_pb2.WatchSessionResponse(
            revision=self.sequence, items=items, operations=operations, rest=rest, is_current=True
        )
        return coordinator_pb2.WatchSessionResponse(change=change)

    def text(
        self, turn_id: str, text: str, *, attempt: int = 1, offset: int | None = None
    ) -> coordinator_pb2.WatchSessionResponse:
        """Return a piece of the model's words; behind the one before where no offset is given."""
        key = (turn_id, str(attempt))
        at = self._offsets.get(key, 0) if offset is None else offset
        self._offsets[key] = at + len(text)
        delta = coordinator_pb2.ModelDelta(turn_id=turn_id, attempt=attempt, offset=at, text=text)
        return coordinator_pb2.WatchSessionResponse(model_delta=delta)

    def output(
        self, operation_id: str, data: bytes, *, offset: int | None = None
    ) -> coordinator_pb2.WatchSessionResponse:
        """Return a piece of a command's output."""
        key = (operation_id, "stdout")
        at = self._offsets.get(key, 0) if offset is None else offset
        self._offsets[key] = at + len(data)
        delta = coordinator_pb2.OutputDelta(
            operation_id=operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT, offset=at, data=data
        )
        return coordinator_pb2.WatchSessionResponse(output_delta=delta)


def user(text: str, input_id: str = "i1") -> item_pb2.Item:
    """Return a user's input."""
    part = llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))
    content = item_pb2.Content(parts=[part])
    return item_pb2.Item(input=item_pb2.Input(input_id=input_id, kind=item_pb2.INPUT_KIND_EXTERNAL, content=content))


def turn(turn_id: str) -> item_pb2.Item:
    """Return the record of a request."""
    return item_pb2.Item(turn=item_pb2.Turn(turn_id=turn_id, kind=item_pb2.TURN_KIND_REGULAR))


def response(turn_id: str, *texts: str, commands: Sequence[tuple[str, str]] = ()) -> item_pb2.Item:
    """Return a response with texts and Bash calls, given as (call ID, command)."""
    output = llm_pb2.ModelOutput(stop_reason=llm_pb2.STOP_REASON_COMPLETE)
    output.usage.input_tokens, output.usage.output_tokens = 100, 10
    for text in texts:
        output.items.add(message=llm_pb2.OutputMessage(text=text))
    for call_id, command in commands:
        arguments = json.dumps({"command": command})
        output.items.add(tool_call=llm_pb2.ToolCall(call_id=call_id, name="Bash", arguments_json=arguments))
    return item_pb2.Item(model_response=item_pb2.ModelResponse(turn_id=turn_id, output=output))


def started(call_id: str, *operation_ids: str) -> item_pb2.Item:
    """Return a call's first status."""
    return item_pb2.Item(
        tool_call_status=item_pb2.ToolCallStatus(turn_id="t", call_id=call_id, operation_ids=operation_ids)
    )


def ended(
    call_id: str,
    *operation_ids: str,
    outcome: item_pb2.CallOutcome.ValueType = item_pb2.CALL_OUTCOME_COMPLETED,
    text: str = "",
) -> item_pb2.Item:
    """Return a call's final status."""
    part = llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))
    result = item_pb2.CallResult(outcome=outcome, parts=[part])
    status = item_pb2.ToolCallStatus(turn_id="t", call_id=call_id, operation_ids=operation_ids, result=result)
    return item_pb2.Item(tool_call_status=status)


def running(operation_id: str, call_id: str, *, begin_s: float = 0.0) -> operation_pb2.Operation:
    """Return a command under way."""
    operation = operation_pb2.Operation(
        operation_id=operation_id,
        call_id=call_id,
        type="bash",
        type_version=1,
        status=operation_pb2.OPERATION_STATUS_AWAITING,
        step=1,
        bash=operation_pb2.BashState(phase=operation_pb2.BashState.PHASE_RUNNING),
    )
    operation.start_time.FromDatetime(BEGIN + timedelta(seconds=begin_s))
    return operation


def exited(
    operation_id: str, call_id: str, *, exit_code: int = 0, stdout: str = "", stderr: str = "", took_s: float = 1.0
) -> operation_pb2.Operation:
    """Return a command that ran to its end."""
    operation = running(operation_id, call_id)
    operation.step = 2
    operation.status = operation_pb2.OPERATION_STATUS_COMPLETED
    operation.end_time.FromDatetime(BEGIN + timedelta(seconds=took_s))
    operation.bash.has_exit, operation.bash.exit_code = True, exit_code
    operation.bash.stdout.head, operation.bash.stderr.head = stdout, stderr
    return operation
