"""`timer` version 1: waits until a wall-clock time, also over restarts. PURE."""

from __future__ import annotations

from harness.clock import instant
from harness.operations.operations import Step, is_terminal
from harness.operations.types.computing import cancel, fail, fail_unexpected
from harness.operations.types.stepping import succeed
from harness.operations.types.validating import find_fault
from harness.primitives.primitives import (
    Begin,
    CancelRequested,
    Dispatch,
    Event,
    PrimitiveFailed,
    Recovered,
    ScheduleTimer,
    TimerFired,
)
from unreal_agent.operation.v1 import operation_pb2


class TimerMachine:
    """Schedules the time itself and not what is left of it, so that a restart or a set clock changes nothing."""

    operation_type = "timer"
    type_version = 1
    effect_classes = (operation_pb2.EFFECT_CLASS_PURE,)

    def validate(self, operation: operation_pb2.Operation) -> str | None:
        """Refuse a missing or impossible time, and a time limit beside it."""
        fault = find_fault(operation, "timer", self.effect_classes)
        if fault is not None:
            return fault
        if not operation.timer.HasField("fire_time"):
            return "fire_time is missing"
        if operation.limits.HasField("timeout"):
            return "a timer has no time limit but its own time"
        try:
            instant(operation.timer.fire_time)
        except (ValueError, OverflowError):
            return "fire_time is out of range"
        return None

    def advance(self, operation: operation_pb2.Operation, event: Event) -> Step[Dispatch]:
        """Wait, then complete."""
        if is_terminal(operation):
            return Step(operation=operation)
        schedule = ScheduleTimer(fire_time=instant(operation.timer.fire_time))
        match event:
            case Begin():
                awaiting = succeed(operation, operation_pb2.OPERATION_STATUS_AWAITING)
                return Step(operation=awaiting, dispatches=(schedule,))
            case Recovered():
                return Step(operation=operation, dispatches=(schedule,))
            case TimerFired():
                return Step(operation=succeed(operation, operation_pb2.OPERATION_STATUS_COMPLETED))
            case CancelRequested():
                return Step(operation=cancel(operation, event))
            case PrimitiveFailed():
                return Step(operation=fail(operation, event.reason, event.message))
            case _:
                return Step(operation=fail_unexpected(operation, event))
