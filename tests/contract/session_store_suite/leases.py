"""What every session store does with leases and offers. Needs a fixture `store`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from google.protobuf.duration_pb2 import Duration

from harness.clock import timestamp
from harness.errors import (
    ConflictError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
)
from harness.session_store import SessionStore
from tests.support.eventually import eventually
from tests.support.session_records import (
    VERSIONS,
    Author,
    incarnation,
    items_of,
    new_session,
    session_of,
    text_input,
    turn,
    working,
)
from unreal_agent.server.v1 import server_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

SHORT = Duration(nanos=150_000_000)


async def acquire(
    store: SessionStore,
    who: session_pb2.Incarnation,
    session_id: str = "s",
    *,
    lease: Duration | None = None,
    versions: server_pb2.ReaderVersions = VERSIONS,
) -> store_pb2.AcquireLeaseResponse:
    return await store.acquire_lease(
        store_pb2.AcquireLeaseRequest(session_id=session_id, incarnation=who, versions=versions, lease=lease)
    )


async def test_lease_gives_an_epoch_and_shuts_others_out(store: SessionStore) -> None:
    author = await new_session(store)
    first = await acquire(store, incarnation("a"))
    assert (first.session.epoch, first.was_taken_over, first.HasField("former_owner")) == (1, False, False)
    assert (await session_of(store, "s")).owner == incarnation("a")
    with pytest.raises(UnavailableError) as caught:
        await acquire(store, incarnation("b"))
    assert caught.value.reason == "NOT_OWNER"
    assert caught.value.metadata["owner_address"] == "a.example:1"
    assert 0 < (caught.value.retry_after_s or 0) <= 10
    with pytest.raises(ConflictError) as stale:
        await author.commit(text_input("i"))
    assert stale.value.reason == "STALE_EPOCH"
    author.epoch = 1
    await author.commit(text_input("i"))


async def test_released_session_is_nobodys_and_its_epoch_is_over(store: SessionStore) -> None:
    author = await new_session(store)
    author.epoch = (await acquire(store, incarnation("a"))).session.epoch
    release = store_pb2.ReleaseLeaseRequest(incarnation=incarnation("a"), session_id="s", epoch=1)
    await store.release_lease(release)
    await store.release_lease(release)
    assert not (await session_of(store, "s")).HasField("owner")
    with pytest.raises(ConflictError):
        await author.commit(text_input("i"))
    author.epoch = 0
    await author.commit(text_input("i"))
    second = await acquire(store, incarnation("b"))
    assert (second.session.epoch, second.was_taken_over) == (2, False)


async def test_release_under_an_older_epoch_changes_nothing(store: SessionStore) -> None:
    await new_session(store)
    await acquire(store, incarnation("a"))
    await store.release_lease(store_pb2.ReleaseLeaseRequest(incarnation=incarnation("a"), session_id="s", epoch=7))
    assert (await session_of(store, "s")).owner == incarnation("a")


async def test_new_incarnation_of_a_name_takes_over_at_once(store: SessionStore) -> None:
    author = await new_session(store)
    await acquire(store, incarnation("a", 1))
    taken = await acquire(store, incarnation("a", 2))
    assert (taken.session.epoch, taken.was_taken_over, taken.former_owner) == (2, True, incarnation("a", 1))
    again = await acquire(store, incarnation("a", 2))
    assert again == taken, "a lost answer is given again"
    author.epoch = 2
    await author.commit(text_input("i"))
    assert not (await acquire(store, incarnation("a", 2))).was_taken_over, "the takeover is recorded by now"
    for call in (
        store.renew_lease(store_pb2.RenewLeaseRequest(incarnation=incarnation("a", 1))),
        acquire(store, incarnation("a", 1)),
        anext(aiter(store.watch_runnable(runnable("a", number=1)))),
    ):
        with pytest.raises(FailedPreconditionError) as caught:
            await call
        assert caught.value.reason == "INCARNATION_REPLACED"


async def test_expired_owner_is_taken_over_and_fenced(store: SessionStore) -> None:
    await new_session(store)
    owner = Author(store, "s", epoch=(await acquire(store, incarnation("a"), lease=SHORT)).session.epoch)
    await owner.commit(text_input("i1"))

    async def take_over() -> store_pb2.AcquireLeaseResponse | None:
        try:
            return await acquire(store, incarnation("b"))
        except UnavailableError:
            return None

    taken = await eventually(take_over)
    assert (taken.was_taken_over, taken.former_owner, taken.session.epoch) == (True, incarnation("a"), 2)
    with pytest.raises(ConflictError) as caught:
        await owner.commit(text_input("i2"))
    assert caught.value.reason == "STALE_EPOCH"
    await Author(store, "s", epoch=2, sequence=1).commit(text_input("i2"))
    assert [item.input.input_id for item in await items_of(store, "s")] == ["i1", "i2"]


async def test_renewal_keeps_all_sessions_of_an_incarnation(store: SessionStore) -> None:
    for session_id in ("s1", "s2"):
        await new_session(store, session_id)
        await acquire(store, incarnation("a"), session_id, lease=SHORT)
    renewed = await store.renew_lease(store_pb2.RenewLeaseRequest(incarnation=incarnation("a")))
    assert renewed.lease == Duration(seconds=10)
    for session_id in ("s1", "s2"):
        with pytest.raises(UnavailableError) as caught:
            await acquire(store, incarnation("b"), session_id)
        assert (caught.value.retry_after_s or 0) > 1


async def test_release_of_everything_ends_the_incarnation(store: SessionStore) -> None:
    for session_id in ("s1", "s2"):
        await new_session(store, session_id)
        await acquire(store, incarnation("a"), session_id)
    await store.release_lease(store_pb2.ReleaseLeaseRequest(incarnation=incarnation("a")))
    for session_id in ("s1", "s2"):
        assert not (await acquire(store, incarnation("b"), session_id)).was_taken_over
    with pytest.raises(FailedPreconditionError):
        await store.renew_lease(store_pb2.RenewLeaseRequest(incarnation=incarnation("a")))


async def test_reader_that_knows_too_little_gets_no_lease(store: SessionStore) -> None:
    author = await new_session(store)
    await author.commit(text_input("i"))
    with pytest.raises(UnsupportedError) as caught:
        await acquire(store, incarnation("a"), versions=server_pb2.ReaderVersions(session_format=1, operation=1))
    assert caught.value.reason == "UNSUPPORTED_SESSION_VERSION"
    assert caught.value.metadata == {"kind": "item", "found": "1", "supported": "0"}
    assert (await session_of(store, "s")).epoch == 0


async def test_bad_lease_is_refused(store: SessionStore) -> None:
    await new_session(store)
    for lease in (Duration(), Duration(seconds=-1), Duration(seconds=9_999)):
        with pytest.raises(InvalidArgumentError):
            await acquire(store, incarnation("a"), lease=lease)
    with pytest.raises(InvalidArgumentError):
        await acquire(store, session_pb2.Incarnation(name="a"))


async def test_deletion_needs_the_owners_epoch(store: SessionStore) -> None:
    await new_session(store)
    await acquire(store, incarnation("a"))
    with pytest.raises(ConflictError):
        await store.delete_session(store_pb2.DeleteSessionRequest(session_id="s"))
    await store.delete_session(store_pb2.DeleteSessionRequest(session_id="s", epoch=1))


def runnable(name: str, *, number: int = 1, capacity: int = 10) -> store_pb2.WatchRunnableRequest:
    return store_pb2.WatchRunnableRequest(incarnation=incarnation(name, number), versions=VERSIONS, capacity=capacity)


async def offers(watch: AsyncIterator[store_pb2.WatchRunnableResponse], count: int) -> list[str]:
    session_ids: list[str] = []
    async with asyncio.timeout(10):
        while len(session_ids) < count:
            session_ids.extend((await anext(watch)).session_ids)
    return sorted(session_ids)


async def test_unowned_session_with_work_is_offered(store: SessionStore) -> None:
    busy, idle = await new_session(store, "busy"), await new_session(store, "idle")
    await busy.commit(text_input("i"), turn("t1"), rest=working())
    await idle.commit(text_input("i"))
    watch = aiter(store.watch_runnable(runnable("a")))
    assert await offers(watch, 1) == ["busy"]
    await idle.commit(turn("t1"), rest=working())
    assert await offers(watch, 1) == ["idle"]


async def test_session_is_offered_when_it_is_due(store: SessionStore) -> None:
    author = await new_session(store)
    soon = timestamp((await session_of(store, "s")).create_time.ToDatetime())
    soon.FromMilliseconds(soon.ToMilliseconds() + 400)
    rest = session_pb2.Rest(
        state=session_pb2.REST_STATE_WAITING_UNTIL,
        session_state=session_pb2.SESSION_STATE_WAITING_FOR_PROVIDER,
        wake_time=soon,
    )
    await author.commit(rest=rest)
    assert await offers(aiter(store.watch_runnable(runnable("a"))), 1) == ["s"]


async def test_session_of_a_dead_owner_is_offered(store: SessionStore) -> None:
    await new_session(store)
    await acquire(store, incarnation("a"), lease=SHORT)
    await Author(store, "s", epoch=1).commit(text_input("i"), rest=working())
    assert await offers(aiter(store.watch_runnable(runnable("b"))), 1) == ["s"]


async def test_released_session_with_work_is_offered(store: SessionStore) -> None:
    await new_session(store)
    watch = aiter(store.watch_runnable(runnable("b")))
    await acquire(store, incarnation("a"))
    await Author(store, "s", epoch=1).commit(text_input("i"), rest=working())
    await store.release_lease(store_pb2.ReleaseLeaseRequest(incarnation=incarnation("a"), session_id="s", epoch=1))
    assert await offers(watch, 1) == ["s"]


async def test_each_session_is_offered_to_one_coordinator_within_its_capacity(store: SessionStore) -> None:
    session_ids = [f"s{number}" for number in range(6)]
    for session_id in session_ids:
        author = await new_session(store, session_id)
        await author.commit(rest=working())
    first, second = (
        aiter(store.watch_runnable(runnable("a", capacity=2))),
        aiter(store.watch_runnable(runnable("b", capacity=4))),
    )
    async with asyncio.TaskGroup() as tasks:
        of_a = tasks.create_task(offers(first, 2))
        of_b = tasks.create_task(offers(second, 4))
    assert (len(of_a.result()), len(of_b.result())) == (2, 4)
    assert sorted(of_a.result() + of_b.result()) == session_ids


async def test_taken_offer_is_not_repeated_and_makes_no_room(store: SessionStore) -> None:
    for session_id in ("s1", "s2"):
        author = await new_session(store, session_id)
        await author.commit(rest=working())
    watch = aiter(store.watch_runnable(runnable("a", capacity=1)))
    (taken,) = await offers(watch, 1)
    await acquire(store, incarnation("a"), taken)
    (left,) = {"s1", "s2"} - {taken}
    other = aiter(store.watch_runnable(runnable("b")))
    assert await offers(other, 1) == [left]


async def test_watch_of_a_replaced_incarnation_ends(store: SessionStore) -> None:
    author = await new_session(store)
    await author.commit(rest=working())
    watch = aiter(store.watch_runnable(runnable("a", number=1)))
    assert await offers(watch, 1) == ["s"]

    async def wait_for_end() -> str:
        with pytest.raises(FailedPreconditionError) as caught:
            await anext(watch)
        return caught.value.reason

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(wait_for_end())
        await store.renew_lease(store_pb2.RenewLeaseRequest(incarnation=incarnation("a", 2)))
    assert ended.result() == "INCARNATION_REPLACED"
