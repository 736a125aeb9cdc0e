"""`SqliteSessionStore`: the session store over one SQLite file.

One task owns the writing connection; reads go by snapshots on a few threads; watches are woken after durable commits.
What each call does is in `sql_session_store`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from harness.clock import Clock, SystemClock
from harness.primitives.sqlite_log import find_damage
from harness.primitives.task_groups import tasks_behind
from harness.session_store.sql import leases, retention, watches
from harness.session_store.sql.runnable import RunnableSessions
from harness.session_store.sql.snapshots import snapshot
from harness.session_store.sql.sql_session_store import Engine, SqlSessionStore, Statistics, StoreOptions
from harness.session_store.sqlite import free_pages, migrations
from harness.session_store.sqlite.connections import (
    UNEXPECTED,
    ReaderPool,
    connect,
    create_file,
    damage_behind,
    in_snapshot,
    prepare_writer,
)
from harness.session_store.sqlite.snapshots import HeldFile
from harness.session_store.sqlite.storage_errors import log_error, storage_error
from harness.session_store.sqlite.writer import Writer

__all__ = ["SqliteSessionStore", "Statistics", "StoreOptions"]


class SqliteSessionStore(SqlSessionStore):
    """A session store in one file of this process. Open it with `SqliteSessionStore.open`."""

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        leases_: leases.LeaseTable,
        clock: Clock,
        options: StoreOptions,
    ) -> None:
        self._path = path
        (store_id,) = connection.execute("SELECT store_id FROM store").fetchone()
        self._file_writer = Writer(connection, str(path))
        self._file_readers = ReaderPool(path)
        engine = Engine(
            store_id=store_id,
            readers=self._file_readers,
            writer=self._file_writer,
            once_writer=self._file_writer,
            snapshot=partial(snapshot, partial(HeldFile, path)),
            leases_of=lambda _: leases_,
            hub=watches.Hub(),
            runnable=RunnableSessions(self._file_readers, leases_, clock),
            retention=retention.Retention(self._file_writer, clock, free_pages.remove_and_give_back),
        )
        super().__init__(engine, clock, options)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, path: Path | str, *, clock: Clock | None = None, options: StoreOptions | None = None
    ) -> AsyncIterator[SqliteSessionStore]:
        """Open a store for the life of the context; makes file (0600) and directory (0700) where they are missing.

        Raises:
            FailedPreconditionError: STATE_DIR_NOT_WRITABLE, NOT_A_SESSION_STORE.
            UnsupportedError: UNSUPPORTED_STORE_VERSION; the file was not written to.
            DataLossError: STORE_CORRUPT.
        """
        path, clock, options = Path(path), clock or SystemClock(), options or StoreOptions()
        leases_ = leases.LeaseTable(clock)
        connection = await asyncio.to_thread(_open_writer, path, leases_, options)
        try:
            store = cls(path, connection, leases_, clock, options)
        except sqlite3.Error as err:
            reported = storage_error(err, str(path))
            connection.close()
            raise reported from err
        try:
            async with tasks_behind() as tasks:
                tasks.create_task(store._file_writer.run())
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
        """Return a snapshot of the counters."""
        writer = self._file_writer
        return Statistics(
            transactions=writer.transactions,
            changes=writer.changes,
            waiting=writer.waiting,
            watchers=self._hub.watchers,
        )

    async def aclose(self) -> None:
        """Finish what was begun, end the watches and close the file; may be called twice."""
        self._hub.close()
        self._runnable.close()
        self._retention.close()
        self._file_writer.stop()
        await self._file_writer.finished.wait()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._file_readers.close()
        self._file_writer.close()


def _open_writer(path: Path, leases_: leases.LeaseTable, options: StoreOptions) -> sqlite3.Connection:
    create_file(path)
    connection = None
    try:
        # Before anything is written, or closed, which writes too: what can't be read would be overwritten.
        if (unread := find_damage(path)) is not None:
            raise log_error(unread, str(path))
        connection = connect(path, is_writer=True)
        migrations.check_version(connection, str(path))
        prepare_writer(connection, options.max_size_bytes)
        migrations.migrate(connection, str(path))
        in_snapshot(connection, lambda reading: leases.load(reading, leases_))
        retention.abandon_imports(connection)
    except BaseException as err:
        shown: BaseException = err
        # Before anything is given back: whether too many files are open is seen only then.
        if isinstance(err, sqlite3.Error | OSError):
            shown = storage_error(err, str(path))
            shown.__cause__ = err
        elif connection and isinstance(err, UNEXPECTED):
            shown = damage_behind(connection, err, str(path))
        if connection is not None:
            connection.close()
        raise shown from shown.__cause__
    return connection
