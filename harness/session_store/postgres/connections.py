"""Connections to PostgreSQL and the threads that they are used on: one connection a thread, made anew when lost.

A transaction runs as one function on one thread, so that a cancelled caller can't leave it open between two statements.
There is no batching here: concurrent commits share the server's own group commit.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import psycopg
from psycopg import IsolationLevel, conninfo
from psycopg.pq import TransactionStatus

from harness import faults
from harness.errors import FailedPreconditionError
from harness.session_store.postgres.statements import PostgresConnection, adapt
from harness.session_store.postgres.storage_errors import is_transient, storage_error, unknown_outcome
from harness.session_store.sql import sql
from harness.session_store.sql.errors import closed_error
from harness.session_store.sqlite.writer import AFTER_COMMIT, BEFORE_COMMIT

T = TypeVar("T")

logger = logging.getLogger(__name__)

WRITERS: Final = 16
READERS: Final = 8

_CONNECT_TIMEOUT_S: Final = 5
_STATEMENT_TIMEOUT_MS: Final = 30_000
_IDLE_TIMEOUT_MS: Final = 30_000
"""A transaction whose process hangs lets go of its session's row after this long."""

_TRY_FOR_S: Final = 10.0
"""How long a transaction is tried again while the server is away or others are in the way."""

_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.5
_MAX_WAITING: Final = 1_024


class Database:
    """Where the store is; opens connections to it."""

    def __init__(self, url: str) -> None:
        """Take a `postgresql://` URL; what it lacks comes from libpq's environment and password file.

        Raises:
            FailedPreconditionError: INVALID_STORE_URL.
        """
        try:
            self._parameters = conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            # The driver's text quotes the URL, which may hold a password.
            raise FailedPreconditionError(
                "the store's URL can't be read; it has the form postgresql://USER@HOST:PORT/DATABASE",
                reason="INVALID_STORE_URL",
            ) from None
        host = self._parameters.get("host") or "the default host"
        name = self._parameters.get("dbname") or "the default database"
        self.place = f"{name} on {host}"
        """What messages call it; holds no password."""

    def connect(self, *, is_writer: bool) -> psycopg.Connection:
        """Open a connection for transactions; the caller closes it."""
        connection = psycopg.connect(**self._settings())
        try:
            connection.autocommit = True
            connection.execute(
                f"SET synchronous_commit = on; SET statement_timeout = {_STATEMENT_TIMEOUT_MS};"
                f" SET idle_in_transaction_session_timeout = {_IDLE_TIMEOUT_MS};"
                " SET client_min_messages = error".encode()
            )
            adapt(connection)
            connection.autocommit = False
            connection.isolation_level = IsolationLevel.READ_COMMITTED if is_writer else IsolationLevel.REPEATABLE_READ
            connection.read_only = not is_writer
        except BaseException:
            connection.close()
            raise
        return connection

    async def connect_to_listen(self) -> psycopg.AsyncConnection:
        """Open a connection for notifications; the caller closes it."""
        return await psycopg.AsyncConnection.connect(**self._settings(), autocommit=True)

    def _settings(self) -> dict[str, Any]:
        return {
            "application_name": "unreal-agent-session-store",
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,
            # Never a standby that answers reads of the past.
            "target_session_attrs": "read-write",
            **self._parameters,
        }


class Pool:
    """A few threads, each with its connection, that run transactions."""

    def __init__(self, database: Database, size: int, *, is_writer: bool) -> None:
        self._database = database
        self._is_writer = is_writer
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="session-store-postgres")
        self._own = threading.local()
        self._opened: set[psycopg.Connection] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._slots = asyncio.Semaphore(_MAX_WAITING)

    async def run(
        self,
        function: Callable[[sql.Connection], T],
        on_durable: Callable[[T], None] | None = None,
        *,
        is_repeatable: bool = True,
    ) -> T:
        """Run a function in a transaction and commit it; again where that is safe.

        Args:
            function: May be called several times; what it raises undoes all that it did.
            on_durable: Called on the loop with the result once it is committed, also where the caller was cancelled.
            is_repeatable: Whether it says the same where it is run again after it was committed already.

        Raises:
            UnavailableError: STORE_CLOSED; STORAGE_FAILED, where the change may have happened: repeat with the same ID.
        """
        if self._is_closed:
            raise closed_error()
        async with self._slots:
            if self._is_closed:
                raise closed_error()
            loop = asyncio.get_running_loop()

            def work() -> T:
                return self._run(function, is_repeatable, tell)

            def tell(outcome: T) -> None:
                if on_durable is not None:
                    loop.call_soon_threadsafe(on_durable, outcome)

            return await loop.run_in_executor(self._threads, work)

    def close(self) -> None:
        """Wait for what runs and close the connections; blocks. May be called twice."""
        self._is_closed = True
        self._threads.shutdown(wait=True)
        with self._lock:
            opened, self._opened = self._opened, set()
        for connection in opened:
            connection.close()

    def _run(self, function: Callable[[sql.Connection], T], is_repeatable: bool, tell: Callable[[T], None]) -> T:
        deadline = time.monotonic() + _TRY_FOR_S
        pause_s = _FIRST_PAUSE_S
        while True:
            attempt = _Attempt()
            try:
                outcome = self._transaction(function, attempt)
                tell(outcome)
                if self._is_writer:
                    faults.reach(AFTER_COMMIT)
                return outcome
            except psycopg.Error as err:
                is_broken = attempt.connection is None or attempt.connection.closed
                if attempt.is_committing and is_broken and not is_repeatable:
                    raise unknown_outcome(err, self._database.place) from err
                is_over = time.monotonic() + pause_s > deadline or self._is_closed
                if is_over or not is_transient(err, is_broken=is_broken):
                    raise storage_error(err, self._database.place) from err
                logger.info("transaction was tried again", extra={"error": type(err).__name__})
            time.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _transaction(self, function: Callable[[sql.Connection], T], attempt: _Attempt) -> T:
        connection = attempt.connection = self._connection()
        try:
            outcome = function(PostgresConnection(connection, is_writer=self._is_writer))
            if self._is_writer:
                faults.reach(BEFORE_COMMIT)
            attempt.is_committing = True
            connection.commit()
        except BaseException:
            self._undo(connection)
            raise
        return outcome

    def _connection(self) -> psycopg.Connection:
        connection: psycopg.Connection | None = getattr(self._own, "connection", None)
        if connection is None or connection.closed:
            if connection is not None:
                with self._lock:
                    self._opened.discard(connection)
            connection = self._own.connection = self._database.connect(is_writer=self._is_writer)
            with self._lock:
                self._opened.add(connection)
        return connection

    def _undo(self, connection: psycopg.Connection) -> None:
        if not connection.closed:
            try:
                connection.rollback()
            except psycopg.Error:
                logger.info("connection was lost")
        if not connection.closed and connection.info.transaction_status != TransactionStatus.IDLE:
            connection.close()


class _Attempt:
    """How far one run of a transaction came."""

    def __init__(self) -> None:
        self.connection: psycopg.Connection | None = None
        self.is_committing = False


class PoolReader:
    """Reads by snapshots; `harness.session_store.sql.Reader`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def read(self, function: Callable[[sql.Connection], T]) -> T:
        """Run a function in a snapshot of the latest committed state."""
        return await self._pool.run(function)


class PoolWriter:
    """Changes the store; `harness.session_store.sql.Writer`."""

    def __init__(self, pool: Pool, *, is_repeatable: bool = True) -> None:
        self._pool = pool
        self._is_repeatable = is_repeatable
        self.changes = 0
        self.waiting = 0

    async def write(self, function: Callable[[sql.Connection], T], on_durable: Callable[[T], None] | None = None) -> T:
        """Run a function in a transaction of its own and return its result once that is on stable storage.

        A caller that is cancelled leaves the whole change or none of it; who must be told is told in both cases.
        """

        def told(outcome: T) -> None:
            self.changes += 1
            if on_durable is not None:
                on_durable(outcome)

        self.waiting += 1
        try:
            return await self._pool.run(function, told, is_repeatable=self._is_repeatable)
        finally:
            self.waiting -= 1
