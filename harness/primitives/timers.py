"""Timers as a primitive: fire at a wall-clock time, whatever happens to the clock meanwhile."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from datetime import datetime

from harness.clock import Clock
from harness.primitives.primitives import Event, TimerFired

# A jump of the wall clock is noticed after this time at the latest.
RECHECK_S = 5.0


class Timers:
    """Every timer of one manager; one task for all."""

    def __init__(self, clock: Clock, report: Callable[[str, Event], None]) -> None:
        """Take the clock; `report(operation_id, event)` is called on the loop."""
        self._clock = clock
        self._report = report
        self._heap: list[tuple[datetime, str]] = []
        self._wanted: dict[str, datetime] = {}
        self._wake = asyncio.Event()

    def schedule(self, operation_id: str, fire_time: datetime) -> None:
        """Let an operation's timer fire at a time."""
        self._wanted[operation_id] = fire_time
        heapq.heappush(self._heap, (fire_time, operation_id))
        self._wake.set()

    def drop(self, operation_id: str) -> None:
        """Forget an operation's timer; harmless where there is none."""
        self._wanted.pop(operation_id, None)

    async def run(self) -> None:
        """Fire timers until cancelled."""
        while True:
            self._wake.clear()
            wait_s = self._fire_due()
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _fire_due(self) -> float | None:
        while self._heap:
            fire_time, operation_id = self._heap[0]
            remaining_s = (fire_time - self._clock.now()).total_seconds()
            is_wanted = self._wanted.get(operation_id) == fire_time
            if is_wanted and remaining_s > 0:
                return min(remaining_s, RECHECK_S)
            heapq.heappop(self._heap)
            if is_wanted:
                del self._wanted[operation_id]
                self._report(operation_id, TimerFired())
        return None
