"""A bare group-commit writer: one thread, one SQLite file, as durable as the product's; it checks nothing."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

Row = Sequence[object]

SCHEMA = "CREATE TABLE rows (id INTEGER PRIMARY KEY, data BLOB)"
INSERT = "INSERT INTO rows (data) VALUES (?)"


class GroupCommitWriter:
    """Writes rows; each `write` returns once its rows are on stable storage."""

    def __init__(self, path: Path, *, schema: str = SCHEMA, statements: Sequence[str] = (INSERT,)) -> None:
        """Open the file and start the thread; `close` ends it.

        Args:
            path: The database.
            schema: What makes its tables; empty: they are there.
            statements: What each commit runs, each with parameters of its own.
        """
        self._schema = schema
        self._statements = statements
        self._waiting: queue.SimpleQueue[tuple[Sequence[Row], asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(path,), daemon=True)
        self._thread.start()

    async def write(self, *rows: Row) -> None:
        """Run each statement with its parameters, durably."""
        written: asyncio.Future[None] = self._loop.create_future()
        self._waiting.put((rows, written))
        await written

    async def close(self) -> None:
        """End the thread after what waits."""
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self, path: Path) -> None:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        if self._schema:
            connection.execute(self._schema)
        while True:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            commits = [one for one in batch if one is not None]
            connection.execute("BEGIN IMMEDIATE")
            for index, statement in enumerate(self._statements):
                connection.executemany(statement, [rows[index] for rows, _ in commits])
            connection.execute("COMMIT")
            self._loop.call_soon_threadsafe(_finish, [written for _, written in commits])
            if len(commits) < len(batch):
                connection.close()
                return


def _finish(futures: list[asyncio.Future[None]]) -> None:
    for written in futures:
        if not written.done():
            written.set_result(None)
