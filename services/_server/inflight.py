"""Calls in hand of one server: what they hold, how a drain ends them, and that their clean-up is waited for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from clients._rpc.status import DRAINING, SERVER_BUSY
from harness.errors import HarnessError, ResourceExhaustedError, UnavailableError

T = TypeVar("T")

BUSY_RETRY_S: Final = 0.2


def draining_error() -> UnavailableError:
    """Return what ends a call of a server that stops."""
    return UnavailableError(
        "the server is shutting down; resume or repeat the call", reason=DRAINING, retry_after_s=0.1
    )


class Call:
    """One call in hand."""

    def __init__(self, *, is_ended_by_drain: bool) -> None:
        self.is_ended_by_drain = is_ended_by_drain
        self._section: asyncio.Timeout | None = None
        self._end: HarnessError | None = None

    async def unless_ended(self, waiting: Awaitable[T]) -> T:
        """Await something; `end` interrupts that with its error.

        Only waiting is interrupted, never a write: what is being sent can't be taken back.
        """
        section = asyncio.timeout(None if self._end is None else 0)
        self._section = section
        try:
            async with section:
                return await waiting
        except TimeoutError:
            if section.expired() and self._end is not None:
                raise self._end from None
            raise
        finally:
            self._section = None

    def end(self, error: HarnessError) -> None:
        """End what the call waits for, now and from now on; the first error counts."""
        if self._end is not None:
            return
        self._end = error
        if self._section is not None:
            self._section.reschedule(asyncio.get_running_loop().time())

    async def requests_until_drain(self, requests: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield requests; the drain of a server ends them, so that the handler answers what it has and returns."""
        while True:
            try:
                request = await self.unless_ended(anext(requests))
            except StopAsyncIteration:
                return
            except UnavailableError:
                return
            yield request


class CallsInHand:
    """All calls of a server, in its event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.is_draining = False
        self.bytes_in_hand = 0
        self.finished: Counter[tuple[str, str]] = Counter()
        """How many calls ended, by method and code."""
        self._max_bytes = max_bytes
        self._calls: set[Call] = set()
        self._finite_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._rest_is_ended = asyncio.Event()
        self._rest_is_ended.set()

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def enter(self, *, is_ended_by_drain: bool) -> Iterator[Call]:
        """Count a call from here to the end of the block, its clean-up included."""
        call = Call(is_ended_by_drain=is_ended_by_drain)
        if self.is_draining and is_ended_by_drain:
            call.end(draining_error())
        self._calls.add(call)
        self._finite_calls += not is_ended_by_drain
        self._update()
        try:
            yield call
        finally:
            self._calls.discard(call)
            self._finite_calls -= not is_ended_by_drain
            self._update()

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Count a message's bytes during the block: SERVER_BUSY where there are too many in hand already."""
        # A message alone always goes: it is bounded by its method.
        if self.bytes_in_hand and self.bytes_in_hand + size_bytes > self._max_bytes:
            raise ResourceExhaustedError(
                f"the server has {self.bytes_in_hand} bytes in hand; nothing was done",
                reason=SERVER_BUSY,
                retry_after_s=BUSY_RETRY_S,
            )
        self.bytes_in_hand += size_bytes
        try:
            yield
        finally:
            self.bytes_in_hand -= size_bytes

    def drain(self) -> None:
        """End what a drain ends, now and from now on."""
        self.is_draining = True
        for call in tuple(self._calls):
            if call.is_ended_by_drain:
                call.end(draining_error())

    async def wait_until_idle(self) -> None:
        """Wait until no call is in hand."""
        await self._idle.wait()

    async def wait_until_rest_is_ended(self) -> None:
        """Wait until no call is in hand but those that a drain ends."""
        await self._rest_is_ended.wait()

    def _update(self) -> None:
        for event, count in ((self._idle, len(self._calls)), (self._rest_is_ended, self._finite_calls)):
            if count:
                event.clear()
            else:
                event.set()
