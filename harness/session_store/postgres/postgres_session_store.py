"""`PostgresSessionStore`: the session store over one PostgreSQL database, which several replicas may share.

Holds no state that another replica would need: sessions, leases and tokens are in the tables, and what is in memory is
hints and who waits. What each call does is in `sql_session_store`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import psycopg

from harness.clock import Clock, SystemClock
from harness.primitives.task_groups import tasks_behind
from harness.session_store.postgres.connections import READERS, WRITERS, Database, Pool, PoolReader, PoolWriter
from harness.session_store.postgres.leases import LeaseReader, PostgresLeases
from harness.session_store.postgres.migrations import migrate
from harness.session_store.postgres.notifications import Listener, SharedHub
from harness.session_store.postgres.snapshots import HeldDatabase
from harness.session_store.postgres.storage_errors import storage_error
from harness.session_store.sql import retention, rows
from harness.session_store.sql.leases import LeaseTable
from harness.session_store.sql.runnable import RunnableSessions
from harness.session_store.sql.snapshots import snapshot
from harness.session_store.sql.sql import Connection
from harness.session_store.sql.sql_session_store import Engine, SqlSessionStore, Statistics, StoreOptions
from harness.session_store.sql.watches import RUNNABLE

_PURGE_LOCK: Final = 0x554E5254
"""Advisory lock of the replica that removes what nobody can see any more."""

_IMPORT_LIFE_US: Final = 24 * 3600 * 1_000_000
"""An import that takes longer is one whose process died."""


class PostgresSessionStore(SqlSessionStore):
    """A session store in a PostgreSQL database. Open it with `PostgresSessionStore.open`."""

    def __init__(self, database: Database, store_id: str, clock: Clock, options: StoreOptions) -> None:
        self.place = database.place
        """What to call the database; holds no password."""

        self._writers = Pool(database, WRITERS, is_writer=True)
        self._reading = Pool(database, READERS, is_writer=False)
        self._pool_writer = PoolWriter(self._writers)
        self._shared_hub = SharedHub()
        readers = PoolReader(self._reading)
        self._listener = Listener(database, readers, self._shared_hub)
        table = LeaseTable(clock)
        lease_reader = LeaseReader(
            readers, table, lambda: runnable.watching, lambda ended_id: runnable.replaced(ended_id)
        )
        runnable = RunnableSessions(lease_reader, table, clock)
        engine = Engine(
            store_id=store_id,
            readers=readers,
            writer=self._pool_writer,
            once_writer=PoolWriter(self._writers, is_repeatable=False),
            snapshot=partial(snapshot, partial(HeldDatabase, database)),
            leases_of=PostgresLeases,
            hub=self._shared_hub,
            runnable=runnable,
            retention=retention.Retention(self._pool_writer, clock, _remove_some),
        )
        super().__init__(engine, clock, options)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, *, clock: Clock | None = None, options: StoreOptions | None = None
    ) -> AsyncIterator[PostgresSessionStore]:
        """Open a store for the life of the context; makes its tables where they are missing.

        Args:
            url: `postgresql://USER@HOST:PORT/DATABASE`; what it lacks comes from libpq's environment and files.
            clock: Tells the times that are recorded; leases go by the server's.
            options: How the store calls itself.

        Raises:
            FailedPreconditionError: INVALID_STORE_URL, STORE_NOT_ALLOWED.
            UnsupportedError: UNSUPPORTED_STORE_VERSION.
            UnavailableError: STORAGE_FAILED, the server can't be reached.
        """
        clock, options = clock or SystemClock(), options or StoreOptions()
        database = Database(url)
        store = cls(database, await asyncio.to_thread(_prepare, database), clock, options)
        try:
            async with tasks_behind() as tasks:
                tasks.create_task(store._listener.listen())
                tasks.create_task(store._listener.sweep())
                tasks.create_task(store._shared_hub.tell(store._pool_writer))
                tasks.create_task(store._hear_runnable())
                tasks.create_task(store._runnable.run())
                tasks.create_task(store._retention.run())
                try:
                    yield store
                finally:
                    await store.aclose()
        finally:
            # Also where a task of ours failed and took the others with it.
            await asyncio.to_thread(store._close)

    @property
    def statistics(self) -> Statistics:
        """Return a snapshot of the counters; each change is a transaction here."""
        writer = self._pool_writer
        return Statistics(
            transactions=writer.changes,
            changes=writer.changes,
            waiting=writer.waiting,
            watchers=self._hub.watchers,
        )

    async def aclose(self) -> None:
        """Finish what was begun, end the watches and close the connections; may be called twice."""
        self._hub.close()
        self._runnable.close()
        self._retention.close()
        self._listener.close()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writers.close()
        self._reading.close()

    async def _hear_runnable(self) -> None:
        """Look for runnable sessions anew when another store says so."""
        with self._shared_hub.subscribe(RUNNABLE) as changed:
            while await self._shared_hub.wait_open(changed):
                changed.clear()
                self._runnable.notify()


def _prepare(database: Database) -> str:
    try:
        with database.connect(is_writer=True) as connection:
            return migrate(connection, database.place)
    except psycopg.Error as err:
        raise storage_error(err, database.place) from err


def _remove_some(connection: Connection, time_us: int) -> bool:
    """Remove a bounded number of rows, one replica at a time; return whether there may be more."""
    if not connection.execute("SELECT pg_try_advisory_xact_lock(?)", (_PURGE_LOCK,)).fetchone()[0]:
        return False
    connection.execute(
        "UPDATE sessions SET needs_purge = 1 WHERE visibility = ? AND update_time_us <= ? AND needs_purge = 0",
        (rows.IMPORTING, time_us - _IMPORT_LIFE_US),
    )
    return retention.remove_some(connection, time_us)
