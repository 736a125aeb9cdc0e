"""When a turn starts, what it records, and how its failure is recorded. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from google.protobuf.duration_pb2 import Duration

from harness.clock import instant, timestamp
from harness.context_builder.prompt import build_prompt, encode_prompt
from harness.coordinator import call_rules, inbox_rules, operation_rules, window_rules
from harness.coordinator.draft import Draft
from harness.coordinator.protocol import CancelRequest, ModelFailed, SendRequest
from harness.coordinator.state import WAITED_FOR
from harness.operations import is_terminal
from harness.tools.presentation import heartbeat_text
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

FIRST_PROVIDER_WAIT_S = 5.0
MAX_PROVIDER_WAIT_S = 600.0

MAX_CUT_OFF_ANSWERS = 5
"""Answers in a row that end at the output limit without a call; then nobody gains by going on."""


def take_failure(draft: Draft, failed: ModelFailed) -> None:
    """Record that a request ended without response; the session lives on."""
    recorded, resume_time = _what_follows(draft, failed.failure)
    failure = item_pb2.TurnFailure(turn_id=failed.turn_id, failure=recorded, attempts=failed.attempts)
    if resume_time is not None:
        failure.resume_time.CopyFrom(timestamp(resume_time))
    draft.append(item_pb2.Item(turn_failure=failure))
    draft.update_volatile(request_turn_id="")


def _what_follows(draft: Draft, failure: llm_pb2.Failure) -> tuple[llm_pb2.Failure, datetime | None]:
    """Return a failure as it is recorded, and when the session goes on by itself; None: it does not."""
    state, now = draft.state, draft.now.wall_time
    if state.falls_back(failure):
        return failure, now
    if failure.error_class in WAITED_FOR:
        # A time that is over is no reason to ask without pause.
        if failure.HasField("retry_time") and instant(failure.retry_time) > now:
            return failure, instant(failure.retry_time)
        wait_s = min(FIRST_PROVIDER_WAIT_S * 2**state.provider_waits, MAX_PROVIDER_WAIT_S)
        return failure, now + timedelta(seconds=wait_s)
    if state.is_compacting:
        recorded, goes_on = window_rules.compaction_failure(draft, failure)
        return recorded, now if goes_on else None
    makes_room = failure.error_class == llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW and window_rules.can_compact(draft)
    return failure, now if makes_room else None


def go_on_after_cut(draft: Draft) -> None:
    """Tell the model that the answer just recorded was cut off at the output limit, so that it goes on."""
    cut_off = draft.state.cut_off_answers
    if cut_off >= MAX_CUT_OFF_ANSWERS:
        _stop(draft, f"OUTPUT_LIMIT: {cut_off} answers in a row were cut off", is_limit=False)
    elif cut_off:
        _hint(
            draft,
            "[hint] Your answer was cut off at the output limit. What you said is kept: go on where it ends, in smaller"
            " steps. This note comes from the harness, not from the user.",
        )


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
    if prompt is None or _stop_a_stall(draft):
        return
    _cancel_request(draft)
    turn = window_rules.next_turn(draft, prompt)
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
        return draft.interrupts and not state.is_compacting  # a summary makes room for the input too
    return draft.interrupts or not call_rules.is_gathering(draft)


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
    if reason:
        _stop(draft, reason, is_limit=True)
    return bool(reason)


def _stop(draft: Draft, reason: str, *, is_limit: bool) -> None:
    stop = item_pb2.Stop(
        mode=item_pb2.STOP_MODE_HARD, reason=reason, abandon_after=Duration(seconds=30), is_limit=is_limit
    )
    inbox_rules.record_control(draft, "limit", item_pb2.Control(stop=stop))
    _cancel_request(draft)
    operation_rules.cancel_unwanted(draft)
    call_rules.finish_calls(draft)


def _stop_a_stall(draft: Draft) -> bool:
    """Tell the model that it goes round in circles, once; stop the session where that did not help."""
    limit, stall = draft.environment.config.repeated_rounds, draft.state.stall
    rounds = stall.repetitions() if limit else 1
    if limit and rounds >= 2 * limit and stall.is_told:
        _stop(draft, f"STALLED: the same calls with the same results, {rounds} times in a row", is_limit=False)
        return True
    if limit and rounds >= limit and not stall.is_told:
        _hint(
            draft,
            f"[hint] You have made the same calls {rounds} times in a row, with the same arguments and results."
            " Making them again will bring nothing new. Try another way, or end your turn and say what holds you up."
            " This note comes from the harness, not from the user.",
        )
    return False


def _hint(draft: Draft, text: str) -> None:
    inbox_rules.record_control(draft, "hint", item_pb2.Control(heartbeat=item_pb2.Heartbeat(reason=text)))


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
    if limits.max_cost_micros and _cost_micros(draft) >= limits.max_cost_micros:
        return f"LIMIT_COST: the limit of {limits.max_cost_micros / 1_000_000:g} US dollars is reached"
    return ""


def _cost_micros(draft: Draft) -> float:
    """Return what the session has cost so far; a model without price costs nothing, for no turn asks one."""
    prices = ((draft.environment.price(model), usage) for model, usage in draft.state.usage_by_model.items())
    return sum(price.cost_micros(usage) for price, usage in prices if price is not None)


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
