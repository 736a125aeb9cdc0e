"""The step machine of a shell command: operation type "bash", version 1, AT_MOST_ONCE. Pure.

    READY ─Begin▶ AWAITING/STARTING ─ProcessStarted▶ AWAITING/RUNNING ─ProcessExited▶ COMPLETED/EXITED
    any of these ─CancelRequested▶ CANCELING ─the process's end▶ CANCELED

After a restart it watches; it starts again only where the claim proves that nothing was started.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.operations.operations import Step, is_terminal
from harness.operations.types.stepping import Operation, end_badly, succeed
from harness.operations.types.validating import find_fault
from harness.primitives.primitives import (
    Begin,
    CancelRequested,
    Dispatch,
    Event,
    PrimitiveFailed,
    ProcessExited,
    ProcessLost,
    ProcessNeverStarted,
    ProcessStarted,
    Recovered,
    StartProcess,
    StopProcess,
    WatchProcess,
)
from unreal_agent.operation.v1 import operation_pb2

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_OUTPUT_CHARS = 40_000
MAX_OUTPUT_CHARS = 1_000_000

BashState = operation_pb2.BashState


@dataclass(frozen=True, slots=True, kw_only=True)
class BashMachine:
    """Runs a command with bash."""

    default_timeout_s: float = DEFAULT_TIMEOUT_S
    """Seconds, where the operation names no limit."""

    default_output_chars: int = DEFAULT_OUTPUT_CHARS
    """Characters kept of each stream, where the operation names no limit."""

    @property
    def operation_type(self) -> str:
        """The type that it runs."""
        return "bash"

    @property
    def type_version(self) -> int:
        """The version that it runs."""
        return 1

    @property
    def effect_classes(self) -> tuple[operation_pb2.EffectClass.ValueType, ...]:
        """Nobody knows what a command does."""
        return (operation_pb2.EFFECT_CLASS_AT_MOST_ONCE,)

    def validate(self, operation: Operation) -> str | None:
        """Return why an operation can't be accepted, or None."""
        fault = find_fault(operation, "bash", self.effect_classes)
        if fault is not None:
            return fault
        if not operation.bash.command.strip():
            return "command must not be blank"
        if "\0" in operation.bash.command:
            return "command must not contain NUL"
        if "\0" in operation.bash.working_directory:
            return "working_directory must not contain NUL"
        if operation.limits.max_output_chars > MAX_OUTPUT_CHARS:
            return f"max_output_chars must be at most {MAX_OUTPUT_CHARS}"
        return None

    def advance(self, operation: Operation, event: Event) -> Step[Dispatch]:
        """Return the next state and what to do."""
        if is_terminal(operation):
            return Step(operation=operation)
        is_canceling = operation.status == operation_pb2.OPERATION_STATUS_CANCELING
        match event:
            case Begin() | ProcessNeverStarted() if not is_canceling:
                return self._start(operation)
            case Recovered():
                return self._recover(operation)
            case ProcessStarted():
                return self._started(operation, event)
            case CancelRequested():
                return self._cancel(operation, event)
            case ProcessExited() if not is_canceling:
                return Step(operation=self._exited(operation, event, operation_pb2.OPERATION_STATUS_COMPLETED))
            case ProcessExited():
                return Step(operation=self._exited(operation, event, operation_pb2.OPERATION_STATUS_CANCELED))
            case ProcessLost():
                return Step(operation=self._lost(operation, event, is_canceling=is_canceling))
            case PrimitiveFailed() if not is_canceling:
                failed = operation_pb2.OPERATION_STATUS_FAILED
                return Step(operation=end_badly(operation, failed, event.reason, event.message))
            case ProcessNeverStarted() | PrimitiveFailed():
                return Step(operation=succeed(operation, operation_pb2.OPERATION_STATUS_CANCELED))
            case _:
                return Step(operation=operation)

    def _timeout_s(self, operation: Operation) -> float:
        seconds = operation.limits.timeout.ToNanoseconds() / 1e9
        return seconds or self.default_timeout_s

    def _output_chars(self, operation: Operation) -> int:
        return operation.limits.max_output_chars or self.default_output_chars

    def _start(self, operation: Operation) -> Step[Dispatch]:
        successor = succeed(operation, operation_pb2.OPERATION_STATUS_AWAITING)
        successor.bash.phase = BashState.PHASE_STARTING
        start = StartProcess(
            command=operation.bash.command,
            working_directory=operation.bash.working_directory,
            timeout_s=self._timeout_s(operation),
            max_output_chars=self._output_chars(operation),
        )
        return Step(operation=successor, dispatches=(start,))

    def _recover(self, operation: Operation) -> Step[Dispatch]:
        chars = self._output_chars(operation)
        if operation.status == operation_pb2.OPERATION_STATUS_CANCELING:
            return Step(operation=operation, dispatches=(StopProcess(max_output_chars=chars),))
        watch = WatchProcess(timeout_s=self._timeout_s(operation), max_output_chars=chars)
        return Step(operation=operation, dispatches=(watch,))

    def _started(self, operation: Operation, event: ProcessStarted) -> Step[Dispatch]:
        if operation.bash.phase == BashState.PHASE_RUNNING and operation.bash.process_id == event.process_id:
            return Step(operation=operation)
        successor = succeed(operation, operation.status)
        successor.bash.phase = BashState.PHASE_RUNNING
        successor.bash.process_id = event.process_id
        return Step(operation=successor)

    def _cancel(self, operation: Operation, event: CancelRequested) -> Step[Dispatch]:
        if operation.status == operation_pb2.OPERATION_STATUS_CANCELING:
            return Step(operation=operation)
        message = event.reason or "cancelled"
        if operation.status == operation_pb2.OPERATION_STATUS_READY:
            canceled = operation_pb2.OPERATION_STATUS_CANCELED
            return Step(operation=end_badly(operation, canceled, "CANCELED", message))
        # The reason is kept in the state, so that it survives a restart before the end.
        successor = end_badly(operation, operation_pb2.OPERATION_STATUS_CANCELING, "CANCELED", message)
        return Step(operation=successor, dispatches=(StopProcess(max_output_chars=self._output_chars(operation)),))

    @staticmethod
    def _exited(
        operation: Operation, event: ProcessExited, status: operation_pb2.OperationStatus.ValueType
    ) -> Operation:
        successor = succeed(operation, status)
        state = successor.bash
        state.phase = BashState.PHASE_EXITED
        state.exit_code = event.exit_code
        state.has_exit = True
        state.signal = event.signal
        state.is_timed_out = event.is_timed_out
        state.stdout.CopyFrom(event.stdout)
        state.stderr.CopyFrom(event.stderr)
        state.leftover_note = event.leftover_note
        return successor

    @staticmethod
    def _lost(operation: Operation, event: ProcessLost, *, is_canceling: bool) -> Operation:
        if is_canceling:
            # Nothing of it runs any more, which is what was asked for.
            successor = succeed(operation, operation_pb2.OPERATION_STATUS_CANCELED)
        else:
            unknown = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN
            successor = end_badly(operation, unknown, event.reason, event.message)
        successor.bash.stdout.CopyFrom(event.stdout)
        successor.bash.stderr.CopyFrom(event.stderr)
        return successor
