"""Makes load: one caller after another, or arrivals by schedule, whose waiting counts from when they were due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from benchmarks.results import Latencies

Call = Callable[[int], Awaitable[object]]
"""Does the n-th call."""

MAX_IN_FLIGHT = 2_000
"""Beyond this the server is plainly not keeping up, and the rest of the schedule is dropped."""


async def closed_loop(call: Call, *, count: int, within_s: float, first: int = 0) -> Latencies:
    """Call one after another, `count` times or until the time is over."""
    latencies, end = Latencies(), time.perf_counter() + within_s
    for number in range(first, first + count):
        begin = time.perf_counter()
        await call(number)
        now = time.perf_counter()
        latencies.record(now - begin)
        if now > end:
            break
    return latencies


async def open_loop(call: Call, *, rate: float, seconds: float, limit: int, first: int = 0) -> Latencies:
    """Call at fixed times, whether earlier calls have ended or not.

    A call's latency counts from the moment it was due: a stall shows in all calls that were due in it (no coordinated
    omission).

    Args:
        call: What is measured.
        rate: Calls per second.
        seconds: Length of the schedule.
        limit: Calls at most.
        first: Number of the first call.
    """
    latencies = Latencies()
    in_flight = 0
    begin = time.perf_counter()

    async def one(number: int, due: float) -> None:
        nonlocal in_flight
        await call(number)
        in_flight -= 1
        latencies.record(time.perf_counter() - due)

    async with asyncio.TaskGroup() as tasks:
        for index in range(min(limit, max(1, round(rate * seconds)))):
            due = begin + index / rate
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            if in_flight >= MAX_IN_FLIGHT:
                break
            in_flight += 1
            tasks.create_task(one(first + index, due))
    return latencies


async def at_once(call: Call, *, callers: int, count: int) -> tuple[Latencies, float]:
    """Let callers call `count` times each; return latencies and calls per second."""
    latencies = Latencies()

    async def one(caller: int) -> None:
        for number in range(count):
            begin = time.perf_counter()
            await call(caller * count + number)
            latencies.record(time.perf_counter() - begin)

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for caller in range(callers):
            tasks.create_task(one(caller))
    return latencies, callers * count / (time.perf_counter() - begin)
