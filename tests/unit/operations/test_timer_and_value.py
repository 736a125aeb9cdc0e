"""Timer and value: the time itself is scheduled, also after a restart; a value needs nothing but to begin."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from harness.operations.operations import Step
from harness.operations.types.timer import TimerMachine
from harness.operations.types.value import ValueMachine
from harness.primitives.primitives import (
    Begin,
    CancelRequested,
    Event,
    PrimitiveFailed,
    ProcessNeverStarted,
    Recovered,
    ScheduleTimer,
    TimerFired,
)
from unreal_agent.operation.v1 import operation_pb2

Operation = operation_pb2.Operation

FIRE_TIME = datetime(2030, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
SCHEDULE = ScheduleTimer(fire_time=FIRE_TIME)
BEGIN, RECOVERED = Begin(workspace="/ws"), Recovered(workspace="/ws")

READY = operation_pb2.OPERATION_STATUS_READY
AWAITING = operation_pb2.OPERATION_STATUS_AWAITING
COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
FAILED = operation_pb2.OPERATION_STATUS_FAILED
CANCELED = operation_pb2.OPERATION_STATUS_CANCELED


def timer(status: operation_pb2.OperationStatus.ValueType = READY, step: int = 1) -> Operation:
    operation = Operation(
        type="timer", type_version=1, status=status, step=step, effect_class=operation_pb2.EFFECT_CLASS_PURE
    )
    operation.timer.fire_time.FromDatetime(FIRE_TIME)
    return operation


def value(text: str, status: operation_pb2.OperationStatus.ValueType = READY, step: int = 1) -> Operation:
    return Operation(
        type="value",
        type_version=1,
        status=status,
        step=step,
        effect_class=operation_pb2.EFFECT_CLASS_PURE,
        value=operation_pb2.ValueState(value_json=text),
    )


def test_a_timer_waits_for_its_time_and_completes() -> None:
    machine = TimerMachine()
    assert machine.validate(timer()) is None
    assert machine.advance(timer(), BEGIN) == Step(operation=timer(AWAITING, 2), dispatches=(SCHEDULE,))
    assert machine.advance(timer(AWAITING, 2), TimerFired()) == Step(operation=timer(COMPLETED, 3))


def test_a_timer_keeps_its_time_over_a_restart() -> None:
    awaiting = timer(AWAITING, 2)
    assert TimerMachine().advance(awaiting, RECOVERED) == Step(operation=awaiting, dispatches=(SCHEDULE,))


@pytest.mark.parametrize(
    ("event", "status", "reason"),
    [
        (CancelRequested(reason="enough"), CANCELED, "CANCELED"),
        (PrimitiveFailed(reason="X", message="y"), FAILED, "X"),
        (ProcessNeverStarted(), FAILED, "UNEXPECTED_EVENT"),
    ],
)
def test_a_timer_may_end_early(event: Event, status: operation_pb2.OperationStatus.ValueType, reason: str) -> None:
    step = TimerMachine().advance(timer(AWAITING, 2), event)
    assert (step.operation.status, step.operation.step, step.operation.error.reason) == (status, 3, reason)
    assert list(step.dispatches) == []
    assert TimerMachine().advance(step.operation, TimerFired()) == Step(operation=step.operation)


def test_a_timer_without_a_possible_time_is_refused() -> None:
    operation = timer()
    operation.timer.ClearField("fire_time")
    assert TimerMachine().validate(operation) == "fire_time is missing"
    operation.timer.fire_time.CopyFrom(Timestamp(seconds=2**50))
    assert TimerMachine().validate(operation) == "fire_time is out of range"
    operation = timer()
    operation.limits.timeout.CopyFrom(Duration(seconds=1))
    assert "no time limit" in (TimerMachine().validate(operation) or "")


@pytest.mark.parametrize("event", [BEGIN, RECOVERED])
def test_a_value_completes_at_once(event: Event) -> None:
    machine = ValueMachine()
    assert machine.validate(value('{"a": 1}')) is None
    assert machine.advance(value('{"a": 1}'), event) == Step(operation=value('{"a": 1}', COMPLETED, 2))


def test_a_value_may_end_early() -> None:
    for event, status in ((CancelRequested(reason=""), CANCELED), (TimerFired(), FAILED)):
        step = ValueMachine().advance(value("1"), event)
        assert step.operation.status == status
        assert ValueMachine().advance(step.operation, BEGIN) == Step(operation=step.operation)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, f'"{"x" * 2**20}"'])
def test_a_value_that_is_no_json_is_refused(text: str) -> None:
    assert (ValueMachine().validate(value(text)) or "").startswith("value_json is ")
