"""The course that the types share whose whole work is one computation: compute, then complete or fail. Pure.

All of them are PURE: a cancellation ends them at once, and after a restart they compute again.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.operations.operations import Step, is_terminal
from harness.operations.types.stepping import end_badly, succeed
from harness.primitives.primitives import (
    Begin,
    CancelRequested,
    Compute,
    ComputeCompleted,
    Dispatch,
    Event,
    PrimitiveFailed,
    Recovered,
)
from unreal_agent.operation.v1 import operation_pb2

Operation = operation_pb2.Operation


def advance_computation(
    operation: Operation,
    event: Event,
    *,
    compute: Callable[[str], Compute],
    complete: Callable[[Operation, ComputeCompleted], bool],
) -> Step[Dispatch]:
    """Return the next step of an operation that does one computation.

    Args:
        operation: The state that the event meets; not changed.
        event: What happened.
        compute: Makes the dispatch, given the workspace.
        complete: Fills the successor with the result; returns False where the result is not one of its own.
    """
    if is_terminal(operation):
        return Step(operation=operation)
    match event:
        case Begin():
            return Step(
                operation=succeed(operation, operation_pb2.OPERATION_STATUS_AWAITING),
                dispatches=(limit_time(compute(event.workspace), operation),),
            )
        case Recovered():
            return Step(operation=operation, dispatches=(limit_time(compute(event.workspace), operation),))
        case CancelRequested():
            return Step(operation=cancel(operation, event))
        case PrimitiveFailed():
            return Step(operation=fail(operation, event.reason, event.message))
        case ComputeCompleted():
            successor = succeed(operation, operation_pb2.OPERATION_STATUS_COMPLETED)
            if complete(successor, event):
                return Step(operation=successor)
            return Step(operation=fail(operation, "COMPUTE_FAILED", "the computation returned something else"))
        case _:
            return Step(operation=fail_unexpected(operation, event))


def limit_time(dispatch: Compute, operation: Operation) -> Compute:
    """Return the dispatch with the operation's own time limit, where that is shorter."""
    limit_s = operation.limits.timeout.ToTimedelta().total_seconds()
    if not 0 < limit_s < dispatch.timeout_s:
        return dispatch
    return Compute(function=dispatch.function, arguments=dispatch.arguments, timeout_s=limit_s)


def cancel(operation: Operation, event: CancelRequested) -> Operation:
    """Return the operation as CANCELED, for one of which nothing runs that matters."""
    message = f"canceled: {event.reason}" if event.reason else "canceled"
    return end_badly(operation, operation_pb2.OPERATION_STATUS_CANCELED, "CANCELED", message)


def fail(operation: Operation, reason: str, message: str) -> Operation:
    """Return the operation as FAILED."""
    return end_badly(operation, operation_pb2.OPERATION_STATUS_FAILED, reason, message)


def fail_unexpected(operation: Operation, event: Event) -> Operation:
    """Return the operation as FAILED by an event that its type never asks for: a bug, kept to this operation."""
    message = f"an operation of type {operation.type!r} was told {type(event).__name__}, which it never asks for"
    return fail(operation, "UNEXPECTED_EVENT", message)
