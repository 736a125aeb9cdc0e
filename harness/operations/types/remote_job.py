"""`remote_job` version 1: work of a host's own handler, found by plan type and version, of the class that it says.

The handler's reference to the job is kept in the state; after a restart a job with one is watched, never started again.
One without is run again with its key if it is PURE or IDEMPOTENT, asked for by the operation's ID if it is PROBEABLE,
and OUTCOME_UNKNOWN if it is AT_MOST_ONCE.
"""

from __future__ import annotations

from harness.operations.operations import TERMINAL_STATUSES, Step, is_terminal
from harness.operations.types.computing import cancel, fail, fail_unexpected
from harness.operations.types.stepping import end_badly, succeed
from harness.operations.types.validating import find_fault, find_json_fault
from harness.primitives.primitives import (
    Begin,
    CancelRemoteJob,
    CancelRequested,
    Dispatch,
    Event,
    PrimitiveFailed,
    Recovered,
    RemoteJobEnded,
    RemoteJobUpdated,
    RunRemoteJob,
)
from unreal_agent.operation.v1 import operation_pb2

Operation = operation_pb2.Operation

MAX_PLAN_TYPE_CHARS = 128
MAX_HANDLE_CHARS = 1_024
MAX_PROGRESS_CHARS = 500

# After these the handler's job may or may not have had its effect.
_UNKNOWN_OUTCOMES = frozenset({"HANDLER_FAILED", "HANDLER_STOPPED"})


class RemoteJobMachine:
    """Trusts a handler's reports only as far as they fit what it reported before."""

    operation_type = "remote_job"
    type_version = 1
    effect_classes = (
        operation_pb2.EFFECT_CLASS_PURE,
        operation_pb2.EFFECT_CLASS_IDEMPOTENT,
        operation_pb2.EFFECT_CLASS_PROBEABLE,
        operation_pb2.EFFECT_CLASS_AT_MOST_ONCE,
    )

    def validate(self, operation: Operation) -> str | None:
        """Refuse a plan that names no handler or is not JSON."""
        fault = find_fault(operation, "remote_job", self.effect_classes)
        if fault is not None:
            return fault
        state = operation.remote_job
        if not 1 <= len(state.plan_type) <= MAX_PLAN_TYPE_CHARS:
            return f"plan_type must have 1 to {MAX_PLAN_TYPE_CHARS} characters"
        if state.plan_version < 1:
            return "plan_version must be 1 or more"
        if operation.limits.HasField("timeout"):
            return "a remote job's time limit belongs into its plan: its handler alone can keep it"
        return find_json_fault("plan_json", state.plan_json)

    def advance(self, operation: Operation, event: Event) -> Step[Dispatch]:
        """Start or find the job, follow it, end it if asked."""
        if is_terminal(operation):
            return Step(operation=operation)
        match event:
            case Begin():
                awaiting = succeed(operation, operation_pb2.OPERATION_STATUS_AWAITING)
                return Step(operation=awaiting, dispatches=(_run(operation),))
            case Recovered():
                return _recover(operation)
            case CancelRequested():
                return _cancel(operation, event)
            case RemoteJobUpdated():
                return _update(operation, event)
            case RemoteJobEnded():
                return _end(operation, event)
            case PrimitiveFailed():
                return _fail(operation, event)
            case _:
                return Step(operation=fail_unexpected(operation, event), dispatches=(_stop(operation),))


def _run(operation: Operation) -> RunRemoteJob:
    state = operation.remote_job
    return RunRemoteJob(
        plan_type=state.plan_type,
        plan_version=state.plan_version,
        plan_json=state.plan_json,
        handle=state.handle,
        idempotency_key=operation.idempotency_key,
    )


def _recover(operation: Operation) -> Step[Dispatch]:
    is_once = operation.effect_class == operation_pb2.EFFECT_CLASS_AT_MOST_ONCE
    if not is_once or operation.remote_job.handle:
        return Step(operation=operation, dispatches=(_run(operation), *_repeat_cancellation(operation)))
    unknown = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN
    message = "the manager was restarted before the job's handler had named the job; it may have been started"
    return Step(
        operation=end_badly(operation, unknown, "MANAGER_RESTARTED", message),
        dispatches=(_stop(operation, message),),
    )


def _stop(operation: Operation, reason: str = "") -> CancelRemoteJob:
    state = operation.remote_job
    return CancelRemoteJob(
        plan_type=state.plan_type, plan_version=state.plan_version, handle=state.handle, reason=reason
    )


def _is_canceling(operation: Operation) -> bool:
    return operation.status == operation_pb2.OPERATION_STATUS_CANCELING


def _repeat_cancellation(operation: Operation) -> tuple[CancelRemoteJob, ...]:
    # The reason is not part of the state; the handler heard it unless the restart came between.
    return (_stop(operation, "canceled before a restart"),) if _is_canceling(operation) else ()


def _cancel(operation: Operation, event: CancelRequested) -> Step[Dispatch]:
    if operation.status == operation_pb2.OPERATION_STATUS_READY:
        return Step(operation=cancel(operation, event))
    canceling = operation
    if not _is_canceling(operation):
        canceling = succeed(operation, operation_pb2.OPERATION_STATUS_CANCELING)
    return Step(operation=canceling, dispatches=(_stop(operation, event.reason),))


def _update(operation: Operation, event: RemoteJobUpdated) -> Step[Dispatch]:
    known = operation.remote_job.handle
    if not 1 <= len(event.handle) <= MAX_HANDLE_CHARS:
        return _refuse(operation, f"its handle must have 1 to {MAX_HANDLE_CHARS:,} characters")
    if known and event.handle != known:
        return _refuse(operation, f"it reports on the job {event.handle[:100]!r}, but was given {known[:100]!r}")
    progress = " ".join(event.progress.split())[:MAX_PROGRESS_CHARS]
    if known and progress == operation.remote_job.progress:
        return Step(operation=operation)
    successor = succeed(operation, operation.status)
    successor.remote_job.handle = event.handle
    successor.remote_job.progress = progress
    # A cancellation that was asked for before the job had a handle may have found nothing to end.
    return Step(operation=successor, dispatches=() if known else _repeat_cancellation(successor))


def _end(operation: Operation, event: RemoteJobEnded) -> Step[Dispatch]:
    if event.status not in TERMINAL_STATUSES:
        return _refuse(operation, f"it reports the end with status {event.status}, which is none")
    if event.status != operation_pb2.OPERATION_STATUS_COMPLETED:
        reason = event.reason or operation_pb2.OperationStatus.Name(event.status).removeprefix("OPERATION_STATUS_")
        message = event.message or "the handler gave no message"
        return Step(operation=end_badly(operation, event.status, reason, message))
    fault = find_json_fault("result_json", event.result_json)
    if fault is not None:
        return _refuse(operation, fault)
    # Also while canceling: the job was faster, and its result is true.
    successor = succeed(operation, operation_pb2.OPERATION_STATUS_COMPLETED)
    successor.remote_job.result_json = event.result_json
    return Step(operation=successor)


def _refuse(operation: Operation, fault: str) -> Step[Dispatch]:
    """Fail by a report that breaks the contract, and have the job ended: nobody can follow it any more."""
    state = operation.remote_job
    message = f"the handler of {state.plan_type!r} version {state.plan_version} broke its contract: {fault}"
    return Step(
        operation=fail(operation, "INVALID_HANDLER_UPDATE", f"{message}; the job was asked to end"),
        dispatches=(_stop(operation, message),),
    )


def _fail(operation: Operation, event: PrimitiveFailed) -> Step[Dispatch]:
    # A job with a handle was started once, whatever has become of its handler.
    is_unknown = event.reason in _UNKNOWN_OUTCOMES or bool(operation.remote_job.handle)
    if event.reason == "INVALID_HANDLER_UPDATE":
        return _refuse(operation, event.message)
    if is_unknown:
        unknown = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN
        return Step(
            operation=end_badly(operation, unknown, event.reason, event.message),
            dispatches=(_stop(operation, event.message),),
        )
    return Step(operation=fail(operation, event.reason, event.message))
