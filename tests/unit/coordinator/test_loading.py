"""A session is read from its store into the very state that wrote it, page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from harness.coordinator.loading import PAGE_ITEMS, load_state
from harness.coordinator.protocol import InputArrived
from harness.errors import DataLossError, UnavailableError
from harness.session_store import SessionStore, put_blob_bytes
from harness.session_store.sqlite import SqliteSessionStore
from tests.support.faults import Fault, FaultyCalls
from tests.support.histories import CheckedDriver, fork_of
from tests.support.session_driver import SessionDriver, calls, says, session, text_input
from tests.support.session_records import Author, session_of
from tests.support.session_scenes import AWAITING, settings_input
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteSessionStore]:
    async with SqliteSessionStore.open(tmp_path / "sessions.db") as opened:
        yield opened


async def driven_session(store: SessionStore) -> tuple[CheckedDriver, Author]:
    """Return a driver of a session that a store holds, and who writes its commits there."""
    settings = session().initial_settings
    await store.create_session(
        store_pb2.CreateSessionRequest(session_id="s1", requested_settings=settings, initial_settings=settings)
    )
    return CheckedDriver(await session_of(store, "s1")), Author(store, "s1")


async def write(driver: SessionDriver, author: Author) -> None:
    """Commit what was decided and not written yet."""
    for decision in driver.commits[author.commits :]:
        for source in decision.blobs:
            await put_blob_bytes(author.store, author.session_id, source.blob, source.data or b"")
        blobs = [source.blob for source in decision.blobs]
        await author.commit(*decision.items, operations=decision.operations, blobs=blobs, rest=decision.rest)


async def test_every_commit_of_a_session_is_read_back_as_the_state_that_it_left(store: SqliteSessionStore) -> None:
    driver, author = await driven_session(store)
    before = driver.state
    states = []

    async def check() -> None:
        await write(driver, author)
        loaded = await load_state(store, await session_of(store, "s1"))
        assert loaded == driver.state
        states.append(loaded)

    driver.say("do it")
    await check()
    driver.answer(says("so"), calls("c1"), calls("bad", name="Nope"), calls("c1"))
    await check()
    driver.report(driver.operation_of("c1"), AWAITING)
    driver.submit(settings_input("x1", model="m2", system_prompt="be brief"))
    await check()
    driver.report(driver.operation_of("c1"), text="x" * 70_000)
    await check()
    driver.say("go on")
    driver.answer(says("done"))
    await check()
    assert len({state.last_sequence for state in [before, *states]}) == 6


async def test_a_fork_is_read_as_what_it_inherited_and_its_own(store: SqliteSessionStore) -> None:
    driver, author = await driven_session(store)
    driver.say("do it")
    driver.answer(calls("c1"))
    await write(driver, author)
    forked = await store.fork_session(
        store_pb2.ForkSessionRequest(request_id="f1", parent_session_id="s1", session_id="child")
    )
    loaded = await load_state(store, forked.session)
    expected = fork_of(driver).state
    assert (loaded.calls, loaded.is_held, loaded.available, loaded.delivered, loaded.last_sequence) == (
        expected.calls,
        True,
        expected.available,
        expected.delivered,
        expected.last_sequence,
    )
    assert loaded.operations == {}


async def test_a_history_of_many_pages_with_a_fork_inside_is_read_whole(store: SqliteSessionStore) -> None:
    driver, author = await driven_session(store)
    driver.step(
        *(InputArrived(ticket=number, message=text_input(f"n{number}", "x")) for number in range(PAGE_ITEMS + 50))
    )
    await write(driver, author)
    forked = await store.fork_session(
        store_pb2.ForkSessionRequest(request_id="f1", parent_session_id="s1", session_id="child")
    )
    for record in (await session_of(store, "s1"), forked.session):
        loaded = await load_state(store, record)
        assert (loaded.available, loaded.last_sequence) == (PAGE_ITEMS + 50, record.last_sequence)


async def test_an_error_of_the_store_comes_out_as_it_is(store: SqliteSessionStore) -> None:
    driver, author = await driven_session(store)
    driver.say("do it")
    await write(driver, author)
    record = await session_of(store, "s1")
    for call in ("store.list_items", "store.list_operations"):
        faulty = FaultyCalls(fault=Fault(call=call, number=1)).store(store)
        with pytest.raises(UnavailableError):
            await load_state(faulty, record)


class DamagedStore:
    """A store whose pages of items are spoilt on the way."""

    def __init__(self, store: SessionStore, *, is_empty: bool) -> None:
        self._store = store
        self._is_empty = is_empty

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def list_items(self, request: store_pb2.ListItemsRequest) -> store_pb2.ListItemsResponse:
        page = await self._store.list_items(request)
        if self._is_empty:
            return store_pb2.ListItemsResponse(more=True)
        return store_pb2.ListItemsResponse(items=page.items[1:])


@pytest.mark.parametrize(
    ("is_empty", "problem"), [(True, "a page after 0 does not advance"), (False, "item 2 follows 0")]
)
async def test_a_page_with_a_gap_or_without_progress_is_damage(
    store: SqliteSessionStore, is_empty: bool, problem: str
) -> None:
    driver, author = await driven_session(store)
    driver.say("do it")
    await write(driver, author)
    # It only passes calls on, like every wrapper of a store.
    damaged = cast(SessionStore, DamagedStore(store, is_empty=is_empty))
    with pytest.raises(DataLossError, match=problem):
        await load_state(damaged, await session_of(store, "s1"))
