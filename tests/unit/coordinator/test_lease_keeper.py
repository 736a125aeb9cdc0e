"""The lease of a process's life: what may be started under it, and what is found out after it may have been over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from harness.clock import SystemClock
from harness.coordinator import CoordinatorConfig
from harness.coordinator.lease_keeper import LeaseKeeper, SessionLease
from harness.errors import ConflictError, UnavailableError
from harness.session_store import SessionStore
from harness.session_store.sqlite import SqliteSessionStore
from tests.support.faults import Fault, FaultyCalls
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

LEASE_S = 30.0


class HandClock(SystemClock):
    """Stands still, as for a process that is stopped, until it is moved."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def monotonic_s(self) -> float:
        """Return what it was set to."""
        return self.time_s


class SlowStore:
    """A store whose answers to leases take their time, as for a process that is stopped meanwhile."""

    def __init__(self, store: SessionStore, clock: HandClock) -> None:
        self._store = store
        self._clock = clock
        self.delay_s = 0.0

    def __getattr__(self, name: str) -> Any:
        """Pass every other call on."""
        return getattr(self._store, name)

    async def acquire_lease(self, request: store_pb2.AcquireLeaseRequest) -> store_pb2.AcquireLeaseResponse:
        """Take the lease, and the time."""
        answer = await self._store.acquire_lease(request)
        self._clock.time_s += self.delay_s
        return answer


@asynccontextmanager
async def opened_store(path: Path, clock: HandClock) -> AsyncIterator[SlowStore]:
    """Give a store with one session, by the same clock."""
    async with SqliteSessionStore.open(path / "sessions.db", clock=clock) as store:
        await store.create_session(store_pb2.CreateSessionRequest(session_id="s1"))
        yield SlowStore(store, clock)


def is_fresh(keeper: LeaseKeeper) -> bool:
    """Return whether something may be started."""
    waiting = keeper.wait_until_fresh()
    if waiting is None:
        return True
    assert isinstance(waiting, Coroutine)
    waiting.close()
    return False


class Keeping:
    """A keeper, and what it told."""

    def __init__(self, store: object, clock: HandClock, name: str, *, lease_s: float = LEASE_S) -> None:
        self.replaced = asyncio.Event()
        self.lapsed = 0
        self.keeper = LeaseKeeper(
            cast(SessionStore, store),
            CoordinatorConfig(name=name, lease_s=lease_s),
            clock,
            on_replaced=self.replaced.set,
            on_lapse=self._note_lapse,
        )

    async def take(self) -> SessionLease:
        """Acquire the session."""
        epoch = (await self.keeper.acquire("s1")).session.epoch
        return self.keeper.hold("s1", epoch)

    def _note_lapse(self) -> None:
        self.lapsed += 1


async def test_nothing_is_started_after_two_thirds_of_a_lease_that_was_not_renewed(tmp_path: Path) -> None:
    clock = HandClock()
    async with opened_store(tmp_path, clock) as store:
        kept = Keeping(store, clock, "a")
        lease = await kept.take()
        assert lease.wait_until_fresh() is None
        clock.time_s += LEASE_S * 2 / 3 - 0.1
        assert lease.wait_until_fresh() is None
        clock.time_s += 0.2
        waiting = lease.wait_until_fresh()
        assert waiting is not None
        async with asyncio.TaskGroup() as tasks:
            confirming = tasks.create_task(lease.confirm())
            await asyncio.sleep(0)
            assert not confirming.done()
            await kept.keeper.acquire("s1")  # renews, as every request in the incarnation's name does
        await waiting
        assert (lease.wait_until_fresh(), kept.lapsed) == (None, 0)


async def test_after_a_lapse_a_session_that_nobody_took_goes_on(tmp_path: Path) -> None:
    clock = HandClock()
    async with opened_store(tmp_path, clock) as store:
        kept = Keeping(store, clock, "a")
        lease = await kept.take()
        clock.time_s += LEASE_S
        await kept.keeper.acquire("s1")
        assert kept.lapsed == 1
        await lease.confirm()


async def test_after_a_lapse_a_session_that_another_took_is_lost(tmp_path: Path) -> None:
    clock = HandClock()
    async with opened_store(tmp_path, clock) as store:
        former, new = Keeping(store, clock, "a"), Keeping(store, clock, "b")
        lost = await former.take()
        clock.time_s += LEASE_S
        taken = await new.take()
        with pytest.raises(UnavailableError) as refused:
            await former.keeper.acquire("s1")
        assert (refused.value.reason, refused.value.retry_after_s) == ("NOT_OWNER", LEASE_S)
        await store.create_session(store_pb2.CreateSessionRequest(session_id="s2"))
        await former.keeper.acquire("s2")  # the process is alive again, the session is another's
        assert former.lapsed == 1
        with pytest.raises(ConflictError) as error:
            await lost.confirm()
        assert (error.value.reason, error.value.metadata["epoch"]) == ("LEASE_LOST", str(taken.epoch))
        await taken.confirm()


async def test_an_answer_that_came_too_late_is_a_lapse_although_it_was_asked_for_in_time(tmp_path: Path) -> None:
    clock = HandClock()
    async with opened_store(tmp_path, clock) as store:
        kept = Keeping(store, clock, "a")
        await kept.take()
        clock.time_s += LEASE_S / 2
        store.delay_s = LEASE_S
        await kept.keeper.acquire("s1")
        assert kept.lapsed == 1
        assert not is_fresh(kept.keeper)


async def test_a_process_that_was_replaced_takes_nothing_more(tmp_path: Path) -> None:
    clock = HandClock()
    async with opened_store(tmp_path, clock) as store:
        older = Keeping(store, clock, "a", lease_s=0.3)
        await older.take()
        newer = Keeping(store, clock, "a")
        await newer.take()
        async with asyncio.timeout(5):
            await older.keeper.run()
        assert older.replaced.is_set()
        assert not newer.replaced.is_set()
        with pytest.raises(UnavailableError) as error:
            await older.keeper.acquire("s1")
        assert error.value.reason == "DRAINING"
        assert not is_fresh(older.keeper)


async def test_a_session_that_is_released_is_free_and_the_others_stay(tmp_path: Path) -> None:
    clock = HandClock()
    async with opened_store(tmp_path, clock) as store:
        await store.create_session(store_pb2.CreateSessionRequest(session_id="s2"))
        one, other = Keeping(store, clock, "a"), Keeping(store, clock, "b")
        lease = await one.take()
        await one.keeper.acquire("s2")
        await lease.release()
        assert (await other.take()).epoch == lease.epoch + 1
        with pytest.raises(UnavailableError):
            await other.keeper.acquire("s2")


async def test_a_session_is_looked_up_until_the_store_answers(tmp_path: Path) -> None:
    clock = HandClock()
    async with opened_store(tmp_path, clock) as store:
        calls = FaultyCalls(Fault(call="store.get_session", number=1, times=2))
        kept = Keeping(calls.store(cast(SessionStore, store)), clock, "a")
        lease = await kept.take()
        clock.time_s += LEASE_S
        await kept.keeper.acquire("s1")
        async with asyncio.timeout(5):
            await lease.confirm()
        assert calls.counts["store.get_session"] == 3
