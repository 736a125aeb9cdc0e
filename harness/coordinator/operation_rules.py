"""Life of a session's operations between coordinator and managers: reports, assignment, recovery, cancellation. Pure.

An operation has one author: the coordinator until it is assigned, then the manager. The one exception is an end as
OUTCOME_UNKNOWN, for an operation that is given up or whose instance is gone.
"""

from __future__ import annotations

from collections import defaultdict

from pyrsistent import pmap

from harness.clock import timestamp
from harness.coordinator.draft import Draft
from harness.coordinator.protocol import (
    Acknowledge,
    BlobSource,
    Dispatch,
    OperationRefused,
    OperationReported,
    ResolveReport,
    SendCancel,
)
from harness.operations import is_terminal
from unreal_agent.operation.v1 import operation_pb2

_RERUNNABLE = frozenset({operation_pb2.EFFECT_CLASS_PURE, operation_pb2.EFFECT_CLASS_IDEMPOTENT})


def take_report(draft: Draft, report: OperationReported) -> None:
    """Take a manager's newest state: a terminal one is recorded now, an intermediate one rides on the next commit."""
    operation = report.operation
    known = draft.state.operations.get(operation.operation_id)
    if known is None:
        draft.effects.append(ResolveReport(operation=operation))
        return
    if _is_another(known, operation):
        _refuse_namesake(draft, known, operation)
        return
    if is_terminal(known):
        if is_terminal(operation) or known.status == operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN:
            draft.effects.append(acknowledgement(known, operation))
        return
    if operation.step <= known.step:
        return
    if not is_terminal(operation):
        if operation.step <= _reported_step(draft, operation.operation_id):
            return
        if draft.volatile.reported_since_s is None:
            draft.update_volatile(reported_since_s=draft.now.monotonic_s)
        draft.update_volatile(reported=draft.volatile.reported.set(operation.operation_id, operation))
        return
    recorded = _as_recorded(known, operation)
    _name_attachment(draft, recorded, report)
    _forget_intermediate(draft, operation.operation_id)
    draft.put_operation(recorded)
    draft.effects.append(acknowledgement(recorded, recorded))


def _is_another(known: operation_pb2.Operation, reported: operation_pb2.Operation) -> bool:
    """Return whether a manager speaks of an operation that only has the same name: the store was an older copy then."""
    is_dated = known.HasField("create_time") and reported.HasField("create_time")
    return is_dated and known.create_time != reported.create_time


def _refuse_namesake(draft: Draft, known: operation_pb2.Operation, reported: operation_pb2.Operation) -> None:
    """End an operation whose name its manager has given away: it was never started, the other's result is not its."""
    if not is_terminal(known):
        message = (
            f"it was not started: its manager {known.manager_name!r} knows another operation of its name; "
            "the session store lost what was committed since, or is an older copy"
        )
        error = operation_pb2.OperationError(reason="NAME_TAKEN", message=message)
        _end(draft, known.operation_id, operation_pb2.OPERATION_STATUS_FAILED, error)
    # Nobody will ever ask for the other one: what still runs of it is ended.
    draft.effects.append(
        Acknowledge(
            manager_name=known.manager_name,
            operation_id=known.operation_id,
            step=reported.step,
            is_discarded=True,
        )
    )


def take_refusal(draft: Draft, refusal: OperationRefused) -> None:
    """End an operation that its manager did not accept: it never started, unless the manager once said that it had."""
    known = draft.state.operations.get(refusal.operation_id)
    is_begun = known is not None and known.status != operation_pb2.OPERATION_STATUS_READY
    # A manager whose journal was put back to an older copy knows nothing of what it did since.
    unknown, failed = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN, operation_pb2.OPERATION_STATUS_FAILED
    _end(draft, refusal.operation_id, unknown if is_begun else failed, refusal.error)


def record_intermediate(draft: Draft) -> None:
    """Add the intermediate states in hand to the draft where it is written anyway, or where they waited long enough."""
    deadline_s = intermediate_deadline_s(draft)
    if deadline_s is None or not (draft.items or draft.operations or draft.now.monotonic_s >= deadline_s):
        return
    for operation in draft.volatile.reported.values():
        known = draft.state.operations.get(operation.operation_id)
        if known is not None and not is_terminal(known) and known.step < operation.step:
            draft.put_operation(_as_recorded(known, operation))
    draft.update_volatile(reported=pmap(), reported_since_s=None)


def intermediate_deadline_s(draft: Draft) -> float | None:
    """Return when the intermediate states in hand get a commit of their own; None where there are none."""
    since_s = draft.volatile.reported_since_s
    return None if since_s is None else since_s + draft.environment.config.intermediate_state_delay_s


def recover(draft: Draft, manager_name: str, instance_id: str) -> None:
    """Settle what a manager that answers (again) has in hand: hand it over once more, or conclude by effect class."""
    again: list[operation_pb2.Operation] = []
    for operation in draft.state.unsettled():
        if operation.manager_name != manager_name or not operation.instance_id:
            continue
        if operation.instance_id == instance_id:
            again.append(operation)
        elif operation.effect_class in _RERUNNABLE:
            # What the gone instance said last would stand above the new one's steps.
            _forget_intermediate(draft, operation.operation_id)
            draft.put_operation(_restarted(operation))
        else:
            message = f"the manager {manager_name!r} came back without it; it may or may not have had its effect"
            give_up(draft, operation.operation_id, "INSTANCE_GONE", message)
    elsewhere = {one.operation_id for one in draft.state.unsettled() if one.manager_name != manager_name}
    draft.update_volatile(cancels_sent=draft.volatile.cancels_sent.intersection(elsewhere))
    if again:
        draft.effects.append(Dispatch(manager_name=manager_name, instance_id=instance_id, operations=tuple(again)))


def await_managers(draft: Draft) -> None:
    """Note since when managers are missed that have operations in hand, also those that nobody knows any more."""
    lost = draft.volatile.lost_since_s
    for operation in draft.state.unsettled():
        if operation.manager_name not in draft.volatile.instances and operation.manager_name not in lost:
            lost = lost.set(operation.manager_name, draft.now.monotonic_s)
    draft.update_volatile(lost_since_s=lost)


def assign(draft: Draft) -> None:
    """Assign recorded operations to manager instances, in order, as far as the bound on running ones allows."""
    if draft.state.is_hard_stopping:
        return
    limits = draft.state.settings.limits
    bound = limits.max_running_operations or draft.environment.config.max_running_operations
    unsettled = list(draft.state.unsettled())
    running = sum(1 for one in unsettled if one.instance_id)
    batches: dict[tuple[str, str], list[operation_pb2.Operation]] = defaultdict(list)
    for operation in unsettled:
        instance_id = draft.volatile.instances.get(operation.manager_name)
        if operation.instance_id or instance_id is None:
            continue
        if running >= bound:
            break
        running += 1
        assigned = operation_pb2.Operation()
        assigned.CopyFrom(operation)
        assigned.instance_id = instance_id
        assigned.step += 1
        draft.put_operation(assigned)
        batches[operation.manager_name, instance_id].append(assigned)
    for (manager_name, instance_id), operations in batches.items():
        draft.effects.append(Dispatch(manager_name=manager_name, instance_id=instance_id, operations=tuple(operations)))


def cancel_unwanted(draft: Draft) -> None:
    """Carry out a HARD stop and requested cancellations on everything that is not terminal."""
    state = draft.state
    for operation in list(state.unsettled()):
        request = state.cancellations.get(operation.operation_id)
        if not state.is_hard_stopping and request is None:
            continue
        reason = request.reason if request is not None else state.stop.reason if state.stop is not None else ""
        if not operation.instance_id:
            error = operation_pb2.OperationError(
                reason="CANCELED", message=f"canceled before it started{f': {reason}' if reason else ''}"
            )
            _end(draft, operation.operation_id, operation_pb2.OPERATION_STATUS_CANCELED, error)
        elif _is_given_up(draft, operation):
            message = f"its manager {operation.manager_name!r} could not be reached to cancel it"
            give_up(draft, operation.operation_id, "ABANDONED", message)
        elif (
            draft.volatile.instances.get(operation.manager_name) == operation.instance_id
            and operation.operation_id not in draft.volatile.cancels_sent
        ):
            draft.update_volatile(cancels_sent=draft.volatile.cancels_sent.add(operation.operation_id))
            draft.effects.append(
                SendCancel(manager_name=operation.manager_name, operation_id=operation.operation_id, reason=reason)
            )


def abandon_deadline_s(draft: Draft) -> float | None:
    """Return when the next operation of an unreachable manager is to be given up; None if none is."""
    deadlines = [
        deadline for operation in draft.state.unsettled() if (deadline := _abandon_at_s(draft, operation)) is not None
    ]
    return min(deadlines, default=None)


def give_up(draft: Draft, operation_id: str, reason: str, message: str) -> None:
    """End an operation as OUTCOME_UNKNOWN, or as CANCELED where it was never sent. A later report is discarded."""
    operation = draft.state.operations.get(operation_id)
    if operation is None or is_terminal(operation):
        return
    error = operation_pb2.OperationError(reason=reason, message=message)
    if not operation.instance_id:
        _end(draft, operation_id, operation_pb2.OPERATION_STATUS_CANCELED, error)
        return
    _end(draft, operation_id, operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN, error)
    if draft.volatile.instances.get(operation.manager_name) == operation.instance_id:
        draft.effects.append(
            Acknowledge(
                manager_name=operation.manager_name, operation_id=operation_id, step=operation.step, is_discarded=True
            )
        )


def acknowledgement(recorded: operation_pb2.Operation, reported: operation_pb2.Operation) -> Acknowledge:
    """Return what a manager is told of a report about an operation that is recorded as terminal."""
    return Acknowledge(
        manager_name=recorded.manager_name,
        operation_id=recorded.operation_id,
        step=reported.step,
        is_discarded=recorded.status != reported.status or recorded.step != reported.step,
    )


def _end(
    draft: Draft,
    operation_id: str,
    status: operation_pb2.OperationStatus.ValueType,
    error: operation_pb2.OperationError,
) -> None:
    operation = draft.state.operations.get(operation_id)
    if operation is None or is_terminal(operation):
        return
    ended = operation_pb2.Operation()
    ended.CopyFrom(operation)
    ended.status = status
    ended.step = max(operation.step, _reported_step(draft, operation_id)) + 1
    ended.error.CopyFrom(error)
    ended.end_time.CopyFrom(timestamp(draft.now.wall_time))
    _forget_intermediate(draft, operation_id)
    draft.put_operation(ended)


def _is_given_up(draft: Draft, operation: operation_pb2.Operation) -> bool:
    deadline = _abandon_at_s(draft, operation)
    return deadline is not None and draft.now.monotonic_s >= deadline


def _abandon_at_s(draft: Draft, operation: operation_pb2.Operation) -> float | None:
    lost_since_s = draft.volatile.lost_since_s.get(operation.manager_name)
    if lost_since_s is None or not operation.instance_id:
        return None
    waits: list[float] = []
    request = draft.state.cancellations.get(operation.operation_id)
    if request is not None and request.HasField("abandon_after"):
        waits.append(request.abandon_after.ToTimedelta().total_seconds())
    if draft.state.is_hard_stopping and draft.state.stop is not None:
        waits.append(draft.state.stop.abandon_after_s)
    return lost_since_s + min(waits) if waits else None


def _as_recorded(known: operation_pb2.Operation, reported: operation_pb2.Operation) -> operation_pb2.Operation:
    """Return a report with what only the coordinator may say."""
    recorded = operation_pb2.Operation()
    recorded.CopyFrom(reported)
    if recorded.WhichOneof("state") is None:  # a tombstone of the manager's
        merged = operation_pb2.Operation()
        merged.CopyFrom(known)
        merged.status, merged.step = reported.status, reported.step
        if reported.HasField("error"):
            merged.error.CopyFrom(reported.error)
        recorded = merged
    recorded.call_id = known.call_id
    recorded.manager_name = known.manager_name
    recorded.instance_id = known.instance_id
    recorded.create_time.CopyFrom(known.create_time)
    return recorded


def _restarted(operation: operation_pb2.Operation) -> operation_pb2.Operation:
    again = operation_pb2.Operation()
    again.CopyFrom(operation)
    again.status = operation_pb2.OPERATION_STATUS_READY
    again.instance_id = ""
    again.step += 1
    again.ClearField("start_time")
    return again


def _name_attachment(draft: Draft, operation: operation_pb2.Operation, report: OperationReported) -> None:
    if operation.view_image.HasField("image"):
        blob = operation.view_image.image
        draft.blobs[blob.digest] = BlobSource(blob=blob, data=report.attachments.get(blob.digest), operation=operation)


def _forget_intermediate(draft: Draft, operation_id: str) -> None:
    reported = draft.volatile.reported.discard(operation_id)
    since_s = draft.volatile.reported_since_s if reported else None
    draft.update_volatile(reported=reported, reported_since_s=since_s)


def _reported_step(draft: Draft, operation_id: str) -> int:
    reported = draft.volatile.reported.get(operation_id)
    return reported.step if reported is not None else 0
