"""The manager's journal: one SQLite file, written by one thread, several submissions to a transaction.

Owns what the manager must not forget: its instance ID, every operation ID that it accepted, each operation's newest
state, the sessions' epochs and owners. It knows no step machine and starts nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError

from harness import faults
from harness.errors import (
    DataLossError,
    FailedPreconditionError,
    HarnessError,
    ResourceExhaustedError,
    UnsupportedError,
)
from harness.primitives.descriptors import is_lack_of_descriptors, no_descriptor_error
from harness.primitives.sqlite_log import find_damage
from unreal_agent.operation.v1 import operation_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT_VERSION = 1

LOCK_PATIENCE_S = 1.0
LOCK_PAUSE_S = 0.02
RETRY_S = 1.0

LAZY_WRITE_S = 0.05
"""How long what nothing waits for may wait for a write to ride on."""

BEFORE_WRITE = faults.declare("operations.journal.before", "steps are decided, the journal has not been written")
AFTER_WRITE = faults.declare("operations.journal.after", "the journal is written, nothing has been done about it")

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_OPENED = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    owner TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE operations (
    operation_id TEXT PRIMARY KEY,
    accept_order INTEGER NOT NULL,
    operation BLOB NOT NULL,
    workspace TEXT NOT NULL,
    position INTEGER NOT NULL,
    acknowledged_step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    boot_id TEXT NOT NULL,
    is_discarded INTEGER NOT NULL,
    tombstone_time REAL,
    has_files INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX operations_remembered ON operations (accept_order) WHERE tombstone_time IS NULL;
CREATE INDEX operations_with_files ON operations (tombstone_time) WHERE has_files AND tombstone_time IS NOT NULL;
"""

_COLUMNS = (
    "operation_id, accept_order, operation, workspace, position, acknowledged_step, attempt, boot_id, is_discarded,"
    " tombstone_time, has_files"
)
_SAVE_OPERATION = f"INSERT OR REPLACE INTO operations ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SAVE_SESSION = "INSERT OR REPLACE INTO sessions (session_id, epoch, owner) VALUES (?, ?, ?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """All that is kept of an operation."""

    operation: operation_pb2.Operation
    """Newest state; of a tombstone identity, status and step."""

    accept_order: int
    workspace: str
    position: int
    acknowledged_step: int
    attempt: int
    """Attempts to start a process; 0: none was journalled."""

    boot_id: str
    """Boot in which the latest attempt was journalled."""

    is_discarded: bool
    tombstone_time: datetime | None
    """When it was acknowledged; None: it is remembered in full."""

    has_files: bool

    @property
    def operation_id(self) -> str:
        """Whose row it is."""
        return self.operation.operation_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """Fence and owner of a session."""

    session_id: str
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContent:
    """What a manager starts from."""

    instance_id: str
    rows: Sequence[OperationRow]
    """Not the tombstones; in the order in which they were accepted."""

    sessions: Sequence[SessionRow]
    position: int
    accept_order: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What is to be written together."""

    rows: Sequence[OperationRow] = ()
    sessions: Sequence[SessionRow] = ()
    directories: Sequence[str] = ()
    """Made before the transaction."""

    written: Callable[[], None]
    """Called on the loop once it is durable."""

    failed: Callable[[Exception], None] | None = None
    """Called on the loop instead; None: the write is repeated until it succeeds."""

    is_lazy: bool = False
    """Nothing waits for it: it rides on the next write, or gets one of its own after `LAZY_WRITE_S`."""


class Journal:
    """The file. Every method blocks and belongs to one thread."""

    def __init__(self, path: Path) -> None:
        """Open or make the journal.

        Raises:
            FailedPreconditionError: STATE_DIRECTORY_IN_USE, another process has it open; STATE_DIR_NOT_WRITABLE.
            ResourceExhaustedError: DISK_FULL, TOO_MANY_OPEN_FILES.
            UnsupportedError: UNSUPPORTED_JOURNAL_VERSION.
            DataLossError: JOURNAL_UNREADABLE.
        """
        self._path = path
        try:
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _opening_error(path, error) from error
        try:
            _lock(self._lock)
            # Before anything is written, or closed, which writes too: what can't be read would be overwritten.
            if (damage := find_damage(path)) is not None:
                raise DataLossError(damage, reason="JOURNAL_UNREADABLE")
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            os.chmod(path, 0o600)
            self._prepare()
        except BlockingIOError:
            os.close(self._lock)
            raise FailedPreconditionError(
                f"{path.parent} is open in another operation manager", reason="STATE_DIRECTORY_IN_USE"
            ) from None
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
            os.close(self._lock)
            raise _opening_error(path, error) from error
        except BaseException:
            os.close(self._lock)
            raise

    def _prepare(self) -> None:
        connection = self._connection
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            # The instance is made with the journal: both or neither.
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                connection.execute("INSERT INTO meta VALUES ('instance_id', ?)", (uuid.uuid4().hex,))
                connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        elif version != FORMAT_VERSION:
            connection.close()
            raise UnsupportedError(
                f"journal {self._path} has format {version}, this release reads {FORMAT_VERSION}",
                reason="UNSUPPORTED_JOURNAL_VERSION",
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what a damaged file makes SQLite say into JOURNAL_UNREADABLE."""
        try:
            yield
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise DataLossError(
                f"the journal {self._path} can't be read: {error}", reason="JOURNAL_UNREADABLE"
            ) from error

    def load(self) -> JournalContent:
        """Return everything but the tombstones.

        Raises:
            DataLossError: JOURNAL_UNREADABLE.
        """
        execute = self._connection.execute
        with self._reading():
            instance = execute("SELECT value FROM meta WHERE key = 'instance_id'").fetchone()
            rows = execute(f"SELECT {_COLUMNS} FROM operations WHERE tombstone_time IS NULL ORDER BY accept_order")
            counters = execute("SELECT MAX(position), MAX(accept_order) FROM operations").fetchone()
            sessions = execute("SELECT session_id, epoch, owner FROM sessions").fetchall()
            # Never made anew: coordinators would take the instance for gone, and what it runs with it.
            self._check_kinds(instance or (None,), (str,), "the instance ID")
            self._check_kinds([counter or 0 for counter in counters], (int, int), "a position")
            for columns in sessions:
                self._check_kinds(columns, (str, int, str), f"the fence of session {columns[0]!r}")
            return JournalContent(
                instance_id=instance[0],
                rows=[self._row(columns) for columns in rows],
                sessions=[SessionRow(session_id=s, epoch=e, owner=o) for s, e, o in sessions],
                position=counters[0] or 0,
                accept_order=counters[1] or 0,
            )

    def _check_kinds(self, columns: Sequence[object], kinds: Sequence[type], what: str) -> None:
        """Refuse values that were never written so: SQLite keeps any kind in any column."""
        if any(type(column) is not kind for column, kind in zip(columns, kinds, strict=True)):
            raise DataLossError(f"journal {self._path}: {what} is damaged", reason="JOURNAL_UNREADABLE")

    def _row(self, columns: tuple[str, int, bytes, str, int, int, int, str, int, float | None, int]) -> OperationRow:
        operation_id, order, operation, workspace, position, step, attempt, boot_id, discarded, time, files = columns
        what = f"the record of operation {operation_id!r}"
        kept = (*columns[:9], 0.0 if time is None else time, files)
        self._check_kinds(kept, (str, int, bytes, str, int, int, int, str, int, float, int), what)
        try:
            message = operation_pb2.Operation.FromString(operation)
            if message.operation_id != operation_id:
                raise DecodeError(f"it is that of {message.operation_id!r}")
        except DecodeError as error:
            raise DataLossError(
                f"journal {self._path}: the state of operation {operation_id!r} can't be decoded",
                reason="JOURNAL_UNREADABLE",
            ) from error
        return OperationRow(
            operation=message,
            accept_order=order,
            workspace=workspace,
            position=position,
            acknowledged_step=step,
            attempt=attempt,
            boot_id=boot_id,
            is_discarded=bool(discarded),
            tombstone_time=None if time is None else datetime.fromtimestamp(time).astimezone(),
            has_files=bool(files),
        )

    def find(self, operation_ids: Iterable[str]) -> dict[str, OperationRow]:
        """Return the rows that there are, tombstones too, by ID."""
        found = {}
        with self._reading():
            for operation_id in operation_ids:
                query = f"SELECT {_COLUMNS} FROM operations WHERE operation_id = ?"
                columns = self._connection.execute(query, (operation_id,)).fetchone()
                if columns is not None:
                    found[operation_id] = self._row(columns)
        return found

    def tombstones_with_files(self) -> list[OperationRow]:
        """Return acknowledged operations whose files may be removed, the longest acknowledged first."""
        query = (
            f"SELECT {_COLUMNS} FROM operations WHERE has_files AND tombstone_time IS NOT NULL ORDER BY tombstone_time"
        )
        with self._reading():
            return [self._row(columns) for columns in self._connection.execute(query)]

    def forget_files(self, operation_ids: Iterable[str]) -> None:
        """Record that the files of operations are gone."""
        with self._transaction():
            self._connection.executemany(
                "UPDATE operations SET has_files = 0 WHERE operation_id = ?", ((each,) for each in operation_ids)
            )

    def write(self, submissions: Sequence[Submission]) -> None:
        """Write submissions in one transaction, all or nothing."""
        for submission in submissions:
            for directory in submission.directories:
                os.makedirs(directory, 0o700, exist_ok=True)
        # Of several states of one operation only the newest is written.
        rows = {row.operation_id: row for submission in submissions for row in submission.rows}
        sessions = {row.session_id: row for submission in submissions for row in submission.sessions}
        with self._transaction():
            self._connection.executemany(_SAVE_OPERATION, map(_parameters, rows.values()))
            self._connection.executemany(
                _SAVE_SESSION, ((row.session_id, row.epoch, row.owner) for row in sessions.values())
            )

    def close(self) -> None:
        """Close the file and let others open it."""
        self._connection.close()
        os.close(self._lock)


def _parameters(row: OperationRow) -> tuple[object, ...]:
    return (
        row.operation_id,
        row.accept_order,
        row.operation.SerializeToString(),
        row.workspace,
        row.position,
        row.acknowledged_step,
        row.attempt,
        row.boot_id,
        row.is_discarded,
        None if row.tombstone_time is None else row.tombstone_time.timestamp(),
        row.has_files,
    )


def _lock(descriptor: int) -> None:
    """Lock the directory; raises BlockingIOError where another manager lives in it.

    One that was killed while it started a process leaves the lock to that for a moment, until it becomes its program.
    """
    until_s = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise
        time.sleep(LOCK_PAUSE_S)


def _opening_error(path: Path, error: Exception) -> HarnessError:
    """Say why a journal can't be opened. Only one that is damaged is lost: the rest passes, and it must be kept."""
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    if is_lack_of_descriptors(error):
        return no_descriptor_error(f"the journal {path}")
    number = error.errno if isinstance(error, OSError) else None
    if code == sqlite3.SQLITE_FULL or number in _NO_SPACE:
        message = f"there is no room left for the journal {path}: make room and repeat"
        return ResourceExhaustedError(message, reason="DISK_FULL", retry_after_s=10.0)
    if code in _NOT_OPENED or number is not None:
        return FailedPreconditionError(
            f"the journal {path} can't be written ({error}): check its owner and permissions",
            reason="STATE_DIR_NOT_WRITABLE",
            metadata={"path": str(path)},
        )
    return DataLossError(f"the journal {path} can't be read: {error}", reason="JOURNAL_UNREADABLE")


class JournalWriter:
    """Writes submissions from the loop; those that come during a write share the next transaction."""

    def __init__(self, journal: Journal, thread: ThreadPoolExecutor) -> None:
        """Take a journal and the single thread that it belongs to."""
        self._journal = journal
        self._thread = thread
        self._pending: list[Submission] = []
        self._wake = asyncio.Event()

    def submit(self, submission: Submission) -> None:
        """Queue a submission. They become durable in this order."""
        self._pending.append(submission)
        if submission.is_lazy:
            asyncio.get_running_loop().call_later(LAZY_WRITE_S, self._wake.set)
        else:
            self._wake.set()

    async def call(self, function: Callable[[Journal], T]) -> T:
        """Run a function of the journal between two writes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, self._journal)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            await self.flush()

    async def flush(self) -> None:
        """Write what is queued."""
        self._wake.clear()
        batch, self._pending = self._pending, []
        if not batch:
            return
        faults.reach(BEFORE_WRITE)
        try:
            # Not cut short by a cancellation: what is durable is always acted upon or found again.
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, self._journal.write, batch))
        except (sqlite3.Error, OSError) as error:
            await self._fail(batch, error)
            return
        faults.reach(AFTER_WRITE)
        for submission in batch:
            submission.written()

    async def _fail(self, batch: Sequence[Submission], error: Exception) -> None:
        logger.error("journal could not be written", extra={"error": str(error), "submissions": len(batch)})
        kept = []
        for submission in batch:
            if submission.failed is None:
                kept.append(submission)
            else:
                submission.failed(error)
        self._pending = kept + self._pending
        if kept:
            self._wake.set()
            await asyncio.sleep(RETRY_S)
