"""Tells watchers of new states. Keeps operation IDs, never states: a slow watcher costs no memory and sees the newest.

Does no I/O; what a watcher is sent is read by the manager when it is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Watcher:
    """One watch: the operations whose newest state it has not been sent, by growing position."""

    def __init__(self, owner: str) -> None:
        """Take the owner whose sessions it sees; empty: all."""
        self.owner = owner
        self._dirty: dict[str, None] = {}
        self._wake = asyncio.Event()

    def mark(self, operation_id: str) -> None:
        """Note that an operation has a new state."""
        # To the end, so that positions are sent in order whatever is skipped.
        self._dirty.pop(operation_id, None)
        self._dirty[operation_id] = None
        self._wake.set()

    def wake(self) -> None:
        """End the present wait."""
        self._wake.set()

    def pop(self) -> str | None:
        """Return the next operation to send, or None."""
        for operation_id in self._dirty:
            del self._dirty[operation_id]
            return operation_id
        return None

    async def wait(self, silence_s: float) -> bool:
        """Wait for something to send; False after a silence."""
        try:
            async with asyncio.timeout(silence_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True


class WatchHub:
    """All watchers of a manager."""

    def __init__(self) -> None:
        """Begin without watchers."""
        self._watchers: set[Watcher] = set()

    @property
    def watchers(self) -> int:
        """How many there are."""
        return len(self._watchers)

    @contextmanager
    def watch(self, owner: str, missed: Iterable[str]) -> Iterator[Watcher]:
        """Add a watcher that has still to be sent `missed`, in this order."""
        watcher = Watcher(owner)
        for operation_id in missed:
            watcher.mark(operation_id)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def publish(self, operation_id: str, owner: str) -> None:
        """Tell those who see the owner's sessions."""
        for watcher in self._watchers:
            if watcher.owner in ("", owner):
                watcher.mark(operation_id)

    def wake_all(self) -> None:
        """End every wait; used at the end."""
        for watcher in self._watchers:
            watcher.wake()
