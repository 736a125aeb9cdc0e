"""Connections to the database file and the threads that they are used on.

Plain `sqlite3` on threads of our own, and not aiosqlite: a transaction must run as one function on one thread, so that
a cancelled caller can't leave it open between two statements. aiosqlite runs single statements and has no public way to
run a function; its three hops per transaction also halve the rate of commits.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeVar
from urllib.parse import quote

from harness.errors import DataLossError
from harness.session_store.sql.errors import closed_error
from harness.session_store.sqlite.storage_errors import storage_error
from harness.session_store.sqlite.value_check import find_wrong_value

T = TypeVar("T")

_BUSY_TIMEOUT_MS: Final = 5_000
_WAL_LIMIT_BYTES: Final = 64 * 1024 * 1024
READERS: Final = 4


def create_file(path: Path) -> None:
    """Make the database file, readable by its owner only, and its directory where they are missing.

    SQLite gives the files beside it the same mode.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as err:
        raise storage_error(err, str(path)) from err


def file_identity(path: Path | str) -> tuple[int, int] | None:
    """Return what tells a file from every other one, or None where there is none at the path."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def connect(path: Path, *, is_writer: bool) -> sqlite3.Connection:
    """Open a connection that begins no transaction by itself; the caller closes it."""
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode=rw",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=512,
    )
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    if not is_writer:
        connection.execute("PRAGMA query_only = ON")
    return connection


def prepare_writer(connection: sqlite3.Connection, max_size_bytes: int | None) -> None:
    """Set what makes commits durable, and bound the file. Writes to the file: check its version first."""
    # Holds from the first table on: a file that was made without it gives room back to new rows only.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}")
    if max_size_bytes is not None:
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {max(1, max_size_bytes // page_bytes)}")


def in_snapshot(connection: sqlite3.Connection, function: Callable[[sqlite3.Connection], T]) -> T:
    """Run a function that reads, so that all its statements see one state of the file."""
    connection.execute("BEGIN")
    try:
        return function(connection)
    finally:
        connection.execute("ROLLBACK")


UNEXPECTED: Final = (TypeError, ValueError, OverflowError)
"""What Python raises at a value of another kind than the one expected."""


@contextmanager
def translated_errors(connection: sqlite3.Connection, path: str) -> Iterator[None]:
    """Turn what SQLite and damaged values raise into what callers see."""
    try:
        yield
    except sqlite3.Error as err:
        raise storage_error(err, path) from err
    except UNEXPECTED as err:
        raise damage_behind(connection, err, path) from err


def damage_behind(connection: sqlite3.Connection, error: Exception, path: str) -> Exception:
    """Return what callers see of an error that is none of ours: the damage that it comes from, else the error."""
    try:
        place = find_wrong_value(connection)
    except sqlite3.Error as err:
        return storage_error(err, path)
    except UnicodeDecodeError:
        place = "the list of tables"
    if place is None:
        return error
    return DataLossError(
        f"{path!r} is damaged: {place} holds what is never written there",
        reason="STORE_CORRUPT",
        metadata={"path": path, "place": place},
    )


class ReaderPool:
    """A few connections for reading, each used by one function at a time, on threads.

    A caller that is cancelled leaves its function to end by itself: it changes nothing and gives its connection back.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._idle: SimpleQueue[sqlite3.Connection] = SimpleQueue()
        for _ in range(READERS):
            self._idle.put(connect(path, is_writer=False))
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="session-store-reader")
        self._is_closed = False

    async def read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function in a snapshot of the latest committed state."""
        if self._is_closed:
            raise closed_error()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, function)

    def _read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        # There are as many connections as threads, so this never waits.
        connection = self._idle.get()
        try:
            with translated_errors(connection, self._path):
                return in_snapshot(connection, function)
        finally:
            self._idle.put(connection)

    def close(self) -> None:
        """Wait for what is being read and close the connections; blocks. May be called twice."""
        self._is_closed = True
        self._threads.shutdown(wait=True)
        while not self._idle.empty():
            self._idle.get().close()
