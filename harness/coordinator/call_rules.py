"""From a response's calls to operations, and from ended operations to final results. Pure."""

from __future__ import annotations

import logging

from harness.clock import timestamp
from harness.context_builder.entries import BYTES_PER_TOKEN
from harness.coordinator.draft import Draft
from harness.coordinator.protocol import ModelAnswered
from harness.coordinator.state import OpenCall
from harness.coordinator.window_rules import window_tokens
from harness.operations import is_terminal
from harness.session_store import OPERATION_SCHEMA_VERSION
from harness.tools import Rejection
from harness.tools.rendering import render_operations
from harness.tools.truncation import cut_result
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

logger = logging.getLogger(__name__)

MAX_CALL_ID_CHARS = 64
"""What every provider takes back."""

_CUT_OFF = {
    llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS: (
        "Not executed: your answer was cut off at the output limit, so none of its calls was run. "
        "Make the calls again, with less in one answer."
    ),
    llm_pb2.STOP_REASON_REFUSED: "Not executed: the answer was refused, so none of its calls was run.",
}


def take_response(draft: Draft, answered: ModelAnswered) -> None:
    """Record a response with the first status, and the operations, of each of its calls."""
    output = _with_unique_call_ids(draft, answered.output)
    response = item_pb2.ModelResponse(turn_id=answered.turn_id, output=output)
    draft.append(item_pb2.Item(model_response=response))
    draft.update_volatile(request_turn_id="", grace_until_s=None)
    opened = [draft.state.calls[call_id] for call_id in draft.state.latest_response_calls]
    rejected = [_schedule(draft, call, output.stop_reason) for call in opened]
    if opened and not any(rejected):
        grace_until_s = draft.now.monotonic_s + draft.environment.config.grace_s
        draft.update_volatile(grace_until_s=grace_until_s)


def finish_calls(draft: Draft) -> None:
    """Record the final status of each call whose operations are all terminal."""
    for opened in sorted(draft.state.calls.values(), key=lambda one: one.order):
        operations = [draft.state.operations.get(one) for one in opened.operation_ids]
        ended = [one for one in operations if one is not None and is_terminal(one)]
        if not operations or len(ended) < len(operations):
            continue
        _append_final(draft, opened, _cut(draft, opened, _rendered(draft, opened, ended)))


def is_gathering(draft: Draft) -> bool:
    """Return whether results of the latest response are still waited for in their grace period."""
    until_s = draft.volatile.grace_until_s
    if until_s is None or draft.now.monotonic_s >= until_s:
        return False
    return any(call_id in draft.state.calls for call_id in draft.state.latest_response_calls)


def _schedule(draft: Draft, opened: OpenCall, stop_reason: llm_pb2.StopReason.ValueType) -> bool:
    """Record a call's first status; return whether the call was rejected."""
    cut_off = _CUT_OFF.get(stop_reason)
    translated: tuple[operation_pb2.Operation, ...] | Rejection
    translated = Rejection(message=cut_off) if cut_off else _translate_or_reject(draft, opened.call)
    if isinstance(translated, Rejection):
        part = llm_pb2.ContentPart(text=llm_pb2.TextPart(text=translated.message))
        result = item_pb2.CallResult(outcome=item_pb2.CALL_OUTCOME_REJECTED, parts=[part])
        _append_final(draft, opened, _cut(draft, opened, result))
        return True
    sequence = draft.next_sequence()
    operations = [
        new_operation(
            draft,
            spec,
            operation_id=f"{draft.state.session_uid}-{sequence}-{index}",
            call_id=opened.call.call_id,
        )
        for index, spec in enumerate(translated)
    ]
    status = item_pb2.ToolCallStatus(
        turn_id=opened.turn_id,
        call_id=opened.call.call_id,
        operation_ids=[one.operation_id for one in operations],
    )
    draft.append(item_pb2.Item(tool_call_status=status))
    for operation in operations:
        draft.put_operation(operation)
    return False


def new_operation(
    draft: Draft, spec: operation_pb2.Operation, *, operation_id: str, call_id: str
) -> operation_pb2.Operation:
    """Return an operation as it is first recorded: READY and assigned to nobody."""
    operation = operation_pb2.Operation()
    operation.CopyFrom(spec)
    operation.schema_version = OPERATION_SCHEMA_VERSION
    operation.operation_id = operation_id
    operation.session_id = draft.state.session_id
    operation.status = operation_pb2.OPERATION_STATUS_READY
    operation.step = 1
    operation.manager_name = draft.state.settings.manager_name
    operation.call_id = call_id
    operation.create_time.CopyFrom(timestamp(draft.now.wall_time))
    return operation


def _translate(draft: Draft, call: llm_pb2.ToolCall) -> tuple[operation_pb2.Operation, ...] | Rejection:
    tools, enabled, inspection = (
        draft.environment.tools,
        draft.state.turn_settings.enabled_tools,
        draft.state.inspection,
    )
    if inspection is None:
        # A fork inherits the prompt, not the inspection that it was made from: what was offered can't be known here.
        return tools.translate(call, {name for name in tools.names if not enabled or name in enabled})
    return tools.translate(call, {one.name for one in tools.offered(enabled, inspection)})


def _translate_or_reject(draft: Draft, call: llm_pb2.ToolCall) -> tuple[operation_pb2.Operation, ...] | Rejection:
    """Translate a call; a tool of the host's own that breaks must not end the session, now and at each resume."""
    try:
        return _translate(draft, call)
    except Exception:
        logger.exception("tool could not translate a call", extra={"tool": call.name, "call_id": call.call_id})
        return Rejection(message=f"The tool {call.name} is broken in this host; nothing was run. Go on without it.")


def _rendered(draft: Draft, opened: OpenCall, ended: list[operation_pb2.Operation]) -> item_pb2.CallResult:
    """Render a result; where the host's own tool can't, by the operations alone."""
    try:
        result = draft.environment.tools.render(opened.call, ended)
    except Exception:
        extra = {"tool": opened.call.name, "call_id": opened.call.call_id}
        logger.exception("tool could not render a result", extra=extra)
        return render_operations(ended)
    return result if result.parts and result.outcome else render_operations(ended)


def _append_final(draft: Draft, opened: OpenCall, result: item_pb2.CallResult) -> None:
    status = item_pb2.ToolCallStatus(
        turn_id=opened.turn_id,
        call_id=opened.call.call_id,
        operation_ids=opened.operation_ids,
        result=draft.with_long_texts_as_blobs(result),
    )
    draft.append(item_pb2.Item(tool_call_status=status))


def _cut(draft: Draft, opened: OpenCall, result: item_pb2.CallResult) -> item_pb2.CallResult:
    """Cut a result to a quarter of the model's window, and to its share of half of it."""
    window = window_tokens(draft)
    max_chars = window * BYTES_PER_TOKEN // max(4, 2 * opened.siblings)
    return cut_result(result, max_chars, "larger than a result's share of the model's window")


def _with_unique_call_ids(draft: Draft, output: llm_pb2.ModelOutput) -> llm_pb2.ModelOutput:
    """Return the output with missing, repeated and overlong call IDs replaced; a copy only where one was."""
    taken: set[str] = set()
    replaced: llm_pb2.ModelOutput | None = None
    for index, item in enumerate(output.items):
        if item.WhichOneof("item") != "tool_call":
            continue
        call_id = item.tool_call.call_id
        if not 1 <= len(call_id) <= MAX_CALL_ID_CHARS or call_id in taken or call_id in draft.state.call_ids:
            if replaced is None:
                replaced = llm_pb2.ModelOutput()
                replaced.CopyFrom(output)
            call = replaced.items[index].tool_call
            call.provider_call_id = call_id
            call_id = f"call-{draft.next_sequence()}-{index}-{draft.state.session_uid[:8]}"
            while call_id in taken or call_id in draft.state.call_ids:
                call_id += "x"
            call.call_id = call_id
        taken.add(call_id)
    return replaced if replaced is not None else output
