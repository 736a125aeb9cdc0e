"""Holds one state of the file for as long as somebody reads it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from harness.session_store.sqlite.connections import connect, translated_errors
from harness.session_store.sqlite.storage_errors import storage_error

T = TypeVar("T")


class Snapshot:
    """One state of the file, for as long as it is held: a connection and a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-store-export")
        self._connection: sqlite3.Connection | None = None

    async def read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function on the state that the first read saw."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, function)

    def _read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = connect(self._path, is_writer=False)
                self._connection.execute("BEGIN")
            with translated_errors(self._connection, str(self._path)):
                return function(self._connection)
        except sqlite3.Error as err:
            raise storage_error(err, str(self._path)) from err

    def close(self) -> None:
        """Let go of the state once a read in progress has ended."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


@asynccontextmanager
async def snapshot(path: Path) -> AsyncIterator[Snapshot]:
    """Hold one state of the file."""
    held = Snapshot(path)
    try:
        yield held
    finally:
        held.close()
