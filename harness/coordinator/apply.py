"""`apply`: the only thing that changes durable state. Pure, and the same in a draft, live and on replay.

Takes committed changes: items in sequence, operations as newest state. Operation states are coalesced, so the state
must not depend on the place of an operation's change among the items: whatever depends on order is an item.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from harness import context_builder
from harness.clock import instant
from harness.coordinator.stalls import Stall
from harness.coordinator.state import PROVIDER_FAILURES, WAITED_FOR, OpenCall, SeenInput, SessionState, StopRequest
from harness.inbox import fingerprint
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

DEFAULT_ABANDON_AFTER_S = 30.0


def apply(state: SessionState, change: item_pb2.Item | operation_pb2.Operation) -> SessionState:
    """Return the state after one committed change; neither argument is mutated."""
    if isinstance(change, operation_pb2.Operation):
        return _apply_operation(state, change)
    return _apply_item(state, change)


def apply_all(state: SessionState, changes: Iterable[item_pb2.Item | operation_pb2.Operation]) -> SessionState:
    """Return the state after several changes."""
    for change in changes:
        state = apply(state, change)
    return state


def merged_settings(
    settings: session_pb2.SessionSettings, patch: session_pb2.SettingsPatch
) -> session_pb2.SessionSettings:
    """Return settings with what a patch sets."""
    merged = session_pb2.SessionSettings()
    merged.CopyFrom(settings)
    for name in ("provider", "model", "effort", "system_prompt", "fallback_provider"):
        if patch.HasField(name):
            setattr(merged, name, getattr(patch, name))
    if patch.HasField("enabled_tools"):
        del merged.enabled_tools[:]
        merged.enabled_tools.extend(patch.enabled_tools.names)
    if patch.HasField("limits"):
        merged.limits.CopyFrom(patch.limits)
    return merged


def _apply_operation(state: SessionState, operation: operation_pb2.Operation) -> SessionState:
    if operation.call_id and operation.call_id in state.call_ids and operation.call_id not in state.calls:
        return state  # its call is final: nothing depends on it any more
    known = state.operations.get(operation.operation_id)
    if known is not None and known.step >= operation.step:
        return state
    return replace(state, operations=state.operations.set(operation.operation_id, operation))


def _apply_item(state: SessionState, item: item_pb2.Item) -> SessionState:
    state = replace(state, last_sequence=item.sequence, context=context_builder.advance(state.context, item))
    match item.WhichOneof("item"):
        case "input":
            state = _apply_input(state, item)
        case "turn":
            state = _apply_turn(state, item.turn)
        case "model_response":
            state = _apply_response(state, item.model_response)
        case "tool_call_status":
            state = _apply_status(state, item.tool_call_status)
        case "turn_failure":
            state = _apply_failure(state, item.turn_failure)
        case "fork":
            state = replace(
                state,
                stop=None,
                failure=None,
                crashes=0,
                is_turn_open=False,
                is_held=True,
                is_compaction_asked=False,
                compaction_failures=0,
            )
        case "compaction":
            state = replace(state, is_compaction_asked=False, compaction_failures=0, is_compacted=True)
        case None:
            pass
        case other:
            assert_never(other)
    if state.stop is not None and state.stop.has_input_after and state.is_stop_complete:
        state = replace(state, stop=None)
    return state


def _apply_input(state: SessionState, item: item_pb2.Item) -> SessionState:
    message = item.input
    seen = SeenInput(sequence=item.sequence, fingerprint=fingerprint(message))
    state = replace(state, inputs=state.inputs.set(message.input_id, seen))
    match message.WhichOneof("payload"):
        case "content":
            revived = _revive(state, item)
            return replace(revived, available=revived.available + 1, stall=Stall(), cut_off_answers=0)
        case "control":
            return _apply_control(state, item)
        case "crash":
            return replace(state, crashes=state.crashes + 1)
        case None:
            return state
        case other:
            assert_never(other)


def _revive(state: SessionState, item: item_pb2.Item) -> SessionState:
    """Let a session that rests go on: an external input came, or a retry."""
    failure = state.failure
    if failure is not None and not failure.HasField("resume_time"):
        failure = None
    stop = state.stop
    if stop is not None and state.is_stop_complete:
        stop = None
    elif stop is not None and stop.mode == item_pb2.STOP_MODE_HARD:
        stop = replace(stop, has_input_after=True)
    left = state.fallback_from
    if left is not None and not (left.HasField("retry_time") and instant(item.record_time) < instant(left.retry_time)):
        left = None  # the first provider is asked again
    return replace(
        state,
        failure=failure,
        stop=stop,
        crashes=0,
        is_held=False,
        revival_sequence=item.sequence,
        fallback_from=left,
        compaction_failures=0,
        is_compacted=False,
    )


def _apply_control(state: SessionState, item: item_pb2.Item) -> SessionState:
    control, sequence = item.input.control, item.sequence
    match control.WhichOneof("control"):
        case "stop":
            return _apply_stop(state, control.stop, sequence)
        case "heartbeat":
            is_hint = not control.heartbeat.running_calls
            stall = replace(state.stall, is_told=state.stall.is_told or is_hint)
            return replace(state, available=state.available + 1, stall=stall)
        case "settings":
            return _apply_settings(state, control.settings, sequence)
        case "cancel_operation":
            request = control.cancel_operation
            return replace(state, cancellations=state.cancellations.set(request.operation_id, request))
        case "retry_turn":
            return _apply_retry(state, control.retry_turn, item)
        case "compact":
            return replace(state, is_compaction_asked=True)
        case "abandon_operation" | None:
            return state
        case other:
            assert_never(other)


def _apply_settings(state: SessionState, patch: session_pb2.SettingsPatch, sequence: int) -> SessionState:
    breaks_prompt = patch.HasField("system_prompt") or patch.HasField("enabled_tools")
    names_provider = any(patch.HasField(name) for name in ("provider", "model", "fallback_provider"))
    stop = state.stop
    if stop is not None and stop.is_limit and patch.HasField("limits"):
        stop = None if state.is_stop_complete else replace(stop, has_input_after=True)
    return replace(
        state,
        settings=merged_settings(state.settings, patch),
        prompt=None if breaks_prompt else state.prompt,
        revival_sequence=sequence,
        fallback_from=None if names_provider else state.fallback_from,
        stop=stop,
    )


def _apply_stop(state: SessionState, stop: item_pb2.Stop, sequence: int) -> SessionState:
    if state.is_hard_stopping and stop.mode != item_pb2.STOP_MODE_HARD:
        return state  # a HARD stop can't be downgraded, and a complete one must not be woken by another stop
    abandon_after_s = (
        stop.abandon_after.ToTimedelta().total_seconds() if stop.HasField("abandon_after") else DEFAULT_ABANDON_AFTER_S
    )
    request = StopRequest(
        mode=stop.mode,
        reason=stop.reason,
        sequence=sequence,
        abandon_after_s=abandon_after_s,
        is_limit=stop.is_limit,
    )
    return replace(state, stop=request)


def _apply_retry(state: SessionState, retry: item_pb2.RetryTurn, item: item_pb2.Item) -> SessionState:
    state = replace(_revive(state, item), failure=None, wants_turn=True)
    if not retry.omit_new:
        return state
    context, must_answer = context_builder.omit_new(state.context)
    return replace(state, context=context, delivered=state.snapshot, wants_turn=must_answer)


def _apply_turn(state: SessionState, turn: item_pb2.Turn) -> SessionState:
    state = replace(state, failure=None)
    if turn.kind == item_pb2.TURN_KIND_COMPACTION:
        # What a regular turn without end was to do is still to be done once the summary is there.
        wants_turn = state.wants_turn or (state.is_turn_open and not state.is_compacting)
        return replace(state, latest_turn=turn, is_turn_open=True, turns=state.turns + 1, wants_turn=wants_turn)
    return replace(
        state,
        latest_turn=turn,
        is_turn_open=True,
        turns=state.turns + 1,
        turn_settings=state.settings,
        prompt=turn.prompt,
        snapshot=state.available,
        wants_turn=False,
        is_compaction_asked=False,
        compaction_failures=0,
    )


def _apply_response(state: SessionState, response: item_pb2.ModelResponse) -> SessionState:
    output = response.output
    failed = [one.usage for one in output.attempts if one.HasField("failure")]
    state = _with_usage(state, [output.usage, *failed])
    state = replace(state, is_turn_open=False, failure=None, provider_waits=0, crashes=0)
    if state.is_compacting:
        return replace(state, recorded_compactions=state.recorded_compactions + 1)
    calls = [one.tool_call for one in output.items if one.WhichOneof("item") == "tool_call"]
    opened = {
        call.call_id: OpenCall(
            call=call, turn_id=response.turn_id, siblings=len(calls), order=len(state.call_ids) + index
        )
        for index, call in enumerate(calls)
    }
    is_cut_off = output.stop_reason == llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS and not calls
    return replace(
        state,
        delivered=state.snapshot,
        recorded_outcomes=state.recorded_outcomes + 1,
        calls=state.calls.update(opened),
        call_ids=state.call_ids.update(opened),
        latest_response_calls=tuple(opened),
        is_compacted=False,
        cut_off_answers=state.cut_off_answers + 1 if is_cut_off else 0,
        stall=state.stall.with_response(tuple(opened)),
    )


def _apply_status(state: SessionState, status: item_pb2.ToolCallStatus) -> SessionState:
    call = state.calls.get(status.call_id)
    if call is None:
        return state
    if not status.HasField("result"):
        opened = replace(call, operation_ids=tuple(status.operation_ids))
        return replace(state, calls=state.calls.set(status.call_id, opened))
    settled = set(status.operation_ids) | set(call.operation_ids)
    settled.update(key for key, one in state.operations.items() if one.call_id == status.call_id)
    operations, cancellations = state.operations, state.cancellations
    for operation_id in settled:
        operations = operations.discard(operation_id)
        cancellations = cancellations.discard(operation_id)
    return replace(
        state,
        calls=state.calls.remove(status.call_id),
        operations=operations,
        cancellations=cancellations,
        available=state.available + 1,
        crashes=0,
        stall=state.stall.with_result(call.call, status.result),
    )


def _apply_failure(state: SessionState, failed: item_pb2.TurnFailure) -> SessionState:
    failure, goes_on = failed.failure, failed.HasField("resume_time")
    is_waited_for = failure.error_class in WAITED_FOR
    falls_back = goes_on and state.falls_back(failure)
    fallback_from = state.fallback_from
    if falls_back:
        fallback_from = failure
    elif failure.error_class in PROVIDER_FAILURES:
        fallback_from = None  # both fail: the first one is tried again next
    state = _with_usage(state, [one.usage for one in failed.attempts])
    state = replace(
        state,
        is_turn_open=False,
        failure=failed,
        provider_waits=state.provider_waits + 1 if goes_on and is_waited_for else 0,
        crashes=0,
        fallback_from=fallback_from,
    )
    if state.is_compacting:
        is_no_summary = goes_on and not falls_back and not is_waited_for
        return replace(
            state,
            compaction_failures=state.compaction_failures + 1 if is_no_summary else state.compaction_failures,
            recorded_compactions=state.recorded_compactions + 1,
            is_compaction_asked=state.is_compaction_asked and goes_on,
        )
    has_overflowed = goes_on and failure.error_class == llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW
    return replace(
        state,
        wants_turn=goes_on,
        recorded_outcomes=state.recorded_outcomes + 1,
        is_compaction_asked=has_overflowed,
    )


def _with_usage(state: SessionState, amounts: Iterable[llm_pb2.Usage]) -> SessionState:
    """Add what the latest turn has used."""
    model = state.latest_turn.model if state.latest_turn is not None else ""
    added = llm_pb2.Usage()
    for one in amounts:
        added = _added(added, one)
    of_model = _added(state.usage_by_model.get(model, llm_pb2.Usage()), added)
    return replace(state, usage=_added(state.usage, added), usage_by_model=state.usage_by_model.set(model, of_model))


def _added(total: llm_pb2.Usage, one: llm_pb2.Usage) -> llm_pb2.Usage:
    return llm_pb2.Usage(
        input_tokens=total.input_tokens + one.input_tokens,
        cached_input_tokens=total.cached_input_tokens + one.cached_input_tokens,
        cache_write_tokens=total.cache_write_tokens + one.cache_write_tokens,
        output_tokens=total.output_tokens + one.output_tokens,
        reasoning_tokens=total.reasoning_tokens + one.reasoning_tokens,
    )
