"""Contract of the primitives: what step machines ask for (dispatches) and what they are told (events).

Owns the vocabulary only: frozen values that never leave the process and are never stored. A step machine is pure:
`(operation, event) -> Step(operation, dispatches)`. The manager journals the new state, then performs the dispatches
in order, and feeds what they report back as events. A dispatch does not survive the manager: after a restart the
machine is told `Recovered` and dispatches anew what its effect class allows. Processes alone outlive the manager
(`WatchProcess`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeAlias

from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The operation's turn has come; it was journalled READY before. The first event of every operation."""

    workspace: str
    """Absolute path of the session's workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The manager was restarted after `Begin` had been journalled; no dispatch is under way."""

    workspace: str
    """Absolute path of the session's workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """Somebody wants it ended. May come in any state that is not terminal, and more than once."""

    reason: str
    """For the result; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStarted:
    """The command runs: its process recorded itself before it became bash."""

    process_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited:
    """The direct child exited and its exit record is whole. After a `StopProcess` nothing of it runs any more."""

    exit_code: int
    """As the shell counts: 128 + N for a signal N."""

    signal: str
    """For example "SIGKILL"; empty for an ordinary exit."""

    is_timed_out: bool
    """True where the time limit ended it."""

    is_stopped: bool
    """True where a `StopProcess` had been dispatched before it exited."""

    stdout: operation_pb2.CapturedOutput
    stderr: operation_pb2.CapturedOutput
    leftover_note: str
    """What it left running and what became of that, and why output is missing; empty if nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLost:
    """It was started, or may have been, and how it ended can't be known. Whatever was found of it has been ended."""

    reason: str
    message: str
    stdout: operation_pb2.CapturedOutput
    stderr: operation_pb2.CapturedOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessNeverStarted:
    """This attempt was certainly not started and never will be; another `StartProcess` makes another attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimitiveFailed:
    """A dispatch could not be done. Nothing of it had an effect, or none that matters."""

    reason: str
    """Stable UPPER_SNAKE constant."""

    message: str
    """One line for the model and a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCompleted:
    """The function of a `Compute` returned."""

    value: object
    """What it returned as `ComputeOutcome.value`."""

    attachments: Sequence[llm_pb2.BlobRef] = ()
    """Its attachments, already stored with the operation, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The time of a `ScheduleTimer` came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJobUpdated:
    """A handler reports that a job lives."""

    handle: str
    """The handler's reference, kept in the state and given back after a restart."""

    progress: str
    """One line for a person; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteJobEnded:
    """A handler reports the end of a job."""

    status: operation_pb2.OperationStatus.ValueType
    """COMPLETED, FAILED, CANCELED or OUTCOME_UNKNOWN."""

    result_json: str = ""
    """For COMPLETED."""

    reason: str = ""
    """UPPER_SNAKE, for the other statuses."""

    message: str = ""
    """One line, for the other statuses."""


Event: TypeAlias = (
    Begin
    | Recovered
    | CancelRequested
    | ProcessStarted
    | ProcessExited
    | ProcessLost
    | ProcessNeverStarted
    | PrimitiveFailed
    | ComputeCompleted
    | TimerFired
    | RemoteJobUpdated
    | RemoteJobEnded
)

# --- dispatches ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProcess:
    """Start bash with a text. At most one attempt ever becomes a command.

    Answered by `ProcessStarted` and then `ProcessExited` or `ProcessLost`; or by `PrimitiveFailed` where it could not
    be started (no such directory, no bash).
    """

    command: str
    working_directory: str
    """Absolute, or relative to the session's workspace; empty: the workspace."""

    timeout_s: float | None
    """None: no limit."""

    max_output_chars: int
    """Characters of each stream kept in the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchProcess:
    """Attach again to a process that was, or may have been, started before a restart.

    Answered as `StartProcess`, and by `ProcessNeverStarted` where the claim was free (the manager holds it now).
    """

    timeout_s: float | None
    max_output_chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProcess:
    """End the process and all that it started: TERM, grace, KILL. Idempotent.

    Answered once nothing of it runs any more: by `ProcessExited`, `ProcessLost` or `ProcessNeverStarted`.
    """

    max_output_chars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Bytes that go with an update."""

    data: bytes
    media_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOutcome:
    """What a compute function returns."""

    value: object
    attachments: Sequence[Attachment] = ()


class ComputeError(Exception):
    """Raised by a compute function that can't do its work; becomes `PrimitiveFailed`."""

    def __init__(self, reason: str, message: str) -> None:
        """Keep a stable UPPER_SNAKE reason and one line."""
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Call a function off the loop, in a thread.

    Answered by `ComputeCompleted` or `PrimitiveFailed` (reason of its `ComputeError`; COMPUTE_TIMEOUT; COMPUTE_FAILED
    for any other exception). A cancellation drops the answer and does not wait for the thread: a function must end by
    itself in bounded time, have no effect outside, and use a worker process of its own where its input is hostile.
    """

    function: Callable[..., ComputeOutcome]
    """A module-level function, so that dispatches compare equal."""

    arguments: Sequence[object]
    """Positional arguments, a tuple."""

    timeout_s: float
    """Seconds after which the answer is no longer awaited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimer:
    """Wait until a wall-clock time; answered by `TimerFired`, at once for a time in the past."""

    fire_time: datetime
    """Aware, UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRemoteJob:
    """Let the host's handler for the plan start the job, or pick it up by its handle.

    Answered by any number of `RemoteJobUpdated`, then `RemoteJobEnded`; or by `PrimitiveFailed` (UNSUPPORTED_PLAN where
    no handler or several fit, HANDLER_FAILED where it raised, HANDLER_STOPPED where it ended without an end).
    """

    plan_type: str
    plan_version: int
    plan_json: str
    handle: str
    """Empty: not known to be started; the operation ID names it too."""

    idempotency_key: str = ""
    """The host's own key, of an IDEMPOTENT job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRemoteJob:
    """Tell the handler to end the job; its end comes by the `RunRemoteJob` that runs."""

    plan_type: str
    plan_version: int
    handle: str
    reason: str


Dispatch: TypeAlias = (
    StartProcess | WatchProcess | StopProcess | Compute | ScheduleTimer | RunRemoteJob | CancelRemoteJob
)


class RemoteJobHandler(Protocol):
    """A host's own handler of one plan type and version."""

    @property
    def plan_type(self) -> str:
        """The plan type that it handles."""
        ...

    @property
    def plan_version(self) -> int:
        """The plan version that it handles."""
        ...

    def run(
        self, *, operation_id: str, plan_json: str, handle: str, idempotency_key: str
    ) -> AsyncIterator[RemoteJobUpdated | RemoteJobEnded]:
        """Start the job, or watch the one that `handle` names; ends with one `RemoteJobEnded`.

        Closing the iterator does not end the job. Called again after a restart of the manager. Where there was no
        `handle` yet, the operation's effect class says what that means: a PURE job may be started again, an IDEMPOTENT
        one with the same `idempotency_key` (empty for all others), a PROBEABLE one only after the job of
        `operation_id` was looked for and not found. For an AT_MOST_ONCE one it does not happen.
        """
        ...

    async def cancel(self, *, operation_id: str, handle: str, reason: str) -> None:
        """Ask for the job's end; idempotent. Its end is reported by `run`."""
        ...
