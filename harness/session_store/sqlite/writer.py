"""The only writer of the database file: many callers' changes in one durable transaction (group commit).

Owns the writing connection. What waits while one transaction is written goes into the next; each change stands in a
savepoint of its own, so that one that is refused fails alone.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from harness import faults
from harness.session_store.sql.errors import closed_error
from harness.session_store.sqlite.connections import UNEXPECTED, damage_behind, file_identity
from harness.session_store.sqlite.storage_errors import gone_error, storage_error

T = TypeVar("T")

BEFORE_COMMIT: Final = faults.declare(
    "session_store.writer.before_commit", "changes are written but not committed: nothing of them survives"
)
AFTER_COMMIT: Final = faults.declare(
    "session_store.writer.after_commit", "changes are durable and nobody has been told yet"
)

_MAX_WAITING: Final = 1_024
"""Changes in hand at most; a caller beyond that waits for its turn."""

_MAX_BATCH: Final = 256
"""Changes of one transaction: bounds how long the first of them waits for the last."""


@dataclass(slots=True)
class _Job:
    """One change. The thread fills in the outcome, the loop hands it on."""

    function: Callable[[sqlite3.Connection], Any]
    on_durable: Callable[[Any], None] | None
    future: asyncio.Future[Any]
    outcome: Any = None
    error: Exception | None = None
    is_durable: bool = field(default=False)


class Writer:
    """Runs functions that change the store, in order, each whole or not at all."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        """Take over a writing connection."""
        self._connection = connection
        self._path = path
        self._identity = file_identity(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-store-writer")
        self._slots = asyncio.Semaphore(_MAX_WAITING)
        self._waiting: deque[_Job] = deque()
        self._wake = asyncio.Event()
        self._is_closing = False
        self.transactions = 0
        """Written since the start, on stable storage."""

        self.changes = 0
        """Changes in them."""

        self.finished = asyncio.Event()
        """Set when `run` has ended."""

    async def write(
        self,
        function: Callable[[sqlite3.Connection], T],
        on_durable: Callable[[T], None] | None = None,
    ) -> T:
        """Run a function in the next transaction and return its result once that is on stable storage.

        Args:
            function: Changes the store through the connection; neither begins nor ends a transaction, and may be called
                again where the first transaction failed. What it raises undoes all that it did, and goes to the caller.
            on_durable: Called with the result once it is durable, also where the caller was cancelled meanwhile.

        A caller that is cancelled leaves the whole change or none of it.
        """
        async with self._slots:
            if self._is_closing:
                raise closed_error()
            job = _Job(function, on_durable, asyncio.get_running_loop().create_future())
            self._waiting.append(job)
            self._wake.set()
            return cast("T", await job.future)

    async def run(self) -> None:
        """Write until `stop` is called and nothing waits any more."""
        try:
            await self._run()
        finally:
            self.finished.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_BATCH))]
                jobs = [job for job in batch if not job.future.done()]
                if jobs:
                    await loop.run_in_executor(self._thread, self._write, jobs)
                for job in jobs:
                    self._hand_on(job)
            if self._is_closing:
                return

    def stop(self) -> None:
        """Refuse further changes; `run` ends when what waits is written."""
        self._is_closing = True
        self._wake.set()

    def close(self) -> None:
        """Wait for the thread and close the connection; blocks. What still waits is refused."""
        self.stop()
        self._thread.shutdown(wait=True)
        self._connection.close()
        while self._waiting:
            job = self._waiting.popleft()
            if not job.future.done():
                job.future.set_exception(closed_error())

    @property
    def waiting(self) -> int:
        """Return how many changes wait for the next transaction."""
        return len(self._waiting)

    def _hand_on(self, job: _Job) -> None:
        self.changes += job.is_durable
        if job.is_durable and job.on_durable is not None:
            job.on_durable(job.outcome)
        if job.future.done():
            return
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.outcome)

    def _write(self, jobs: Sequence[_Job]) -> None:
        """Write jobs in one transaction; on the thread. Where it fails as a whole, write each in one of its own."""
        try:
            self._transaction(jobs)
        except Exception as err:
            if len(jobs) == 1:
                jobs[0].error = self._translated(err)
                return
            for job in jobs:
                self._write([job])

    def _transaction(self, jobs: Sequence[_Job]) -> None:
        if file_identity(self._path) != self._identity:
            # SQLite would go on writing to a file that nobody can open again.
            raise gone_error(self._path)
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for job in jobs:
                self._run_job(job)
            faults.reach(BEFORE_COMMIT)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        self.transactions += 1
        for job in jobs:
            job.is_durable = job.error is None
        try:
            faults.reach(AFTER_COMMIT)
        except Exception as err:
            # The answer is lost, the change is not.
            for job in jobs:
                job.error = job.error or self._translated(err)

    def _run_job(self, job: _Job) -> None:
        connection = self._connection
        job.error = None
        connection.execute("SAVEPOINT job")
        try:
            job.outcome = job.function(connection)
        except Exception as err:
            if not connection.in_transaction:
                # A full disk or an I/O error can make SQLite give up the whole transaction.
                raise
            connection.execute("ROLLBACK TO job")
            job.error = self._translated(err)
        connection.execute("RELEASE job")

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, sqlite3.Error | OSError):
            translated = storage_error(error, self._path)
            translated.__cause__ = error
            return translated
        if isinstance(error, UNEXPECTED):
            return damage_behind(self._connection, error, self._path)
        return error
