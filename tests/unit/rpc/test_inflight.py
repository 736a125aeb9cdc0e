"""Calls in hand are counted, bounded, ended by a drain, and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from harness.errors import ResourceExhaustedError, UnavailableError
from services._server.inflight import Call, CallsInHand


async def test_a_drain_interrupts_waiting_and_refuses_to_wait_again() -> None:
    calls = CallsInHand(100)
    never = asyncio.Event()

    async def watch(call: Call) -> str:
        with pytest.raises(UnavailableError) as caught:
            await call.unless_ended(never.wait())
        with pytest.raises(UnavailableError):
            await call.unless_ended(never.wait())
        return caught.value.reason

    with calls.enter(is_ended_by_drain=True) as call:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch(call))
            await asyncio.sleep(0)
            calls.drain()
    assert watching.result() == "DRAINING"


async def test_a_drain_leaves_other_calls_alone_and_they_are_waited_for() -> None:
    calls = CallsInHand(100)
    done = asyncio.Event()

    async def work() -> None:
        with calls.enter(is_ended_by_drain=False) as call:
            await call.unless_ended(done.wait())

    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work())
        await asyncio.sleep(0)
        calls.drain()
        waiting = tasks.create_task(calls.wait_until_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
        done.set()
    assert working.done()
    assert len(calls) == 0


async def test_cancelling_a_watch_is_not_taken_for_a_drain() -> None:
    calls = CallsInHand(100)
    with calls.enter(is_ended_by_drain=True) as call, pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await call.unless_ended(asyncio.Event().wait())


async def test_a_drain_ends_the_requests_of_a_conversation() -> None:
    calls = CallsInHand(100)

    async def requests() -> AsyncIterator[int]:
        yield 1
        calls.drain()
        await asyncio.Event().wait()

    with calls.enter(is_ended_by_drain=True) as call:
        assert [request async for request in call.requests_until_drain(requests())] == [1]


def test_bytes_in_hand_are_bounded_but_a_single_message_always_goes() -> None:
    calls = CallsInHand(100)
    with calls.hold(500):
        with pytest.raises(ResourceExhaustedError) as caught, calls.hold(1):
            pass
        assert (caught.value.reason, caught.value.retry_after_s) == ("SERVER_BUSY", 0.2)
    with calls.hold(60), calls.hold(40):
        assert calls.bytes_in_hand == 100
    assert calls.bytes_in_hand == 0
