"""Tells the stores of one database of each other's changes: LISTEN and NOTIFY as a hint, the tables as the truth.

A notification is sent after its commit, in batches, and not by the committing transaction: there it would hold a lock
of the whole database until the disk has answered, so that no two commits could share a flush. What is lost thereby, or
with the listening connection, a look at the revisions of what is watched finds within `SWEEP_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import psycopg

from harness.errors import HarnessError
from harness.session_store.postgres.connections import Database, PoolWriter
from harness.session_store.sql import rows, tokens
from harness.session_store.sql.sql import Connection, Reader
from harness.session_store.sql.watches import RUNNABLE, Hub

logger = logging.getLogger(__name__)

SWEEP_S: Final = 2.0
"""Longest that a lost notification stays unnoticed."""

CHANNEL: Final = "unreal_agent_session_store"
_RETRY_S: Final = 1.0


class SharedHub(Hub):
    """Wakes who waits here, and tells the other stores."""

    def __init__(self) -> None:
        super().__init__()
        self._untold: set[str] = set()
        self._changed = asyncio.Event()
        self._is_over = False

    def notify(self, topic: str) -> None:
        """Tell that a topic has changed, durably."""
        super().notify(topic)
        self._untold.add(topic)
        self._changed.set()

    def hear(self, topic: str) -> None:
        """Take in that another store has changed a topic."""
        super().notify(topic)

    async def wait_open(self, changed: asyncio.Event) -> bool:
        """Wait for a change; False once the hub is closed."""
        if not self._is_over:
            await changed.wait()
        return not self._is_over

    def close(self) -> None:
        """End every wait, and `tell`."""
        super().close()
        self._is_over = True
        self._changed.set()

    async def tell(self, writer: PoolWriter) -> None:
        """Send what has changed to the other stores until the hub closes."""
        while not self._is_over:
            await self._changed.wait()
            self._changed.clear()
            topics, self._untold = sorted(self._untold), set()
            if not topics:
                continue
            try:
                await writer.write(lambda connection, topics=topics: _notify(connection, topics))  # type: ignore[misc]
            except HarnessError as err:
                # The others' sweeps find it.
                logger.info("other stores were not told", extra={"reason": err.reason})


def _notify(connection: Connection, topics: list[str]) -> None:
    connection.execute(f"SELECT count(pg_notify('{CHANNEL}', topic)) FROM unnest(?) AS topic", (topics,))


class Listener:
    """Hears the other stores' changes, and looks for those that it did not hear of."""

    def __init__(self, database: Database, readers: Reader, hub: SharedHub) -> None:
        self._database = database
        self._readers = readers
        self._hub = hub
        self._closed = asyncio.Event()
        self._seen: dict[str, int] = {}
        self.is_listening = asyncio.Event()
        """Set while the listening connection is there."""

    def close(self) -> None:
        """End `listen` and `sweep`."""
        self._closed.set()

    async def listen(self) -> None:
        """Hear notifications until closed; a lost connection is made anew."""
        while not self._closed.is_set():
            try:
                async with self._connection() as connection:
                    self.is_listening.set()
                    # What came before is not told any more.
                    self._wake_all()
                    async with asyncio.TaskGroup() as tasks:
                        ending = tasks.create_task(self._end_with(connection))
                        async for notification in connection.notifies():
                            self._hub.hear(notification.payload)
                        ending.cancel()
            except* psycopg.Error as group:
                logger.info("listening connection was lost", extra={"error": type(group.exceptions[0]).__name__})
            finally:
                self.is_listening.clear()
            await self._pause(_RETRY_S)

    async def sweep(self) -> None:
        """Compare what is watched with the tables, now and then, until closed."""
        while not self._closed.is_set():
            await self._pause(SWEEP_S)
            topics = self._hub.topics
            if not topics or self._closed.is_set():
                continue
            try:
                found = await self._readers.read(lambda connection, topics=topics: _revisions(connection, topics))  # type: ignore[misc]
            except HarnessError:
                continue
            for topic, revision in found.items():
                if self._seen.get(topic) != revision:
                    self._hub.hear(topic)
            self._seen = found
            self._hub.hear(RUNNABLE)

    def _wake_all(self) -> None:
        for topic in self._hub.topics:
            self._hub.hear(topic)
        self._hub.hear(RUNNABLE)

    async def _pause(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._closed.wait()
        except TimeoutError:
            return

    async def _end_with(self, connection: psycopg.AsyncConnection) -> None:
        await self._closed.wait()
        await connection.close()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[psycopg.AsyncConnection]:
        connection = await self._database.connect_to_listen()
        try:
            await connection.execute(f"LISTEN {CHANNEL}".encode())
            yield connection
        finally:
            await connection.close()


def _revisions(connection: Connection, topics: list[str]) -> dict[str, int]:
    """Return a number for each topic that changes with it."""
    found = dict(
        connection.execute(
            f"SELECT session_id, CASE WHEN visibility = {rows.VISIBLE} THEN revision ELSE -1 END FROM sessions"
            " WHERE session_id = ANY(?)",
            (topics,),
        ).fetchall()
    )
    (found[tokens.TOPIC],) = connection.execute("SELECT coalesce(max(change_number), 0) FROM tokens").fetchone()
    return found
