"""Live deltas to watchers: what need not be kept. A slow watcher loses deltas; nobody ever waits for one."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2

MAX_WAITING_EVENTS = 256
"""Events that a watcher may be behind; older ones are lost. One event holds at most 16 KiB."""


class EphemeralQueue:
    """Events that wait for one watcher."""

    def __init__(self) -> None:
        """Begin empty."""
        self.events: deque[coordinator_pb2.WatchSessionResponse] = deque(maxlen=MAX_WAITING_EVENTS)
        self.changed = asyncio.Event()

    def put(self, event: coordinator_pb2.WatchSessionResponse) -> None:
        """Add an event; the oldest is lost where the watcher is too far behind."""
        self.events.append(event)
        self.changed.set()


class EphemeralHub:
    """Hands each session's events to its watchers."""

    def __init__(self) -> None:
        """Begin without watchers."""
        self._queues: dict[str, set[EphemeralQueue]] = defaultdict(set)

    def has_watchers(self, session_id: str) -> bool:
        """Return whether anybody would see an event."""
        return bool(self._queues.get(session_id))

    def publish(self, session_id: str, event: coordinator_pb2.WatchSessionResponse) -> None:
        """Hand an event to the session's watchers."""
        for queue in self._queues.get(session_id, ()):
            queue.put(event)

    @contextmanager
    def subscription(self, session_id: str) -> Iterator[EphemeralQueue]:
        """Receive a session's events while the block runs."""
        queue = EphemeralQueue()
        self._queues[session_id].add(queue)
        try:
            yield queue
        finally:
            self._queues[session_id].discard(queue)
            if not self._queues[session_id]:
                del self._queues[session_id]
