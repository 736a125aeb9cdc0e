"""Watches of sessions: wakes watchers after a durable commit; what they are sent is always read from the store.

A watcher holds a cursor and a flag that says that there may be more, so a slow one costs no memory and loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final

from harness import faults
from harness.session_store.sql import rows
from harness.session_store.sql.errors import closed_error
from harness.session_store.sql.reads import Cursor, cursor_at, read_changes
from harness.session_store.sql.sql import Connection, Reader
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

BEFORE_UPDATE = faults.declare("session_store.update.before", "a change is durable, a watcher has not been told")
AFTER_UPDATE = faults.declare("session_store.update.after", "a watcher was told of a change")

RUNNABLE: Final = "runnable/"
"""What is told where a session may have become runnable; the slash is in no session's ID."""


class Hub:
    """Who waits for changes of what. A topic is a session's ID, or a name with a character that no ID has."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._is_closed = False

    @contextmanager
    def subscribe(self, topic: str) -> Iterator[asyncio.Event]:
        """Give an event that is set after each change of a topic."""
        changed = asyncio.Event()
        self._waiting.setdefault(topic, set()).add(changed)
        try:
            yield changed
        finally:
            waiting = self._waiting[topic]
            waiting.discard(changed)
            if not waiting:
                del self._waiting[topic]

    @property
    def watchers(self) -> int:
        """Return how many wait, on all topics together."""
        return sum(map(len, self._waiting.values()))

    @property
    def topics(self) -> list[str]:
        """Return what is waited for."""
        return list(self._waiting)

    def notify(self, topic: str) -> None:
        """Tell that a topic has changed, durably."""
        for changed in self._waiting.get(topic, ()):
            changed.set()

    async def wait(self, changed: asyncio.Event) -> None:
        """Wait for a change; raises STORE_CLOSED once the store closes."""
        if not self._is_closed:
            await changed.wait()
        if self._is_closed:
            raise closed_error()

    def close(self) -> None:
        """End every wait."""
        self._is_closed = True
        for waiting in self._waiting.values():
            for changed in waiting:
                changed.set()


async def watch_session(
    readers: Reader, hub: Hub, request: store_pb2.WatchSessionRequest
) -> AsyncIterator[store_pb2.WatchSessionResponse]:
    """Yield a session's changes after a revision, then go on with new ones until it is deleted.

    The first message comes at once, also where nothing is new: it says that the watcher has all that there is.
    """
    session_id = request.session_id
    with hub.subscribe(session_id) as changed:
        cursor = None
        while True:
            # Cleared before reading: a commit that comes while reading sets it again.
            changed.clear()
            response, next_cursor = await readers.read(_Step(session_id, request.after_revision, cursor))
            if response.is_deleted:
                yield response
                return
            if cursor is None or response.revision > cursor.revision:
                faults.reach(BEFORE_UPDATE)
                yield response
                faults.reach(AFTER_UPDATE)
            cursor = next_cursor
            if response.is_current:
                await hub.wait(changed)


class _Step:
    """Reads what comes next for a watcher."""

    def __init__(self, session_id: str, after_revision: int, cursor: Cursor | None) -> None:
        self._session_id = session_id
        self._after_revision = after_revision
        self._cursor = cursor

    def __call__(self, connection: Connection) -> tuple[store_pb2.WatchSessionResponse, Cursor]:
        if self._cursor is None:
            row = rows.find(connection, self._session_id)
            return read_changes(connection, row, cursor_at(connection, row, self._after_revision))
        found = rows.look_up(connection, self._session_id)
        if found is None or found.visibility == rows.DELETED:
            return store_pb2.WatchSessionResponse(revision=self._cursor.revision, is_deleted=True), self._cursor
        return read_changes(connection, found, self._cursor)
