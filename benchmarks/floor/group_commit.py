"""A bare group-commit writer: one thread, one SQLite file, one row per commit, as durable as the product's."""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from pathlib import Path


class GroupCommitWriter:
    """Writes rows; each `write` returns once its row is on stable storage."""

    def __init__(self, path: Path) -> None:
        """Open the file and start the thread; `close` ends it."""
        self._waiting: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(path,), daemon=True)
        self._thread.start()

    async def write(self, row: bytes) -> None:
        """Write one row durably."""
        written: asyncio.Future[None] = self._loop.create_future()
        self._waiting.put((row, written))
        await written

    async def close(self) -> None:
        """End the thread after what waits."""
        self._waiting.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self, path: Path) -> None:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, data BLOB)")
        while True:
            batch = [self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            rows = [one for one in batch if one is not None]
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT INTO rows (data) VALUES (?)", [(row,) for row, _ in rows])
            connection.execute("COMMIT")
            self._loop.call_soon_threadsafe(_finish, [written for _, written in rows])
            if len(rows) < len(batch):
                connection.close()
                return


def _finish(futures: list[asyncio.Future[None]]) -> None:
    for written in futures:
        if not written.done():
            written.set_result(None)
