"""Steps operations: feeds events to their machines, journals what they decide, then acts on it and tells watchers.

Owns every operation that is remembered in full. It knows no request; the manager does. Journalling comes before acting:
what a step dispatches is dispatched, and what it changed is visible, once the journal is durable.
"""

from __future__ import annotations

import asyncio
import logging
import os
from asyncio import TaskGroup
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from harness import faults
from harness.clock import Clock, timestamp
from harness.operations.journal import JournalWriter, OperationRow, SessionRow, Submission
from harness.operations.operations import Step, is_terminal
from harness.operations.registry import StepMachines
from harness.operations.start_queue import StartQueue
from harness.operations.types.stepping import end_badly
from harness.operations.watch_hub import WatchHub
from harness.primitives import process_table
from harness.primitives.computations import Computations
from harness.primitives.primitives import (
    Begin,
    CancelRemoteJob,
    CancelRequested,
    Compute,
    Dispatch,
    Event,
    Recovered,
    RemoteJobHandler,
    RunRemoteJob,
    ScheduleTimer,
    StartProcess,
    StopProcess,
    WatchProcess,
)
from harness.primitives.processes import Place, Processes, ProcessSettings
from harness.primitives.remote_jobs import RemoteJobs
from harness.primitives.timers import Timers
from unreal_agent.operation.v1 import operation_pb2

logger = logging.getLogger(__name__)

BEFORE_DISPATCH = faults.declare("operations.dispatch.before", "a step is durable, its dispatches have not been done")
AFTER_DISPATCH = faults.declare("operations.dispatch.after", "a step's dispatches were done")
BEFORE_UPDATE = faults.declare("operations.update.before", "a state is durable, watchers have not been told")
AFTER_UPDATE = faults.declare("operations.update.after", "watchers were told of a state")


# More than can be buried during one look into the journal.
BURIED_LATELY = 10_000


@dataclass(slots=True)
class Entry:
    """One operation that is remembered in full."""

    decided: operation_pb2.Operation
    """Newest state, perhaps not yet durable. Replaced, never changed."""

    durable: operation_pb2.Operation
    """Newest state in the journal: what the outside sees."""

    workspace: str
    accept_order: int
    position: int
    """Of the durable state."""

    decided_position: int
    acknowledged_step: int = 0
    attempt: int = 0
    boot_id: str = ""
    has_files: bool = False
    is_discarded: bool = False
    accepted: asyncio.Future[None] | None = None
    """Done once the acceptance is durable; None: it is."""

    @property
    def operation_id(self) -> str:
        """Whose entry it is."""
        return self.decided.operation_id

    @property
    def session_id(self) -> str:
        """Its session."""
        return self.decided.session_id


def shrink(operation: operation_pb2.Operation) -> operation_pb2.Operation:
    """Return what a tombstone keeps."""
    return operation_pb2.Operation(
        schema_version=operation.schema_version,
        operation_id=operation.operation_id,
        session_id=operation.session_id,
        type=operation.type,
        type_version=operation.type_version,
        status=operation.status,
        step=operation.step,
        effect_class=operation.effect_class,
        manager_name=operation.manager_name,
        instance_id=operation.instance_id,
        call_id=operation.call_id,
        create_time=operation.create_time if operation.HasField("create_time") else None,
    )


def _forget(error: Exception) -> None:
    """Drop a step whose operation was refused."""


def _nothing() -> None:
    """Nobody waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine works with."""

    machines: StepMachines
    journal: JournalWriter
    hub: WatchHub
    clock: Clock
    directory: Path
    """Directory of the operations' own directories."""

    slots: int
    processes: ProcessSettings
    handlers: Sequence[RemoteJobHandler]


class Engine:
    """Every operation of one manager; all methods run on its loop."""

    def __init__(self, parts: EngineParts, sessions: Iterable[SessionRow], position: int, tasks: TaskGroup) -> None:
        """Begin without operations; `recover` brings those of the journal."""
        self._machines = parts.machines
        self._journal = parts.journal
        self._hub = parts.hub
        self._clock = parts.clock
        self.directory = parts.directory
        self.entries: dict[str, Entry] = {}
        self.sessions: dict[str, SessionRow] = {row.session_id: row for row in sessions}
        self.position = position
        """Latest position that is visible."""

        self.buried_lately: OrderedDict[str, operation_pb2.Operation] = OrderedDict()
        """Tombstones that a look into the journal may have been too early for."""

        self._next_position = position
        self._queue = StartQueue(parts.slots)
        self.processes = Processes(parts.processes, self.feed, tasks)
        self._computations = Computations(self.feed, tasks)
        self._timers = Timers(parts.clock, self.feed)
        self._remote_jobs = RemoteJobs(parts.handlers, self.feed, tasks)
        tasks.create_task(self.processes.run(), name="launcher")
        tasks.create_task(self._timers.run(), name="timers")
        self._is_closed = False

    @property
    def queue(self) -> StartQueue:
        """Who runs and who waits."""
        return self._queue

    async def aclose(self) -> None:
        """Feed nothing more and leave the processes to themselves."""
        self._is_closed = True
        self._computations.close()
        await self.processes.aclose()

    # --- operations come and go ---

    def recover(self, rows: Iterable[OperationRow]) -> None:
        """Take up operations of the journal, in the order in which they were accepted."""
        for row in rows:
            entry = Entry(
                decided=row.operation,
                durable=row.operation,
                workspace=row.workspace,
                accept_order=row.accept_order,
                position=row.position,
                decided_position=row.position,
                acknowledged_step=row.acknowledged_step,
                attempt=row.attempt,
                boot_id=row.boot_id,
                has_files=row.has_files,
                is_discarded=row.is_discarded,
            )
            self.entries[entry.operation_id] = entry
            if is_terminal(row.operation):
                if row.is_discarded:
                    self.bury(entry)
            elif row.operation.status == operation_pb2.OPERATION_STATUS_READY:
                self._queue.put(entry.session_id, entry.operation_id)
            else:
                self._queue.hold(entry.operation_id)
                self.feed(entry.operation_id, Recovered(workspace=row.workspace))
        self.start_waiting()

    def accept(self, entry: Entry) -> OperationRow:
        """Remember an operation whose acceptance is being journalled; return what to journal."""
        self._next_position += 1
        entry.position = entry.decided_position = self._next_position
        self.entries[entry.operation_id] = entry
        if not is_terminal(entry.decided):
            self._queue.put(entry.session_id, entry.operation_id)
        return self.row(entry)

    def accepted(self, entry: Entry) -> None:
        """Go on with an operation whose acceptance is durable."""
        assert entry.accepted is not None
        entry.accepted.set_result(None)
        entry.accepted = None
        self.position = max(self.position, entry.position)
        if is_terminal(entry.durable):
            self._publish(entry)

    def refuse(self, entry: Entry, error: Exception) -> None:
        """Forget an operation whose acceptance could not be journalled."""
        assert entry.accepted is not None
        del self.entries[entry.operation_id]
        self._queue.release(entry.operation_id)
        entry.accepted.set_exception(error)
        # Whoever added it has the error from its own submission.
        entry.accepted.exception()

    def start_waiting(self) -> None:
        """Begin operations while there are slots."""
        while (operation_id := self._queue.take()) is not None:
            entry = self.entries.get(operation_id)
            if entry is None or entry.decided.status != operation_pb2.OPERATION_STATUS_READY:
                self._queue.release(operation_id)
                continue
            self.feed(operation_id, Begin(workspace=entry.workspace))

    def row(self, entry: Entry) -> OperationRow:
        """Return an operation's row as it is now."""
        return OperationRow(
            operation=entry.decided,
            accept_order=entry.accept_order,
            workspace=entry.workspace,
            position=entry.decided_position,
            acknowledged_step=entry.acknowledged_step,
            attempt=entry.attempt,
            boot_id=entry.boot_id,
            is_discarded=entry.is_discarded,
            tombstone_time=None,
            has_files=entry.has_files,
        )

    def bury(self, entry: Entry) -> None:
        """Shrink a terminal operation to a tombstone; idempotent."""
        self.entries.pop(entry.operation_id, None)
        tombstone = self.buried_lately[entry.operation_id] = shrink(entry.decided)
        if len(self.buried_lately) > BURIED_LATELY:
            self.buried_lately.popitem(last=False)
        row = OperationRow(
            operation=tombstone,
            accept_order=entry.accept_order,
            workspace=entry.workspace,
            position=entry.position,
            acknowledged_step=entry.decided.step,
            attempt=entry.attempt,
            boot_id=entry.boot_id,
            is_discarded=entry.is_discarded,
            tombstone_time=self._clock.now(),
            has_files=entry.has_files,
        )
        self._journal.submit(Submission(rows=[row], written=_nothing, is_lazy=True))

    # --- stepping ---

    def feed(self, operation_id: str, event: Event) -> None:
        """Let an operation's machine decide upon an event."""
        entry = self.entries.get(operation_id)
        if entry is None or self._is_closed or is_terminal(entry.decided):
            return
        step = self._advance(entry, event)
        if step.operation is entry.decided:
            if step.dispatches:
                self._act(entry, step.dispatches)
            return
        self._journal_step(entry, step)

    def _advance(self, entry: Entry, event: Event) -> Step[Dispatch]:
        operation = entry.decided
        machine = self._machines.find(operation.type, operation.type_version)
        if machine is None:
            # Written by a newer release: left as it is for one that knows it.
            logger.error("operation has no step machine", extra={"operation_id": operation.operation_id})
            return Step(operation=operation)
        try:
            step = machine.advance(operation, event)
            if step.operation is not operation and step.operation.step <= operation.step:
                raise ValueError(f"step {step.operation.step} after {operation.step}")
        # A machine's mistake is the failure of this operation and no other.
        except Exception:
            logger.exception("step machine failed", extra={"operation_id": operation.operation_id})
            failed = operation_pb2.OPERATION_STATUS_FAILED
            message = "internal error of the operation's step machine"
            return Step(operation=end_badly(operation, failed, "INTERNAL_ERROR", message))
        return step

    def _journal_step(self, entry: Entry, step: Step[Dispatch]) -> None:
        operation = self._stamp(entry.decided, step.operation)
        directories = []
        if any(isinstance(dispatch, StartProcess) for dispatch in step.dispatches):
            entry.attempt += 1
            entry.boot_id = process_table.boot_id()
            directories.append(self.attempt_directory(entry))
        if any(isinstance(dispatch, StartProcess | Compute) for dispatch in step.dispatches):
            entry.has_files = True
        entry.decided = operation
        self._next_position += 1
        position = entry.decided_position = self._next_position

        def written() -> None:
            self._visible(entry, operation, position)
            self._act(entry, step.dispatches)

        # The first step of an operation shares the transaction of its acceptance, and fails with it.
        failed = None if entry.accepted is None else _forget
        is_lazy = not step.dispatches and not is_terminal(operation)
        rows = [self.row(entry)]
        self._journal.submit(
            Submission(rows=rows, directories=directories, written=written, failed=failed, is_lazy=is_lazy)
        )

    def _stamp(self, before: operation_pb2.Operation, after: operation_pb2.Operation) -> operation_pb2.Operation:
        now = timestamp(self._clock.now())
        if before.status == operation_pb2.OPERATION_STATUS_READY and not is_terminal(after):
            after.start_time.CopyFrom(now)
        if is_terminal(after):
            after.end_time.CopyFrom(now)
        return after

    def _visible(self, entry: Entry, operation: operation_pb2.Operation, position: int) -> None:
        entry.durable = operation
        entry.position = position
        self.position = max(self.position, position)
        faults.reach(BEFORE_UPDATE)
        if is_terminal(operation):
            self._settle(entry)
        if not entry.is_discarded:
            self._publish(entry)
        faults.reach(AFTER_UPDATE)

    def _publish(self, entry: Entry) -> None:
        self._hub.publish(entry.operation_id, self.owner_of(entry.session_id))

    def owner_of(self, session_id: str) -> str:
        """Return the coordinator that the session's latest add named; "" for none."""
        session = self.sessions.get(session_id)
        return session.owner if session else ""

    def _settle(self, entry: Entry) -> None:
        """Give back what a terminal operation holds."""
        operation_id = entry.operation_id
        self._timers.drop(operation_id)
        self._computations.drop(operation_id)
        self._remote_jobs.drop(operation_id)
        self._queue.release(operation_id)
        self.start_waiting()
        if entry.is_discarded:
            self.bury(entry)

    # --- dispatching ---

    def _act(self, entry: Entry, dispatches: Sequence[Dispatch]) -> None:
        if self._is_closed:
            return
        faults.reach(BEFORE_DISPATCH)
        for dispatch in dispatches:
            self._dispatch(entry, dispatch)
        if dispatches and all(isinstance(each, ScheduleTimer | RunRemoteJob | CancelRemoteJob) for each in dispatches):
            # Only what uses this machine counts against the bound: a timer may wait for days.
            self._queue.release(entry.operation_id)
            self.start_waiting()
        faults.reach(AFTER_DISPATCH)

    def _dispatch(self, entry: Entry, dispatch: Dispatch) -> None:
        operation_id = entry.operation_id
        match dispatch:
            case StartProcess():
                wanted = dispatch.working_directory
                directory = os.path.join(entry.workspace, wanted) if wanted else entry.workspace
                place = Place(workspace=entry.workspace, working_directory=directory)
                self.processes.start(operation_id, self.attempt_directory(entry), place, dispatch)
            case WatchProcess():
                self.processes.watch(operation_id, self.attempt_directory(entry), entry.boot_id, dispatch)
            case StopProcess():
                self.processes.stop(operation_id, self.attempt_directory(entry), entry.boot_id, dispatch)
            case Compute():
                self._computations.start(operation_id, self.attachments(operation_id), dispatch)
            case ScheduleTimer():
                self._timers.schedule(operation_id, dispatch.fire_time)
            case RunRemoteJob():
                self._remote_jobs.start(operation_id, dispatch)
            case CancelRemoteJob():
                self._remote_jobs.cancel(operation_id, dispatch)
            case _:
                assert_never(dispatch)

    def cancel(self, entry: Entry, reason: str) -> None:
        """Ask an operation to end."""
        self.feed(entry.operation_id, CancelRequested(reason=reason))

    # --- places ---

    def attempt_directory(self, entry: Entry) -> str:
        """Directory of the latest attempt to start a process."""
        return str(self.directory / entry.operation_id / str(entry.attempt))

    def attachments(self, operation_id: str) -> Path:
        """Directory of an operation's attachments; made by the first."""
        return self.directory / operation_id / "attachments"
