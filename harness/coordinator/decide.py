"""`decide`: from durable state, volatile facts and what happened, to one commit and its effects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from harness.coordinator import call_rules, inbox_rules, operation_rules, turn_rules, window_rules
from harness.coordinator.draft import Draft
from harness.coordinator.protocol import (
    Decision,
    Environment,
    InputArrived,
    Loaded,
    ManagerConnected,
    ManagerLost,
    ModelAnswered,
    ModelFailed,
    Now,
    OperationRefused,
    OperationReported,
    Stimulus,
    Volatile,
)
from harness.coordinator.rest import rest_of
from harness.coordinator.state import SessionState


def decide(
    environment: Environment,
    state: SessionState,
    volatile: Volatile,
    stimuli: Sequence[Stimulus],
    now: Now,
) -> Decision:
    """Return what follows from `stimuli`, gathered since the last decision in the order in which they came.

    With no stimuli it decides what the passing of time asks for. The order of the rules is the order of the items:
    inputs, final results, the response with its statuses, the turn that delivers them. What raced with a response is in
    the history before it.
    """
    draft = Draft(environment, state, volatile, now)
    answers: list[ModelAnswered | ModelFailed] = []
    for stimulus in stimuli:
        if isinstance(stimulus, ModelAnswered | ModelFailed):
            answers.append(stimulus)
        else:
            _take(draft, stimulus)
    call_rules.finish_calls(draft)
    for answer in answers:
        _take_answer(draft, answer)
    operation_rules.cancel_unwanted(draft)
    call_rules.finish_calls(draft)
    if draft.interrupts:
        draft.update_volatile(grace_until_s=None)
    turn_rules.start_turn_if_due(draft)
    operation_rules.assign(draft)
    operation_rules.record_intermediate(draft)
    return _decision(draft)


def _take(draft: Draft, stimulus: Stimulus) -> None:
    match stimulus:
        case Loaded():
            if stimulus.was_taken_over:
                inbox_rules.record_crash(draft)
            for manager_name, instance_id in sorted(draft.volatile.instances.items()):
                operation_rules.recover(draft, manager_name, instance_id)
            operation_rules.await_managers(draft)
        case InputArrived():
            inbox_rules.take_input(draft, stimulus)
        case OperationReported():
            operation_rules.take_report(draft, stimulus)
        case OperationRefused():
            operation_rules.take_refusal(draft, stimulus)
        case ManagerConnected():
            draft.update_volatile(
                instances=draft.volatile.instances.set(stimulus.manager_name, stimulus.instance_id),
                lost_since_s=draft.volatile.lost_since_s.discard(stimulus.manager_name),
            )
            operation_rules.recover(draft, stimulus.manager_name, stimulus.instance_id)
        case ManagerLost():
            since_s = draft.volatile.lost_since_s.get(stimulus.manager_name, draft.now.monotonic_s)
            draft.update_volatile(
                instances=draft.volatile.instances.discard(stimulus.manager_name),
                lost_since_s=draft.volatile.lost_since_s.set(stimulus.manager_name, since_s),
            )
        case ModelAnswered() | ModelFailed():
            raise AssertionError("model answers are taken after everything that raced with them")
        case _:
            assert_never(stimulus)


def _take_answer(draft: Draft, answer: ModelAnswered | ModelFailed) -> None:
    if answer.turn_id != draft.volatile.request_turn_id or draft.state.is_hard_stopping:
        return  # superseded or stopped: a late answer is dropped
    outcome: ModelAnswered | ModelFailed | None = answer
    if isinstance(answer, ModelAnswered) and draft.state.is_compacting:
        outcome = window_rules.take_summary(draft, answer)
    if isinstance(outcome, ModelAnswered):
        call_rules.take_response(draft, outcome)
        turn_rules.go_on_after_cut(draft)
    elif outcome is not None:
        turn_rules.take_failure(draft, outcome)


def _decision(draft: Draft) -> Decision:
    rest = rest_of(draft.state, draft.volatile, draft.now)
    if draft.items or draft.operations:
        draft.update_volatile(rest=rest)
    return Decision(
        items=tuple(draft.items),
        operations=tuple(draft.operations.values()),
        blobs=tuple(draft.blobs.values()),
        rest=rest,
        next_state=draft.state,
        next_volatile=draft.volatile,
        effects=tuple(draft.effects),
        answers=tuple(draft.answers),
        wake_s=_wake_s(draft),
    )


def _wake_s(draft: Draft) -> float | None:
    """Return when time alone changes what is decided. A deadline that has passed was decided just now."""
    deadlines = [
        turn_rules.heartbeat_deadline_s(draft),
        turn_rules.resume_deadline_s(draft),
        turn_rules.wall_time_deadline_s(draft),
        operation_rules.abandon_deadline_s(draft),
        operation_rules.intermediate_deadline_s(draft),
        draft.volatile.grace_until_s,
    ]
    return min((one for one in deadlines if one is not None and one > draft.now.monotonic_s), default=None)
