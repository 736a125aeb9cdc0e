"""Holds one state of a store for as long as somebody reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from harness.session_store.sql.sql import Connection

T = TypeVar("T")


class HeldState(Protocol):
    """A connection of an engine, in a transaction that sees one state. Used on one thread."""

    def read(self, function: Callable[[Connection], T]) -> T:
        """Run a function on the state; raises what callers of the store see."""
        ...

    def close(self) -> None:
        """Let go of the state."""
        ...


class Snapshot:
    """One state of a store, on a thread of its own."""

    def __init__(self, hold: Callable[[], HeldState]) -> None:
        self._hold = hold
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-store-export")
        self._held: HeldState | None = None

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Run a function on the state that the first read saw."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, function)

    def _read(self, function: Callable[[Connection], T]) -> T:
        if self._held is None:
            self._held = self._hold()
        return self._held.read(function)

    def close(self) -> None:
        """Let go of the state once a read in progress has ended."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._held is not None:
            self._held.close()


@asynccontextmanager
async def snapshot(hold: Callable[[], HeldState]) -> AsyncIterator[Snapshot]:
    """Hold one state of a store during the block; `hold` takes it at the first read."""
    held = Snapshot(hold)
    try:
        yield held
    finally:
        held.close()
