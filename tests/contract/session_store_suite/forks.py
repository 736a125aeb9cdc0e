"""What every session store does with forks. Needs a fixture `store`."""

from __future__ import annotations

import pytest

from harness.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError, OutOfRangeError
from harness.session_store import SessionStore, get_blob_bytes
from tests.contract.session_store_suite.watches import until_current, watch_of
from tests.support.session_records import (
    Author,
    blob_part,
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
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


async def fork(store: SessionStore, parent: str, child: str, cut: int = 0) -> session_pb2.Session:
    request = store_pb2.ForkSessionRequest(
        request_id=f"fork-{child}", parent_session_id=parent, session_id=child, cut_sequence=cut
    )
    return (await store.fork_session(request)).session


async def author_of(store: SessionStore, session_id: str) -> Author:
    return Author(store, session_id, sequence=(await session_of(store, session_id)).last_sequence)


async def test_fork_shows_the_prefix_and_leaves_the_parent(store: SessionStore) -> None:
    author = await new_session(store, "p")
    await write_tool_turn(author, 1)
    await write_tool_turn(author, 2)
    parent_items, parent = await items_of(store, "p"), await session_of(store, "p")
    child = await fork(store, "p", "c", cut=5)
    items = await items_of(store, "c")
    assert items[:5] == parent_items[:5]
    assert items[5].fork == item_pb2.Fork(
        origin=session_pb2.ForkOrigin(parent_session_id="p", cut_sequence=5), request_id="fork-c"
    )
    assert (len(items), items[5].sequence, items[5].revision) == (6, 6, 4)
    assert (child.last_sequence, child.revision, child.rest.state) == (6, 4, session_pb2.REST_STATE_AT_REST)
    assert list(child.ancestry) == [session_pb2.ForkOrigin(parent_session_id="p", cut_sequence=5)]
    assert child.initial_settings == parent.initial_settings
    assert await operations_of(store, "c") == []
    assert (await items_of(store, "p"), await session_of(store, "p")) == (parent_items, parent)


async def test_call_that_runs_at_the_cut_is_closed_in_the_child_only(store: SessionStore) -> None:
    author = await new_session(store, "p")
    await author.commit(text_input("i1"), turn("t1"), rest=working())
    await author.commit(
        response("t1", ["c1", "c2"]),
        final("t1", "c1", outcome=item_pb2.CALL_OUTCOME_REJECTED),
        waiting("t1", "c2", "o2"),
        operations=[operation("p", "o2", "c2")],
        rest=working(),
    )
    await fork(store, "p", "c")
    await author.commit(final("t1", "c2", "o2"), operations=[completed("p", "o2", "c2")])
    closed = (await items_of(store, "c"))[6:]
    assert [item.tool_call_status.call_id for item in closed] == ["c2"]
    assert closed[0].tool_call_status.result.outcome == item_pb2.CALL_OUTCOME_NOT_CARRIED_OVER
    child = await author_of(store, "c")
    await child.commit(text_input("next"), turn("t2", "t1"))
    with pytest.raises(FailedPreconditionError) as caught:
        await child.commit(final("t1", "c2"))
    assert caught.value.metadata["rule"] == "one_final_status"
    assert (await items_of(store, "p"))[-1].tool_call_status.result.outcome == item_pb2.CALL_OUTCOME_COMPLETED


async def test_finished_call_counts_only_where_it_finished_before_the_cut(store: SessionStore) -> None:
    author = await new_session(store, "p")
    await write_tool_turn(author, 1)
    await fork(store, "p", "before", cut=4)
    await fork(store, "p", "after", cut=5)
    outcomes = {
        child: [item.tool_call_status.result.outcome for item in await items_of(store, child) if item.sequence > 4]
        for child in ("before", "after")
    }
    assert outcomes["before"][1:] == [item_pb2.CALL_OUTCOME_NOT_CARRIED_OVER]
    assert outcomes["after"][:1] == [item_pb2.CALL_OUTCOME_COMPLETED]


async def test_cut_moves_behind_the_statuses_of_a_response(store: SessionStore) -> None:
    author = await new_session(store, "p")
    await write_tool_turn(author, 1)
    for cut, moved in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 5), (0, 5)):
        child = await fork(store, "p", f"c{cut}", cut=cut)
        assert child.ancestry[0].cut_sequence == moved


async def test_missing_fork_point_makes_nothing(store: SessionStore) -> None:
    author = await new_session(store, "p")
    await author.commit(text_input("i"))
    with pytest.raises(OutOfRangeError) as caught:
        await fork(store, "p", "c", cut=2)
    assert caught.value.reason == "FORK_POINT_NOT_FOUND"
    with pytest.raises(NotFoundError):
        await session_of(store, "c")


async def test_repeated_fork_returns_the_child_and_another_is_refused(store: SessionStore) -> None:
    await (await new_session(store, "p")).commit(text_input("i"))
    request = store_pb2.ForkSessionRequest(request_id="r", parent_session_id="p", session_id="c")
    first, again = await store.fork_session(request), await store.fork_session(request)
    assert (first.duplicate, again.duplicate, again.session) == (False, True, first.session)
    unnamed = store_pb2.ForkSessionRequest(request_id="unnamed", parent_session_id="p")
    made = await store.fork_session(unnamed)
    assert (await store.fork_session(unnamed)).session == made.session
    with pytest.raises(AlreadyExistsError) as caught:
        request.request_id = "other"
        await store.fork_session(request)
    assert caught.value.reason == "SESSION_EXISTS"


async def test_turns_chain_to_the_inherited_one_and_its_response_is_not_the_childs(store: SessionStore) -> None:
    author = await new_session(store, "p")
    await author.commit(text_input("i1"), turn("t1"))
    await fork(store, "p", "c")
    child = await author_of(store, "c")
    for bad in (child.request(response("t1")), child.request(turn("t1", "t1")), child.request(turn("t2"))):
        with pytest.raises(FailedPreconditionError):
            await store.commit(bad)
    await child.commit(turn("t2", "t1"))
    await child.commit(response("t2"))


async def test_inherited_input_counts_as_seen_and_a_later_one_does_not(store: SessionStore) -> None:
    author = await new_session(store, "p")
    await author.commit(text_input("i1"))
    await fork(store, "p", "c")
    await author.commit(text_input("i2"))
    child = await author_of(store, "c")
    for text, reason in (("hi", "DUPLICATE_INPUT"), ("ho", "INPUT_ID_CONFLICT")):
        with pytest.raises(AlreadyExistsError) as caught:
            await child.commit(text_input("i1", text))
        assert caught.value.reason == reason
    await child.commit(text_input("i2"))
    found = await store.list_items(store_pb2.ListItemsRequest(session_id="c", input_id="i1"))
    assert [item.sequence for item in found.items] == [1]


async def chain_of_forks(store: SessionStore, depth: int) -> list[item_pb2.Item]:
    """Make f0, f1 … each a fork of the one before with one more input; return what the last must show but forks."""
    await (await new_session(store, "f0")).commit(text_input("i0"))
    for level in range(1, depth + 1):
        await fork(store, f"f{level - 1}", f"f{level}")
        await (await author_of(store, f"f{level}")).commit(text_input(f"i{level}"))
    items: list[item_pb2.Item] = []
    for level in range(depth + 1):
        items.extend(item for item in await items_of(store, f"f{level}") if item.input.input_id == f"i{level}")
    return items


async def test_fork_of_forks_reads_through_all_of_them(store: SessionStore) -> None:
    own = await chain_of_forks(store, depth=8)
    items = await items_of(store, "f8", page_size=3)
    assert [item.sequence for item in items] == list(range(1, 18))
    assert [item for item in items if item.HasField("input")] == own
    assert [origin.parent_session_id for origin in (await session_of(store, "f8")).ancestry] == [
        f"f{level}" for level in range(7, -1, -1)
    ]
    responses = await until_current(watch_of(store, "f8", after_revision=5))
    assert [item for one in responses for item in one.items] == [item for item in items if item.revision > 5]


async def test_fork_at_an_inherited_item(store: SessionStore) -> None:
    await chain_of_forks(store, depth=3)
    child = await fork(store, "f3", "c", cut=3)
    assert [(one.parent_session_id, one.cut_sequence) for one in child.ancestry] == [
        ("f3", 3),
        ("f2", 3),
        ("f1", 3),
        ("f0", 1),
    ]
    items = await items_of(store, "c")
    assert items[:3] == (await items_of(store, "f1"))[:3]
    assert len(items) == 4


async def test_deleted_parent_stays_readable_through_its_forks(store: SessionStore) -> None:
    author = await new_session(store, "p")
    image = await author.put(b"image")
    await author.commit(text_input("i1", "look", blob_part(image)))
    await author.commit(text_input("i2"))
    await fork(store, "p", "c", cut=1)
    await fork(store, "c", "cc")
    before = {child: await items_of(store, child) for child in ("c", "cc")}
    await store.delete_session(store_pb2.DeleteSessionRequest(session_id="p"))
    await store.delete_session(store_pb2.DeleteSessionRequest(session_id="c"))
    assert await items_of(store, "cc") == before["cc"]
    assert await get_blob_bytes(store, "cc", image.digest) == b"image"
    for session_id in ("p", "c"):
        with pytest.raises(FailedPreconditionError):
            await session_of(store, session_id)


async def test_blob_named_behind_the_cut_is_not_the_childs(store: SessionStore) -> None:
    author = await new_session(store, "p")
    await author.commit(text_input("i1"))
    await fork(store, "p", "c")
    image = await author.put(b"later")
    await author.commit(text_input("i2", "look", blob_part(image)))
    with pytest.raises(NotFoundError):
        await get_blob_bytes(store, "c", image.digest)


async def test_fork_of_an_empty_session(store: SessionStore) -> None:
    await new_session(store, "p")
    assert (await fork(store, "p", "c")).last_sequence == 1
