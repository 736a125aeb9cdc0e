"""An operation manager in this process: checks requests, has the engine run operations, answers watchers.

Owns a state directory: the journal, a directory per operation, the launcher's log. Commands outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sqlite3
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp

from harness import faults
from harness.clock import Clock, SystemClock, timestamp
from harness.errors import (
    HarnessError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from harness.operations import assignments, output_files, workspace_transfer
from harness.operations.engine import Engine, EngineParts, Entry
from harness.operations.journal import Journal, JournalContent, JournalWriter, OperationRow, SessionRow, Submission
from harness.operations.machines import default_machines
from harness.operations.manager_settings import LocalManagerSettings, Statistics
from harness.operations.manager_streams import ManagerStreams
from harness.operations.operations import is_terminal
from harness.operations.registry import Machine, StepMachines
from harness.operations.types.stepping import end_badly
from harness.operations.watch_hub import WatchHub
from harness.primitives.isolation import Isolation
from harness.primitives.processes import ProcessSettings
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.server.v1 import server_pb2

logger = logging.getLogger(__name__)

BEFORE_ACKNOWLEDGE = faults.declare("operations.acknowledge.before", "an acknowledgement came, nothing is journalled")
AFTER_ACKNOWLEDGE = faults.declare("operations.acknowledge.after", "an acknowledgement is journalled, not answered")

DEFAULT_PAGE = 256
MAX_PAGE = 1_000

PAGE_BYTES = 16 << 20
"""A page ends earlier where its states reach this size: one may hold megabytes of output."""


class LocalOperationManager:
    """Implements `OperationManager` in this process; made by `open`."""

    def __init__(
        self, name: str, state_directory: Path, settings: LocalManagerSettings, machines: StepMachines, clock: Clock
    ) -> None:
        """Use `open`."""
        self._name = name
        # Absolute, since commands and the launcher work elsewhere.
        self._directory = state_directory.absolute() / "operations"
        self._settings = settings
        self._machines = machines
        self._clock = clock
        self._hub = WatchHub()
        self._closing = asyncio.Event()
        self._closed = asyncio.Event()
        self._engine: Engine
        self._streams: ManagerStreams
        self._writer: JournalWriter
        self._journal: Journal
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._owner: asyncio.Task[None]
        self._accept_order = 0
        self._unwritten_sessions: set[str] = set()  # their rows go with the next write, should this one fail
        self.isolation = Isolation()
        """What holds for commands; looked at when it opens."""

        self.instance_id = ""
        """Made with the journal."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        state_directory: Path,
        *,
        name: str,
        settings: LocalManagerSettings | None = None,
        machines: Sequence[Machine] | None = None,
        clock: Clock | None = None,
    ) -> AsyncIterator[LocalOperationManager]:
        """Open a manager over its state directory, take up what ran, and close it at the end.

        Args:
            state_directory: Made where it is missing; open in one process at a time.
            name: The manager's name, as operations are assigned to it.
            settings: How it works.
            machines: Step machines; None: those of `default_machines`.
            clock: Tells the time.

        Raises:
            FailedPreconditionError: STATE_DIRECTORY_IN_USE, ISOLATION_UNAVAILABLE.
            UnsupportedError: UNSUPPORTED_JOURNAL_VERSION.
            DataLossError: JOURNAL_UNREADABLE.
        """
        table = StepMachines(default_machines() if machines is None else machines)
        manager = cls(name, state_directory, settings or LocalManagerSettings(), table, clock or SystemClock())
        # What the caller's own block raises is not wrapped into the group of the manager's tasks.
        raised: Exception | None = None
        async with TaskGroup() as owners:
            try:
                await manager._start(owners)
                yield manager
            except Exception as error:
                raised = error
            finally:
                await manager.aclose()
        if raised is not None:
            raise raised

    async def _start(self, owners: TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.isolation = await asyncio.to_thread(self._settings.establish_isolation, self._directory.parent)
        path = self._directory.parent / "journal.sqlite3"
        self._journal = await loop.run_in_executor(self._thread, Journal, path)
        content = await loop.run_in_executor(self._thread, self._journal.load)
        self._writer = JournalWriter(self._journal, self._thread)
        self.instance_id = content.instance_id
        self._accept_order = content.accept_order
        opened: asyncio.Future[None] = loop.create_future()
        self._owner = owners.create_task(self._own(content, opened), name=f"operation manager {self._name}")
        await opened
        logger.info(
            "operation manager opened",
            extra={"instance_id": self.instance_id, "remembered": len(content.rows), "manager_name": self._name},
        )

    async def _own(self, content: JournalContent, opened: asyncio.Future[None]) -> None:
        """Own every task of the manager until it is cancelled; they end with it."""
        async with TaskGroup() as tasks:
            parts = EngineParts(
                machines=self._machines,
                journal=self._writer,
                hub=self._hub,
                clock=self._clock,
                directory=self._directory,
                slots=self._settings.concurrency,
                processes=ProcessSettings(
                    environment=self._settings.environment,
                    grace_s=self._settings.grace_s,
                    file_size_limit_bytes=self._settings.file_size_limit_bytes,
                    launcher_log=self._directory.parent / "launcher.log",
                    isolation=self.isolation,
                ),
                handlers=self._settings.handlers,
            )
            self._engine = Engine(parts, content.sessions, content.position, tasks)
            tasks.create_task(self._writer.run(), name="journal")
            tasks.create_task(self._sweep_daily(), name="retention")
            self._streams = ManagerStreams(
                instance_id=self.instance_id,
                engine=self._engine,
                hub=self._hub,
                keepalive_s=self._settings.keepalive_s,
                closing=self._closing,
            )
            self._engine.recover(content.rows)
            opened.set_result(None)

    async def aclose(self) -> None:
        """Stop watching and give everything back; running commands run on. May be called twice."""
        if self._closing.is_set():
            await self._closed.wait()
            return
        self._closing.set()
        self._hub.wake_all()
        try:
            if hasattr(self, "_engine"):
                await self._engine.aclose()
                await self._writer.flush()
            if hasattr(self, "_owner"):
                self._owner.cancel()
                await asyncio.wait([self._owner])
        finally:
            if hasattr(self, "_journal"):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._journal.close)
            self._thread.shutdown(wait=False)
            self._closed.set()

    def statistics(self) -> Statistics:
        """Return a snapshot."""
        return Statistics(
            remembered=len(self._engine.entries),
            running=self._engine.queue.holders,
            waiting=self._engine.queue.waiting,
            watchers=self._hub.watchers,
            position=self._engine.position,
        )

    # --- requests ---

    async def get_server_info(self, request: manager_pb2.GetServerInfoRequest) -> manager_pb2.GetServerInfoResponse:
        """Say who answers."""
        versions = [server_pb2.VersionRange(kind="operation", min_read=1, max_read=1, write=1)]
        for machine in self._machines:
            number = machine.type_version
            kind = f"operation_type/{machine.operation_type}"
            versions.append(server_pb2.VersionRange(kind=kind, min_read=number, max_read=number, write=number))
        info = server_pb2.ServerInfo(
            component="operation-manager",
            name=self._name,
            instance_id=self.instance_id,
            release=_release(),
            versions=versions,
        )
        return manager_pb2.GetServerInfoResponse(
            info=info, operation_types=assignments.describe(self._machines), isolation=[self.isolation.described]
        )

    async def add_operations(self, request: manager_pb2.AddOperationsRequest) -> manager_pb2.AddOperationsResponse:
        """Accept operations durably and return their newest states."""
        self._check_open()
        assignments.check_instance(request.instance_id, self.instance_id)
        assignments.check_fences(request, self._engine.sessions)
        buried = await self._find_buried({each.operation.operation_id for each in request.assignments})
        # Looked at afresh: others were served meanwhile. Nothing is awaited from here to the acceptance.
        self._check_open()
        assignments.check_fences(request, self._engine.sessions)
        buried.update(self._engine.buried_lately)
        refusals: dict[str, operation_pb2.OperationError] = {}
        added: list[Entry] = []
        for assignment in request.assignments:
            self._add(assignment, buried, refusals, added)
        sessions = self._fence(request.fences, request.owner)
        await self._accept(added, sessions)
        await self._wait_accepted(request)
        return manager_pb2.AddOperationsResponse(
            instance_id=self.instance_id,
            results=[self._result(each.operation, buried, refusals) for each in request.assignments],
            position=self._engine.position,
        )

    async def _find_buried(self, operation_ids: set[str]) -> dict[str, operation_pb2.Operation]:
        """Return the tombstones among operations that are not remembered in full."""
        unknown = sorted(operation_ids - self._engine.entries.keys())
        rows = await self._writer.call(lambda journal: journal.find(unknown)) if unknown else {}
        return {operation_id: row.operation for operation_id, row in rows.items()}

    def _add(
        self,
        assignment: manager_pb2.OperationAssignment,
        buried: Mapping[str, operation_pb2.Operation],
        refusals: dict[str, operation_pb2.OperationError],
        added: list[Entry],
    ) -> None:
        operation = assignment.operation
        operation_id = operation.operation_id
        tombstone = buried.get(operation_id)
        known = self._engine.entries.get(operation_id)
        recorded = known.decided if known else tombstone
        if recorded is not None and recorded.session_id != operation.session_id:
            message = "the operation belongs to another session"
            refusals[operation_id] = operation_pb2.OperationError(reason="INVALID_OPERATION", message=message)
            return
        is_canceled_before = recorded is not None and recorded.step == 0
        if recorded is not None and not is_canceled_before:
            return
        refusal = assignments.find_refusal(assignment, self._machines)
        if refusal is not None:
            refusals[operation_id] = refusal
            return
        accepted = operation_pb2.Operation()
        accepted.CopyFrom(operation)
        if is_canceled_before:
            message = "it was cancelled before it was added"
            accepted = end_badly(accepted, operation_pb2.OPERATION_STATUS_CANCELED, "CANCELED", message)
            accepted.end_time.CopyFrom(self._now())
        self._accept_order += 1
        entry = Entry(
            decided=accepted,
            durable=accepted,
            workspace=assignment.workspace,
            accept_order=self._accept_order,
            position=0,
            decided_position=0,
            accepted=asyncio.get_running_loop().create_future(),
        )
        self._engine.accept(entry)
        added.append(entry)

    async def _accept(self, added: Sequence[Entry], sessions: Sequence[SessionRow]) -> None:
        rows = [self._engine.row(entry) for entry in added]

        def accepted() -> None:
            for entry in added:
                self._engine.accepted(entry)

        def refused(error: Exception) -> None:
            for entry in added:
                self._engine.refuse(entry, error)

        durable = self._submit(rows, sessions, accepted, refused)
        self._engine.start_waiting()  # a first step shares the transaction of its acceptance
        await durable

    async def _wait_accepted(self, request: manager_pb2.AddOperationsRequest) -> None:
        """Wait for operations that another request adds at this moment."""
        for assignment in request.assignments:
            entry = self._engine.entries.get(assignment.operation.operation_id)
            if entry is not None and entry.accepted is not None:
                await asyncio.shield(entry.accepted)

    def _result(
        self,
        asked: operation_pb2.Operation,
        buried: Mapping[str, operation_pb2.Operation],
        refusals: Mapping[str, operation_pb2.OperationError],
    ) -> manager_pb2.AddResult:
        operation_id = asked.operation_id
        if operation_id in refusals:
            return manager_pb2.AddResult(operation_id=operation_id, refusal=refusals[operation_id])
        entry = self._engine.entries.get(operation_id)
        operation = entry.durable if entry else self._engine.buried_lately.get(operation_id) or buried[operation_id]
        return manager_pb2.AddResult(operation_id=operation_id, operation=operation)

    async def cancel_operation(
        self, request: manager_pb2.CancelOperationRequest
    ) -> manager_pb2.CancelOperationResponse:
        """Start a cancellation, and return once it is durable. One of an unknown operation is kept for a late add."""
        self._check_open()
        if not assignments.is_identifier(request.operation_id):
            raise InvalidArgumentError(
                f"operation_id {request.operation_id!r} is no operation ID", reason="INVALID_OPERATION_ID"
            )
        assignments.check_fence(request.fence, self._engine.sessions)
        found: OperationRow | None = None
        if request.operation_id not in self._engine.entries:
            rows = await self._writer.call(lambda journal: journal.find([request.operation_id]))
            found = rows.get(request.operation_id)
            assignments.check_fence(request.fence, self._engine.sessions)
        entry = self._engine.entries.get(request.operation_id)
        known = entry.durable if entry else found and found.operation
        if known and known.session_id != request.fence.session_id:
            raise InvalidArgumentError(
                f"operation {request.operation_id!r} is not of session {request.fence.session_id!r}",
                reason="FENCE_MISMATCH",
            )
        sessions = self._fence([request.fence], None)
        if entry is None and found is not None:
            await self._submit([], sessions)
            buried = self._engine.buried_lately.get(request.operation_id, found.operation)
            return manager_pb2.CancelOperationResponse(operation=buried if buried.step > 0 else None)
        if entry is None:
            await self._submit([self._never_accepted(request)], sessions)
            return manager_pb2.CancelOperationResponse()
        if entry.accepted is not None:
            await asyncio.shield(entry.accepted)
        await self._end(entry, request.reason, is_discarded=request.discard, sessions=sessions)
        return manager_pb2.CancelOperationResponse(operation=entry.durable)

    def _never_accepted(self, request: manager_pb2.CancelOperationRequest) -> OperationRow:
        """Return a tombstone of step 0: an add that comes late finds it, and starts nothing."""
        self._accept_order += 1
        operation = operation_pb2.Operation(
            operation_id=request.operation_id,
            session_id=request.fence.session_id,
            status=operation_pb2.OPERATION_STATUS_CANCELED,
        )
        return OperationRow(
            operation=operation,
            accept_order=self._accept_order,
            workspace="",
            position=0,
            acknowledged_step=0,
            attempt=0,
            boot_id="",
            is_discarded=request.discard,
            tombstone_time=self._clock.now(),
            has_files=False,
        )

    async def _end(self, entry: Entry, reason: str, *, is_discarded: bool, sessions: Sequence[SessionRow] = ()) -> None:
        """Cancel, and wait until that is durable."""
        engine = self._engine
        if is_terminal(entry.decided):
            if is_discarded and entry.durable is entry.decided:
                engine.bury(entry)
            entry.is_discarded = entry.is_discarded or is_discarded
            await self._submit([], sessions)
            return
        entry.is_discarded = entry.is_discarded or is_discarded
        engine.cancel(entry, reason)
        # After the cancellation's own step in the journal's order; a discard changes the row alone.
        rows = [engine.row(entry)] if is_discarded else []
        await self._submit(rows, sessions)

    async def get_operation(self, request: manager_pb2.GetOperationRequest) -> manager_pb2.GetOperationResponse:
        """Return one operation's newest state; of an acknowledged one what its tombstone keeps."""
        return manager_pb2.GetOperationResponse(operation=(await self._find(request.operation_id))[0])

    async def _find(self, operation_id: str) -> tuple[operation_pb2.Operation, int]:
        """Return an operation's newest state and its number of attempts."""
        self._check_open()
        entry = self._engine.entries.get(operation_id)
        if entry is not None and entry.accepted is None:
            return entry.durable, entry.attempt
        rows = await self._writer.call(lambda journal: journal.find([operation_id]))
        row = rows.get(operation_id)
        if row is None or row.operation.step == 0:
            raise NotFoundError(f"no operation {operation_id!r}", reason="OPERATION_NOT_FOUND")
        # A tombstone is written with the next write.
        return self._engine.buried_lately.get(operation_id, row.operation), row.attempt

    async def list_operations(self, request: manager_pb2.ListOperationsRequest) -> manager_pb2.ListOperationsResponse:
        """Return a page of the operations that are remembered in full."""
        self._check_open()
        size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
        after = assignments.page_start(request.page_token)
        entries = sorted(
            (
                entry
                for entry in self._engine.entries.values()
                if entry.accepted is None
                and entry.accept_order > after
                and request.session_id in ("", entry.session_id)
            ),
            key=lambda entry: entry.accept_order,
        )
        page: list[Entry] = []
        room = PAGE_BYTES
        for entry in entries[:size]:
            page.append(entry)
            room -= entry.durable.ByteSize()
            if room <= 0:
                break
        token = str(page[-1].accept_order) if len(entries) > len(page) else ""
        return manager_pb2.ListOperationsResponse(operations=[entry.durable for entry in page], next_page_token=token)

    async def acknowledge_updates(
        self, request: manager_pb2.AcknowledgeUpdatesRequest
    ) -> manager_pb2.AcknowledgeUpdatesResponse:
        """Take note that states were recorded; terminal ones become tombstones."""
        self._check_open()
        faults.reach(BEFORE_ACKNOWLEDGE)
        rows = []
        for acknowledgement in request.acknowledgements:
            entry = self._engine.entries.get(acknowledgement.operation_id)
            if entry is None or entry.accepted is not None:
                continue
            if acknowledgement.discarded:
                await self._end(entry, "discarded by the coordinator", is_discarded=True)
            elif is_terminal(entry.durable) and acknowledgement.step >= entry.durable.step:
                self._engine.bury(entry)
            elif (step := min(acknowledgement.step, entry.durable.step)) > entry.acknowledged_step:
                # Nobody can have recorded a later state: what follows is still to be told.
                entry.acknowledged_step = step
                rows.append(self._engine.row(entry))
        if rows:
            # What is lost of it is reported again and acknowledged again.
            self._writer.submit(Submission(rows=rows, written=lambda: None, is_lazy=True))
        faults.reach(AFTER_ACKNOWLEDGE)
        return manager_pb2.AcknowledgeUpdatesResponse()

    # --- streams ---

    def watch_operations(
        self, request: manager_pb2.WatchOperationsRequest
    ) -> AsyncIterator[manager_pb2.WatchOperationsResponse]:
        """Yield a hello, what is not acknowledged, then each new state."""
        self._check_open()
        return self._streams.watch(request)

    async def read_output(
        self, request: manager_pb2.ReadOutputRequest
    ) -> AsyncIterator[manager_pb2.ReadOutputResponse]:
        """Yield an operation's output or attachment in pieces."""
        operation, attempt = await self._find(request.operation_id)
        while request.follow and attempt == 0 and not is_terminal(operation):
            await asyncio.sleep(output_files.FOLLOW_S)
            operation, attempt = await self._find(request.operation_id)
        async with aclosing(self._streams.read(request, operation, attempt)) as responses:
            async for response in responses:
                yield response

    def upload_workspace(
        self, requests: AsyncIterator[manager_pb2.UploadWorkspaceRequest]
    ) -> AsyncIterator[manager_pb2.UploadWorkspaceResponse]:
        """Put files into a workspace, yielding progress."""
        return workspace_transfer.upload(requests)

    def download_workspace(
        self, request: manager_pb2.DownloadWorkspaceRequest
    ) -> AsyncIterator[manager_pb2.DownloadWorkspaceResponse]:
        """Yield the files of a workspace."""
        return workspace_transfer.download(request)

    # --- what requests share ---

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise UnavailableError(
                f"operation manager {self._name!r} closes", reason="MANAGER_CLOSED", retry_after_s=1.0
            )

    def _now(self) -> Timestamp:
        return timestamp(self._clock.now())

    def _fence(self, fences: Sequence[manager_pb2.Fence], owner: str | None) -> list[SessionRow]:
        """Raise the sessions' epochs; return the rows to be written. `owner` None: the owner stays."""
        to_write = []
        for fence in fences:
            known = self._engine.sessions.get(fence.session_id)
            kept = known.owner if known else ""
            # A request may name a session twice.
            epoch = max(fence.epoch, known.epoch if known else 0)
            row = SessionRow(session_id=fence.session_id, epoch=epoch, owner=kept if owner is None else owner)
            if row != known:
                self._engine.sessions[fence.session_id] = row
                self._unwritten_sessions.add(fence.session_id)
            if fence.session_id in self._unwritten_sessions:
                to_write.append(row)
        return to_write

    def _submit(
        self,
        rows: Sequence[OperationRow],
        sessions: Sequence[SessionRow],
        written: Callable[[], None] = lambda: None,
        failed: Callable[[Exception], None] = lambda _error: None,
    ) -> asyncio.Future[None]:
        """Journal something for a request; the answer is done once it is durable, and all that was submitted before."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def succeed() -> None:
            self._unwritten_sessions -= {
                row.session_id for row in sessions if self._engine.sessions[row.session_id] == row
            }
            written()
            if not done.done():
                done.set_result(None)

        def fail(error: Exception) -> None:
            shown = _journal_error(error)
            failed(shown)
            if not done.done():
                done.set_exception(shown)

        self._writer.submit(Submission(rows=rows, sessions=sessions, written=succeed, failed=fail))
        return done

    async def _sweep_daily(self) -> None:
        while True:
            try:
                await self._sweep()
            except (OSError, sqlite3.Error, HarnessError):
                logger.exception("old output could not be removed")
            await asyncio.sleep(self._settings.retention.interval_s)

    async def _sweep(self) -> None:
        rows = await self._writer.call(lambda journal: journal.tombstones_with_files())
        kept = [(row.operation_id, row.tombstone_time) for row in rows if row.tombstone_time is not None]
        names = await asyncio.to_thread(os.listdir, self._directory)
        remembered = set(self._engine.entries) | (await self._writer.call(lambda journal: journal.find(names))).keys()
        removed = await asyncio.to_thread(
            output_files.sweep,
            self._directory,
            kept,
            remembered.__contains__,
            self._clock.now(),
            self._settings.retention,
        )
        if removed:
            await self._writer.call(lambda journal: journal.forget_files(removed))
            logger.info("old output was removed", extra={"operations": len(removed)})


def _journal_error(error: Exception) -> HarnessError:
    is_full = (isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL) or (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    )
    if is_full:
        return ResourceExhaustedError("the manager's disk is full", reason="DISK_FULL", retry_after_s=10.0)
    return UnavailableError("the manager's journal could not be written", reason="JOURNAL_FAILED", retry_after_s=1.0)


def _release() -> str:
    try:
        return version("unreal-agent")
    except PackageNotFoundError:
        return ""
