"""What every session store shows its watchers. Needs a fixture `store`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from harness.errors import OutOfRangeError
from harness.session_store import SessionStore
from tests.support.session_records import (
    completed,
    final,
    items_of,
    new_session,
    operation,
    operations_of,
    response,
    session_of,
    text_input,
    turn,
    waiting,
    working,
    write_tool_turn,
)
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

Watch = AsyncIterator[store_pb2.WatchSessionResponse]


def watch_of(store: SessionStore, session_id: str = "s", after_revision: int = 0) -> Watch:
    request = store_pb2.WatchSessionRequest(session_id=session_id, after_revision=after_revision)
    return aiter(store.watch_session(request))


async def until_current(watch: Watch, revision: int = 0) -> list[store_pb2.WatchSessionResponse]:
    """Read on until the watcher has all, at a revision or later."""
    responses = []
    async with asyncio.timeout(10):
        while True:
            responses.append(await anext(watch))
            if responses[-1].is_current and responses[-1].revision >= revision:
                return responses


async def test_watcher_gets_the_past_then_each_commit_whole(store: SessionStore) -> None:
    author = await new_session(store)
    await author.commit(text_input("i1"), turn("t1"), rest=working())
    watch = watch_of(store)
    (past,) = await until_current(watch)
    history = await items_of(store, "s")
    assert past == store_pb2.WatchSessionResponse(revision=1, items=history, rest=working(), is_current=True)
    await author.commit(response("t1", ["c1"]), waiting("t1", "c1", "o1"), operations=[operation("s", "o1", "c1")])
    live = await anext(watch)
    assert [item.sequence for item in live.items] == [3, 4]
    assert list(live.operations) == [operation("s", "o1", "c1")]
    assert (live.revision, live.is_current) == (2, True)


async def test_watcher_that_has_all_is_told_so_at_once(store: SessionStore) -> None:
    author = await new_session(store)
    assert (await until_current(watch_of(store)))[0].revision == 0
    await author.commit(text_input("i1"), rest=working())
    (first,) = await until_current(watch_of(store, after_revision=1))
    assert first == store_pb2.WatchSessionResponse(revision=1, rest=working(), is_current=True)


async def test_watch_from_any_revision_goes_on_without_gap(store: SessionStore) -> None:
    author = await new_session(store)
    for number in range(1, 4):
        await write_tool_turn(author, number)
    history = await items_of(store, "s")
    last = (await session_of(store, "s")).revision
    for revision in range(last + 1):
        responses = await until_current(watch_of(store, after_revision=revision))
        items = [item for one in responses for item in one.items]
        assert items == [item for item in history if item.revision > revision]


async def test_slow_watcher_gets_the_newest_state_of_an_operation(store: SessionStore) -> None:
    author = await new_session(store)
    watch = watch_of(store)
    await until_current(watch)
    await author.commit(operations=[operation("s", "o")])
    for step in range(2, 30):
        await author.commit(operations=[operation("s", "o", step=step)])
    await author.commit(text_input("i"), operations=[completed("s", "o", step=99)])
    responses = await until_current(watch, revision=30)
    revisions = [one.revision for one in responses]
    assert revisions == sorted(set(revisions))
    assert responses[-1].operations[-1] == completed("s", "o", step=99)


async def test_long_history_comes_in_pages_of_whole_commits(store: SessionStore) -> None:
    author = await new_session(store)
    for number in range(12):
        await author.commit(
            *(text_input(f"i{number}-{index}") for index in range(70)),
            operations=[operation("s", f"o{number}-{index}") for index in range(70)],
        )
    responses = await until_current(watch_of(store))
    assert len(responses) > 2
    seen = 0
    for one in responses:
        revisions = {item.revision for item in one.items}
        assert all(seen < revision <= one.revision for revision in revisions)
        assert len(one.items) == 70 * len(revisions) == len(one.operations)
        seen = one.revision
    assert [item for one in responses for item in one.items] == await items_of(store, "s")
    assert [one for each in responses for one in each.operations] == await operations_of(store, "s")
    assert [one.is_current for one in responses] == [False] * (len(responses) - 1) + [True]


async def test_cursor_past_the_end_is_refused(store: SessionStore) -> None:
    await new_session(store)
    with pytest.raises(OutOfRangeError) as caught:
        await anext(watch_of(store, after_revision=1))
    assert caught.value.reason == "REVISION_AHEAD"


async def test_deletion_ends_the_watch(store: SessionStore) -> None:
    author = await new_session(store)
    await author.commit(text_input("i"))
    watch = watch_of(store)
    await until_current(watch)
    await store.delete_session(store_pb2.DeleteSessionRequest(session_id="s"))
    assert [one.is_deleted async for one in watch] == [True]


async def test_many_watchers_see_the_same(store: SessionStore) -> None:
    author = await new_session(store)

    async def follow() -> list[int]:
        watch = watch_of(store)
        responses = await until_current(watch, revision=15)
        return [item.sequence for one in responses for item in one.items]

    async with asyncio.TaskGroup() as tasks:
        followers = [tasks.create_task(follow()) for _ in range(8)]
        for number in range(1, 6):
            await write_tool_turn(author, number)
    assert [follower.result() for follower in followers] == [list(range(1, 26))] * 8


async def test_watch_that_is_left_can_be_taken_up_again(store: SessionStore) -> None:
    author = await new_session(store)
    await write_tool_turn(author, 1, is_finished=False)
    watch = store.watch_session(store_pb2.WatchSessionRequest(session_id="s"))
    first = await anext(aiter(watch))
    await watch.aclose()  # type: ignore[attr-defined]  # every implementation is an async generator
    await author.commit(final("t1", "c1", "o1"), operations=[completed("s", "o1", "c1")])
    (rest,) = await until_current(watch_of(store, after_revision=first.revision))
    assert [item.sequence for item in rest.items] == [5]
