"""Holds one state of the database for as long as somebody reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import psycopg

from harness.session_store.postgres.connections import Database
from harness.session_store.postgres.statements import PostgresConnection
from harness.session_store.postgres.storage_errors import storage_error
from harness.session_store.sql import Connection

T = TypeVar("T")


class Snapshot:
    """One state of the database: a connection and a thread of its own. Lost with its connection."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-store-export")
        self._connection: psycopg.Connection | None = None

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Run a function on the state that the first read saw."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, function)

    def _read(self, function: Callable[[Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = self._database.connect(is_writer=False)
                # Whoever takes the export may be slow.
                self._connection.execute(b"SET LOCAL idle_in_transaction_session_timeout = 0")
            return function(PostgresConnection(self._connection, is_writer=False))
        except psycopg.Error as err:
            raise storage_error(err, self._database.place) from err

    def close(self) -> None:
        """Let go of the state once a read in progress has ended."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


@asynccontextmanager
async def snapshot(database: Database) -> AsyncIterator[Snapshot]:
    """Hold one state of the database."""
    held = Snapshot(database)
    try:
        yield held
    finally:
        held.close()
