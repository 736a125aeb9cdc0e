"""The step machine of shell commands, over every order of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.operations.operations import is_terminal
from harness.operations.types.bash import MAX_OUTPUT_CHARS, BashMachine
from harness.primitives.primitives import (
    Begin,
    CancelRequested,
    Event,
    PrimitiveFailed,
    ProcessExited,
    ProcessLost,
    ProcessNeverStarted,
    ProcessStarted,
    Recovered,
    StartProcess,
    StopProcess,
    TimerFired,
    WatchProcess,
)
from tests.support.operations import bash
from unreal_agent.operation.v1 import operation_pb2

MACHINE = BashMachine(default_timeout_s=9.0, default_output_chars=100)
BashState = operation_pb2.BashState

STDOUT = operation_pb2.CapturedOutput(head="out", total_bytes=3)
STDERR = operation_pb2.CapturedOutput(head="err", total_bytes=3)
EXITED = ProcessExited(
    exit_code=143,
    signal="SIGTERM",
    is_timed_out=True,
    is_stopped=False,
    stdout=STDOUT,
    stderr=STDERR,
    leftover_note="note",
)
LOST = ProcessLost(reason="SUPERVISOR_LOST", message="lost", stdout=STDOUT, stderr=STDERR)
FAILED = PrimitiveFailed(reason="BASH_MISSING", message="no bash")

START = StartProcess(command="true", working_directory="below", timeout_s=9.0, max_output_chars=100)
WATCH = WatchProcess(timeout_s=9.0, max_output_chars=100)
STOP = StopProcess(max_output_chars=100)

events = st.sampled_from(
    [
        Begin(workspace="/w"),
        Recovered(workspace="/w"),
        CancelRequested(reason="enough"),
        ProcessStarted(process_id=7),
        ProcessNeverStarted(),
        EXITED,
        LOST,
        FAILED,
        TimerFired(),
    ]
)


def after(*happened: Event) -> operation_pb2.Operation:
    operation = bash("true", operation_id="o", working_directory="below")
    for event in happened:
        operation = MACHINE.advance(operation, event).operation
    return operation


BEGUN = (Begin(workspace="/w"),)
RUNNING = (*BEGUN, ProcessStarted(process_id=7))
CANCELING = (*RUNNING, CancelRequested(reason="enough"))


@given(st.lists(events, max_size=8))
def test_steps_only_grow_nothing_follows_the_end_and_no_state_is_changed(happened: list[Event]) -> None:
    operation = after()
    for event in happened:
        before = operation.SerializeToString(deterministic=True)
        step = MACHINE.advance(operation, event)
        assert operation.SerializeToString(deterministic=True) == before
        assert step.operation is operation or step.operation.step > operation.step
        assert not is_terminal(operation) or step.operation is operation
        assert (step.operation.operation_id, step.operation.type) == ("o", "bash")
        operation = step.operation


@pytest.mark.parametrize(
    "happened, event, status, phase, dispatches",
    [
        ((), Begin(workspace="/w"), "AWAITING", "STARTING", (START,)),
        (BEGUN, ProcessStarted(process_id=7), "AWAITING", "RUNNING", ()),
        (BEGUN, Recovered(workspace="/w"), "AWAITING", "STARTING", (WATCH,)),
        (BEGUN, ProcessNeverStarted(), "AWAITING", "STARTING", (START,)),
        (BEGUN, FAILED, "FAILED", "STARTING", ()),
        (BEGUN, LOST, "OUTCOME_UNKNOWN", "STARTING", ()),
        (RUNNING, Recovered(workspace="/w"), "AWAITING", "RUNNING", (WATCH,)),
        (RUNNING, ProcessStarted(process_id=7), "AWAITING", "RUNNING", ()),
        (RUNNING, EXITED, "COMPLETED", "EXITED", ()),
        (RUNNING, CancelRequested(reason="enough"), "CANCELING", "RUNNING", (STOP,)),
        ((), CancelRequested(reason="enough"), "CANCELED", "UNSPECIFIED", ()),
        (CANCELING, CancelRequested(reason="again"), "CANCELING", "RUNNING", ()),
        (CANCELING, Recovered(workspace="/w"), "CANCELING", "RUNNING", (STOP,)),
        (CANCELING, EXITED, "CANCELED", "EXITED", ()),
        (CANCELING, LOST, "CANCELED", "RUNNING", ()),
        (CANCELING, ProcessNeverStarted(), "CANCELED", "RUNNING", ()),
        (CANCELING, FAILED, "CANCELED", "RUNNING", ()),
        (RUNNING, TimerFired(), "AWAITING", "RUNNING", ()),
    ],
)
def test_step(
    happened: tuple[Event, ...], event: Event, status: str, phase: str, dispatches: tuple[object, ...]
) -> None:
    step = MACHINE.advance(after(*happened), event)
    assert operation_pb2.OperationStatus.Name(step.operation.status) == f"OPERATION_STATUS_{status}"
    assert BashState.Phase.Name(step.operation.bash.phase) == f"PHASE_{phase}"
    assert tuple(step.dispatches) == dispatches


def test_exit_is_recorded_whole() -> None:
    state = after(*RUNNING, EXITED).bash
    expected = BashState(
        command="true",
        working_directory="below",
        phase=BashState.PHASE_EXITED,
        process_id=7,
        exit_code=143,
        has_exit=True,
        signal="SIGTERM",
        is_timed_out=True,
        stdout=STDOUT,
        stderr=STDERR,
        leftover_note="note",
    )
    assert state == expected


def test_cancellation_keeps_its_reason_and_the_output() -> None:
    ended = after(*CANCELING, EXITED)
    assert (ended.error.reason, ended.error.message) == ("CANCELED", "enough")
    assert ended.bash.stdout == STDOUT


def test_lost_command_keeps_its_output_and_tells_why() -> None:
    ended = after(*RUNNING, LOST)
    assert (ended.error.reason, ended.error.message, ended.bash.stderr) == ("SUPERVISOR_LOST", "lost", STDERR)


def test_limits_of_the_operation_come_before_the_defaults() -> None:
    operation = bash("true", timeout_s=2.5, max_output_chars=7)
    (start,) = MACHINE.advance(operation, Begin(workspace="/w")).dispatches
    assert isinstance(start, StartProcess)
    assert (start.timeout_s, start.max_output_chars) == (2.5, 7)


@pytest.mark.parametrize("command", ["", " \n\t", "echo \0"])
def test_command_that_says_nothing_or_holds_nul_is_refused(command: str) -> None:
    assert MACHINE.validate(bash(command)) is not None


def test_other_faults_are_refused() -> None:
    assert MACHINE.validate(bash("true")) is None
    assert MACHINE.validate(bash("true", working_directory="a\0b")) is not None
    assert MACHINE.validate(bash("true", max_output_chars=MAX_OUTPUT_CHARS + 1)) is not None
    other = bash("true")
    other.value.value_json = "1"
    assert MACHINE.validate(other) is not None
