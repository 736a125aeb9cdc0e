"""Timers follow the wall clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

from harness.primitives.primitives import Event, TimerFired
from harness.primitives.timers import Timers
from tests.support.eventually import eventually

START = datetime(2030, 1, 1, tzinfo=UTC)


class HandClock:
    """A wall clock that tests set."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> datetime:
        return self.time

    def monotonic_s(self) -> float:
        return 0.0


@asynccontextmanager
async def running(clock: HandClock) -> AsyncIterator[tuple[Timers, list[str]]]:
    fired: list[str] = []

    def report(operation_id: str, event: Event) -> None:
        assert event == TimerFired()
        fired.append(operation_id)

    timers = Timers(clock, report)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(timers.run())
        yield timers, fired
        task.cancel()


async def test_past_fires_at_once_and_the_earlier_first() -> None:
    async with running(HandClock()) as (timers, fired):
        timers.schedule("late", START - timedelta(seconds=1))
        timers.schedule("early", START - timedelta(hours=1))
        await eventually(lambda: fired == ["early", "late"])


async def test_dropped_timer_does_not_fire() -> None:
    async with running(HandClock()) as (timers, fired):
        timers.schedule("dropped", START + timedelta(seconds=0.02))
        timers.drop("dropped")
        timers.schedule("kept", START)
        await eventually(lambda: fired == ["kept"])


async def test_jump_of_the_clock_is_noticed_with_the_next_look() -> None:
    clock = HandClock()
    async with running(clock) as (timers, fired):
        timers.schedule("tomorrow", START + timedelta(days=1))
        clock.time += timedelta(days=2)
        timers.schedule("now", clock.time)
        await eventually(lambda: fired == ["tomorrow", "now"])
