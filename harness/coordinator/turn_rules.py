"""When a turn starts, what it records, and how its failure is recorded. Pure."""

from __future__ import annotations

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from harness import context_builder
from harness.clock import instant, timestamp
from harness.context_builder.prompt import build_prompt, encode_prompt
from harness.coordinator import call_rules, inbox_rules, operation_rules
from harness.coordinator.draft import Draft
from harness.coordinator.protocol import CancelRequest, ModelFailed, SendRequest
from harness.operations import is_terminal
from harness.tools.presentation import heartbeat_text
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

FIRST_PROVIDER_WAIT_S = 5.0
MAX_PROVIDER_WAIT_S = 600.0
_WAITED_FOR = frozenset({llm_pb2.ERROR_CLASS_RATE_LIMIT, llm_pb2.ERROR_CLASS_OVERLOAD})


def take_failure(draft: Draft, failed: ModelFailed) -> None:
    """Record that a request ended without response; the session lives on."""
    failure = item_pb2.TurnFailure(turn_id=failed.turn_id, failure=failed.failure, attempts=failed.attempts)
    if failed.failure.error_class in _WAITED_FOR:
        wait_s = min(FIRST_PROVIDER_WAIT_S * 2**draft.state.provider_waits, MAX_PROVIDER_WAIT_S)
        resume_time = draft.now.wall_time + timedelta(seconds=wait_s)
        # A time that is over is no reason to ask without pause.
        if failed.failure.HasField("retry_time") and instant(failed.failure.retry_time) > draft.now.wall_time:
            resume_time = instant(failed.failure.retry_time)
        failure.resume_time.CopyFrom(timestamp(resume_time))
    draft.append(item_pb2.Item(turn_failure=failure))
    draft.update_volatile(request_turn_id="")


def start_turn_if_due(draft: Draft) -> None:
    """Start a turn where something is to be delivered and nothing forbids it."""
    _wake_with_heartbeat(draft)
    if draft.state.is_hard_stopping:
        _cancel_request(draft)
        return
    is_due = _is_due(draft)
    if (is_due or _is_out_of_time(draft)) and _stop_at_a_limit(draft):
        return
    if not is_due:
        return
    prompt = draft.state.prompt or _new_prompt(draft)
    if prompt is None:
        return
    _cancel_request(draft)
    turn = _turn(draft, prompt)
    draft.append(item_pb2.Item(turn=turn))
    draft.update_volatile(request_turn_id=turn.turn_id, grace_until_s=None, heartbeat_since_s=None)
    draft.effects.append(SendRequest(turn_id=turn.turn_id))


def heartbeat_deadline_s(draft: Draft) -> float | None:
    """Return when the model is to be woken with a note; None while there is no reason to."""
    since_s = draft.volatile.heartbeat_since_s
    return None if since_s is None else since_s + draft.environment.config.heartbeat_interval_s


def resume_deadline_s(draft: Draft) -> float | None:
    """Return when the provider's wait is over; None where there is none."""
    failure = draft.state.failure
    if failure is None or not failure.HasField("resume_time"):
        return None
    wait_s = (instant(failure.resume_time) - draft.now.wall_time).total_seconds()
    return draft.now.monotonic_s + wait_s


def wall_time_deadline_s(draft: Draft) -> float | None:
    """Return when the session's wall time is used up; None where it has no bound or nothing runs that it could end."""
    limits = draft.state.settings.limits
    if not limits.HasField("max_wall_time") or draft.state.is_hard_stopping:
        return None
    if not draft.state.calls and not draft.volatile.request_turn_id:
        return None
    age = draft.now.wall_time - draft.state.create_time
    return draft.now.monotonic_s + (limits.max_wall_time.ToTimedelta() - age).total_seconds()


def _is_out_of_time(draft: Draft) -> bool:
    deadline_s = wall_time_deadline_s(draft)
    return deadline_s is not None and deadline_s <= draft.now.monotonic_s


def _is_due(draft: Draft) -> bool:
    state = draft.state
    if state.is_held or state.is_over_recovery_limit or not state.has_work:
        return False
    if state.stop is not None and state.is_stop_complete:
        return False
    if state.failure is not None:
        resume_time = state.failure.resume_time
        if not state.failure.HasField("resume_time") or draft.now.wall_time < instant(resume_time):
            return False
    if draft.volatile.request_turn_id:
        return draft.interrupts
    return draft.interrupts or not call_rules.is_gathering(draft)


def _turn(draft: Draft, prompt: llm_pb2.BlobRef) -> item_pb2.Turn:
    state = draft.state
    settings = state.settings
    request = context_builder.next_request(
        state.context, provider=settings.provider, model=settings.model, prompt_digest=prompt.digest
    )
    return item_pb2.Turn(
        turn_id=f"{state.session_uid}-t{draft.next_sequence()}",
        previous_turn_id=state.latest_turn.turn_id if state.latest_turn is not None else "",
        kind=item_pb2.TURN_KIND_REGULAR,
        provider=settings.provider,
        model=settings.model,
        effort=settings.effort,
        prompt=prompt,
        context_digest=request.digest,
        totals=context_builder.totals_with_prompt(request, prompt).message(),
        changes=request.changes,
    )


def _new_prompt(draft: Draft) -> llm_pb2.BlobRef | None:
    """Return a new prompt's blob, or None where the workspace must be inspected first."""
    inspection = draft.state.inspection
    if inspection is None or not inspection.exists:
        _inspect_workspace(draft)
        return None
    settings = draft.state.settings
    prompt = build_prompt(
        system_prompt=settings.system_prompt,
        tools=draft.environment.tools.offered(settings.enabled_tools, inspection),
        inspection=inspection,
        heartbeat_interval_s=draft.environment.config.heartbeat_interval_s,
    )
    blob, data = encode_prompt(prompt)
    return draft.put_blob(data, blob.media_type)


def _inspect_workspace(draft: Draft) -> None:
    """Look at the workspace once for each time that a person asks for work."""
    state = draft.state
    unsettled = any(one.type == "inspect_workspace" and not is_terminal(one) for one in state.operations.values())
    if unsettled or state.inspection_id in state.operations:
        return
    spec = operation_pb2.Operation(
        type="inspect_workspace",
        type_version=1,
        effect_class=operation_pb2.EFFECT_CLASS_PURE,
        inspect_workspace=operation_pb2.InspectWorkspaceState(),
    )
    operation = call_rules.new_operation(draft, spec, operation_id=state.inspection_id, call_id="")
    draft.put_operation(operation)


def _cancel_request(draft: Draft) -> None:
    if draft.volatile.request_turn_id:
        draft.effects.append(CancelRequest(turn_id=draft.volatile.request_turn_id))
        draft.update_volatile(request_turn_id="")


def _stop_at_a_limit(draft: Draft) -> bool:
    """Stop a session that has used up what it may use; return whether it was stopped."""
    reason = _limit_reached(draft)
    if not reason:
        return False
    stop = item_pb2.Stop(mode=item_pb2.STOP_MODE_HARD, reason=reason, abandon_after=Duration(seconds=30))
    inbox_rules.record_control(draft, "limit", item_pb2.Control(stop=stop))
    _cancel_request(draft)
    operation_rules.cancel_unwanted(draft)
    call_rules.finish_calls(draft)
    return True


def _limit_reached(draft: Draft) -> str:
    limits, usage = draft.state.settings.limits, draft.state.usage
    if limits.HasField("max_wall_time"):
        max_wall_time = limits.max_wall_time.ToTimedelta()
        if draft.now.wall_time - draft.state.create_time >= max_wall_time:
            return f"LIMIT_WALL_TIME: the session is older than {max_wall_time.total_seconds():g} s"
    if limits.max_turns and draft.state.turns >= limits.max_turns:
        return f"LIMIT_TURNS: the limit of {limits.max_turns} turns is reached"
    if limits.max_tokens and usage.input_tokens + usage.output_tokens >= limits.max_tokens:
        return f"LIMIT_TOKENS: the limit of {limits.max_tokens} tokens is reached"
    return ""


def _wake_with_heartbeat(draft: Draft) -> None:
    """Keep the heartbeat's clock; record a heartbeat when it is due."""
    state, interval_s = draft.state, draft.environment.config.heartbeat_interval_s
    is_waiting = (
        interval_s > 0
        and bool(state.calls)
        and not draft.volatile.request_turn_id
        and not state.is_hard_stopping
        and not state.pending
        and state.failure is None
    )
    if not is_waiting:
        draft.update_volatile(heartbeat_since_s=None)
        return
    since_s = draft.volatile.heartbeat_since_s
    if since_s is None:
        draft.update_volatile(heartbeat_since_s=draft.now.monotonic_s)
        return
    if draft.now.monotonic_s < since_s + interval_s:
        return
    running = [
        item_pb2.RunningCall(call_id=call_id, tool_name=opened.call.name)
        for call_id, opened in sorted(state.calls.items())
    ]
    heartbeat = item_pb2.Heartbeat(
        reason=heartbeat_text(draft.now.monotonic_s - since_s, running), running_calls=running
    )
    inbox_rules.record_control(draft, "heartbeat", item_pb2.Control(heartbeat=heartbeat))
    draft.update_volatile(grace_until_s=None, heartbeat_since_s=None)
