"""What every session store does with sessions and commits. Needs a fixture `store`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from harness.errors import (
    AlreadyExistsError,
    ConflictError,
    FailedPreconditionError,
    HarnessError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from harness.session_store import SessionStore
from tests.support.session_records import (
    SETTINGS,
    Author,
    at_rest,
    completed,
    failure,
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
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


async def test_repeated_create_returns_the_session_and_another_is_refused(store: SessionStore) -> None:
    request = store_pb2.CreateSessionRequest(
        session_id="s", requested_settings=SETTINGS, initial_settings=session_pb2.SessionSettings(model="resolved")
    )
    first = await store.create_session(request)
    again = await store.create_session(request)
    assert (first.duplicate, again.duplicate) == (False, True)
    assert again.session == first.session
    other = session_pb2.SessionSettings(provider="other")
    with pytest.raises(AlreadyExistsError) as caught:
        await store.create_session(store_pb2.CreateSessionRequest(session_id="s", requested_settings=other))
    assert caught.value.reason == "SESSION_EXISTS"
    assert await session_of(store, "s") == first.session


async def test_session_without_id_gets_one(store: SessionStore) -> None:
    made = await store.create_session(store_pb2.CreateSessionRequest(requested_settings=SETTINGS))
    assert await session_of(store, made.session.session_id) == made.session


@pytest.mark.parametrize("session_id", ["a/b", "..", "x" * 129, "a b", "é", "a\n"])
async def test_bad_session_id_is_refused(store: SessionStore, session_id: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await store.create_session(store_pb2.CreateSessionRequest(session_id=session_id))
    assert caught.value.reason == "INVALID_SESSION_ID"


async def test_unknown_session_is_not_found(store: SessionStore) -> None:
    for call in (
        store.get_session(store_pb2.GetSessionRequest(session_id="no")),
        store.list_items(store_pb2.ListItemsRequest(session_id="no")),
        store.delete_session(store_pb2.DeleteSessionRequest(session_id="no")),
        store.commit(Author(store, "no").request(text_input("i"))),
        anext(aiter(store.watch_session(store_pb2.WatchSessionRequest(session_id="no")))),
    ):
        with pytest.raises(NotFoundError) as caught:
            await call
        assert caught.value.reason == "SESSION_NOT_FOUND"


async def test_sessions_are_listed_by_id_in_pages(store: SessionStore) -> None:
    for session_id in ("b2", "a1", "b1", "c1", "b3"):
        await new_session(store, session_id)
    await Author(store, "b2").commit(rest=working())

    async def listed(**wishes: object) -> list[list[str]]:
        pages, token = [], ""
        while True:
            request = store_pb2.ListSessionsRequest(page_size=2, page_token=token, **wishes)  # type: ignore[arg-type]
            page = await store.list_sessions(request)
            pages.append([session.session_id for session in page.sessions])
            token = page.next_page_token
            if not token:
                return pages

    assert await listed() == [["a1", "b1"], ["b2", "b3"], ["c1"]]
    assert await listed(id_prefix="b") == [["b1", "b2"], ["b3"]]
    assert await listed(states=[session_pb2.SESSION_STATE_RUNNING]) == [["b2"]]
    states = [session_pb2.SESSION_STATE_RUNNING, session_pb2.SESSION_STATE_IDLE]
    assert await listed(id_prefix="b", states=states) == [["b1", "b2"], ["b3"]]
    page = await store.list_sessions(store_pb2.ListSessionsRequest())
    assert page.sessions[0] == await session_of(store, "a1")


async def test_commit_appends_gaplessly_and_pages_read_it_back(store: SessionStore) -> None:
    author = await new_session(store)
    for number in range(1, 6):
        await write_tool_turn(author, number)
    history = await items_of(store, "s")
    assert [item.sequence for item in history] == list(range(1, 26))
    assert [item.revision for item in history[:6]] == [1, 1, 2, 2, 3, 4]
    assert all(item.HasField("record_time") for item in history)
    assert await items_of(store, "s", page_size=7) == history
    session = await session_of(store, "s")
    assert (session.last_sequence, session.revision, session.max_item_version) == (25, 15, 1)
    behind = await store.list_items(store_pb2.ListItemsRequest(session_id="s", after_sequence=99))
    assert behind == store_pb2.ListItemsResponse(next_after_sequence=99)


async def test_item_of_an_input_is_found_by_its_id(store: SessionStore) -> None:
    author = await new_session(store)
    await author.commit(text_input("a"), text_input("b"))
    found = await store.list_items(store_pb2.ListItemsRequest(session_id="s", input_id="b"))
    assert [item.sequence for item in found.items] == [2]
    assert not (await store.list_items(store_pb2.ListItemsRequest(session_id="s", input_id="c"))).items


async def test_request_is_left_as_it_was(store: SessionStore) -> None:
    author = await new_session(store)
    request = author.request(text_input("a"), turn("t1"))
    before = store_pb2.CommitRequest()
    before.CopyFrom(request)
    await store.commit(request)
    assert request == before


async def test_repeated_commit_answers_as_the_first_time(store: SessionStore) -> None:
    author = await new_session(store)
    request = author.request(text_input("a"))
    first = await store.commit(request)
    again = await store.commit(request)
    assert again.duplicate
    again.duplicate = False
    assert again == first
    assert len(await items_of(store, "s")) == 1


async def test_retried_delivery_is_stored_once(store: SessionStore) -> None:
    """A resend under another commit ID, as another coordinator does it, is told where the first one is."""
    author = await new_session(store)
    await author.commit(text_input("i1", "hi"))

    async def resend(number: int) -> str:
        try:
            await store.commit(author.request(text_input("i1", "hi"), commit_id=f"resend-{number}"))
        except AlreadyExistsError as err:
            assert err.metadata["sequence"] == "1"
            return err.reason
        return "stored"

    assert set(await asyncio.gather(*map(resend, range(10)))) == {"DUPLICATE_INPUT"}
    assert len(await items_of(store, "s")) == 1


async def test_same_input_id_with_other_content_is_a_conflict(store: SessionStore) -> None:
    author, other = await new_session(store), await new_session(store, "other")
    await author.commit(text_input("i1", "hi"))
    with pytest.raises(AlreadyExistsError) as caught:
        await author.commit(text_input("i1", "delete it"))
    assert (caught.value.reason, caught.value.metadata["sequence"]) == ("INPUT_ID_CONFLICT", "1")
    with pytest.raises(AlreadyExistsError):
        await author.commit(text_input("i2", "a"), text_input("i2", "b"))
    await author.commit(text_input("i2", "yes"), text_input("i3", "yes"))
    await other.commit(text_input("i1", "other"))
    texts = [item.input.content.parts[0].text.text for item in await items_of(store, "s")]
    assert texts == ["hi", "yes", "yes"]


@pytest.mark.parametrize("input_id", ["", "x" * 10_000, "a\0b"])
async def test_bad_input_id_is_refused(store: SessionStore, input_id: str) -> None:
    author = await new_session(store)
    with pytest.raises(InvalidArgumentError):
        await author.commit(text_input(input_id))
    assert (await session_of(store, "s")).revision == 0


async def test_checks_come_in_order(store: SessionStore) -> None:
    """Session, commit ID, epoch, expected sequence, invariants."""
    author = await new_session(store)
    bad_chain = author.request(turn("t2", "nowhere"), commit_id="bad")
    bad_chain.expected_sequence, bad_chain.epoch = 7, 7

    async def reason() -> str:
        with pytest.raises(HarnessError) as caught:
            await store.commit(bad_chain)
        return caught.value.reason

    assert await reason() == "STALE_EPOCH"
    bad_chain.epoch = 0
    assert await reason() == "SEQUENCE_CONFLICT"
    bad_chain.expected_sequence = 0
    assert await reason() == "INVARIANT_VIOLATED"
    await author.send(author.request(text_input("a"), commit_id="known"))
    known = author.request(turn("t2", "nowhere"), commit_id="known")
    known.expected_sequence, known.epoch = 7, 7
    assert (await store.commit(known)).duplicate
    await store.delete_session(store_pb2.DeleteSessionRequest(session_id="s"))
    with pytest.raises(FailedPreconditionError) as caught:
        await store.commit(known)
    assert caught.value.reason == "SESSION_DELETED"


async def test_two_writers_of_one_session_never_mix(store: SessionStore) -> None:
    await new_session(store)
    acknowledged: list[str] = []

    async def write(name: str) -> None:
        author = Author(store, "s")
        for number in range(20):
            input_id = f"{name}-{number}"
            while True:
                try:
                    await author.send(author.request(text_input(input_id), commit_id=f"{input_id}-{author.sequence}"))
                except ConflictError as err:
                    assert err.reason == "SEQUENCE_CONFLICT"
                    author.sequence = int(err.metadata["last_sequence"])
                else:
                    acknowledged.append(input_id)
                    break

    await asyncio.gather(write("a"), write("b"), write("c"))
    history = await items_of(store, "s")
    assert [item.sequence for item in history] == list(range(1, 61))
    assert sorted(item.input.input_id for item in history) == sorted(acknowledged)


async def test_call_and_operation_are_visible_together_or_not_at_all(store: SessionStore) -> None:
    author = await new_session(store)
    await author.commit(text_input("i1"), turn("t1"))
    before = (await items_of(store, "s"), await session_of(store, "s"))
    bad = author.request(response("t1", ["c1"]), waiting("t1", "c1", "o1"), operations=[])
    with pytest.raises(FailedPreconditionError):
        await store.commit(bad)
    assert (await items_of(store, "s"), await session_of(store, "s")) == before
    assert await operations_of(store, "s") == []
    await write_second_half(author)
    assert [one.status for one in await operations_of(store, "s")] == [operation_pb2.OPERATION_STATUS_COMPLETED]


async def write_second_half(author: Author) -> None:
    await author.commit(response("t1", ["c1"]), waiting("t1", "c1", "o1"), operations=[operation("s", "o1", "c1")])
    await author.commit(final("t1", "c1", "o1"), operations=[completed("s", "o1", "c1")])


async def test_unsettled_operations_are_those_whose_end_the_model_has_not_seen(store: SessionStore) -> None:
    author = await new_session(store)
    await author.commit(turn("t1"), operations=[operation("s", "own")])
    await author.commit(
        response("t1", ["c1"]),
        waiting("t1", "c1", "o1", "o2"),
        operations=[operation("s", "o1", "c1"), operation("s", "o2", "c1")],
    )

    async def unsettled() -> list[str]:
        found = await operations_of(store, "s", store_pb2.OPERATION_FILTER_UNSETTLED)
        return [one.operation_id for one in found]

    assert await unsettled() == ["own", "o1", "o2"]
    await author.commit(operations=[completed("s", "o1", "c1"), completed("s", "own")])
    assert await unsettled() == ["own", "o1", "o2"], "an operation without call stays: its outcome is of interest"
    await author.commit(final("t1", "c1", "o1", "o2"), operations=[completed("s", "o2", "c1")])
    assert await unsettled() == ["own"]
    assert len(await operations_of(store, "s")) == 3
    one = await store.list_operations(store_pb2.ListOperationsRequest(session_id="s", operation_id="o2"))
    assert list(one.operations) == [completed("s", "o2", "c1")]
    with pytest.raises(NotFoundError):
        await store.list_operations(store_pb2.ListOperationsRequest(session_id="s", operation_id="o3"))


Change = Callable[[Author], store_pb2.CommitRequest]

OPEN = operation_pb2.OPERATION_STATUS_AWAITING


def _other_type(author: Author) -> store_pb2.CommitRequest:
    changed = operation("s", "o2", "c2", step=2)
    changed.type = "timer"
    changed.timer.SetInParent()
    return author.request(operations=[changed])


# The session stands so: t1 answered with c1 (final, o1 completed), t2 answered with c2 (waits for o2), t3 open.
VIOLATIONS: dict[str, Change] = {
    "turn_chain": lambda a: a.request(turn("t4", "t2")),
    "turn_once": lambda a: a.request(turn("t1", "t3")),
    "response_to_latest_turn": lambda a: a.request(response("t2")),
    "response_to_latest_turn ": lambda a: a.request(response("t3"), response("t3")),
    "response_to_latest_turn  ": lambda a: a.request(failure("t3"), response("t3")),
    "response_to_latest_turn   ": lambda a: a.request(failure("t2")),
    "first_status_with_response": lambda a: a.request(response("t3", ["c3"])),
    "first_status_with_response ": lambda a: a.request(response("t3", ["c3"]), turn("t4", "t3"), final("t3", "c3")),
    "first_status_introduces_operations": lambda a: a.request(
        response("t3", ["c3"]), waiting("t3", "c3", "o3"), operations=[]
    ),
    "first_status_introduces_operations ": lambda a: a.request(
        response("t3", ["c3"]),
        waiting("t3", "c3", "o3"),
        operations=[operation("s", "o3", "c3"), operation("s", "o4", "c3")],
    ),
    "operation_named_by_status": lambda a: a.request(operations=[operation("s", "o3", "c2")]),
    "operation_once": lambda a: a.request(operations=[operation("s", "x"), operation("s", "x", step=2)]),
    "call_once": lambda a: a.request(response("t3", ["c1"]), final("t3", "c1")),
    "status_of_known_call": lambda a: a.request(waiting("t2", "c9", "o2")),
    "status_of_known_call ": lambda a: a.request(waiting("t1", "c2", "o2")),
    "status_names_own_operations": lambda a: a.request(waiting("t2", "c2", "o1")),
    "one_final_status": lambda a: a.request(final("t1", "c1", "o1")),
    "one_final_status ": lambda a: a.request(
        final("t2", "c2", "o2"), final("t2", "c2", "o2"), operations=[completed("s", "o2", "c2")]
    ),
    "final_status_needs_terminal_operations": lambda a: a.request(final("t2", "c2", "o2")),
    "final_status_needs_terminal_operations ": lambda a: a.request(
        final("t2", "c2"), operations=[operation("s", "o2", "c2", step=2, status=OPEN)]
    ),
    "operation_type_never_changes": _other_type,
    "operation_call_never_changes": lambda a: a.request(operations=[operation("s", "o2", "c1", step=2)]),
    "nothing_follows_terminal_state": lambda a: a.request(operations=[completed("s", "o1", "c1", step=99)]),
    "steps_only_grow": lambda a: a.request(operations=[operation("s", "o2", "c2", status=OPEN)]),
    "gapless_sequence": lambda a: a.request(_numbered(text_input("i9"), 99)),
    "compaction_of_answered_turn": lambda a: a.request(_compaction("t1")),
    "compaction_of_answered_turn ": lambda a: a.request(_compaction("t9")),
    "fork_by_store": lambda a: a.request(
        item_pb2.Item(
            schema_version=1, fork=item_pb2.Fork(origin=session_pb2.ForkOrigin(parent_session_id="s", cut_sequence=1))
        )
    ),
}


def _numbered(item: item_pb2.Item, sequence: int) -> item_pb2.Item:
    item.sequence = sequence
    return item


def _compaction(turn_id: str) -> item_pb2.Item:
    return item_pb2.Item(
        schema_version=1, compaction=item_pb2.Compaction(turn_id=turn_id, through_sequence=1, summary="short")
    )


@pytest.mark.parametrize("rule", VIOLATIONS)
async def test_no_caller_can_break_a_rule_of_the_history(store: SessionStore, rule: str) -> None:
    author = await new_session(store)
    await write_tool_turn(author, 1)
    await write_tool_turn(author, 2, is_finished=False)
    await author.commit(turn("t3", "t2"))
    before = (await items_of(store, "s"), await operations_of(store, "s"), await session_of(store, "s"))
    with pytest.raises(FailedPreconditionError) as caught:
        await store.commit(VIOLATIONS[rule](author))
    assert (caught.value.reason, caught.value.metadata["rule"]) == ("INVARIANT_VIOLATED", rule.strip())
    after = (await items_of(store, "s"), await operations_of(store, "s"), await session_of(store, "s"))
    assert after == before


async def test_compaction_follows_its_answered_turn(store: SessionStore) -> None:
    author = await new_session(store)
    await write_tool_turn(author, 1)
    await author.commit(turn("k", "t1", item_pb2.TURN_KIND_COMPACTION))
    await author.commit(response("k"), _compaction("k"))
    assert (await items_of(store, "s"))[-1].compaction.turn_id == "k"


async def test_interrupted_turn_is_followed_by_another(store: SessionStore) -> None:
    author = await new_session(store)
    await author.commit(turn("t1"))
    await author.commit(text_input("i2"), turn("t2", "t1"))
    await author.commit(failure("t2"))
    await author.commit(turn("t3", "t2"))
    await author.commit(response("t3"))
    assert author.sequence == 6


def _unknown_version(kind: str) -> Change:
    def make(author: Author) -> store_pb2.CommitRequest:
        request = author.request(text_input("i"), operations=[operation("s", "o")])
        if kind == "ITEM":
            request.items[0].schema_version = 99
        elif kind == "INPUT":
            request.items[0].input.schema_version = 99
        else:
            request.operations[0].schema_version = 99
        return request

    return make


@pytest.mark.parametrize("kind", ["ITEM", "INPUT", "OPERATION"])
async def test_unknown_version_is_refused_and_changes_nothing(store: SessionStore, kind: str) -> None:
    author = await new_session(store)
    with pytest.raises(UnsupportedError) as caught:
        await store.commit(_unknown_version(kind)(author))
    assert caught.value.reason == f"UNSUPPORTED_{kind}_VERSION"
    assert (await session_of(store, "s")).revision == 0


UNKNOWN_FIELD = b"\xf8\x3f\x01"
"""Field 1023, a varint."""


async def test_unknown_fields_and_unset_choices_are_refused(store: SessionStore) -> None:
    author = await new_session(store)
    unknown, unset, wrong_enum = (author.request(text_input("i")) for _ in range(3))
    unknown.items[0].input.content.parts[0].text.MergeFromString(UNKNOWN_FIELD)
    unset.items[0].input.content.parts.add().text.SetInParent()
    wrong_enum.rest.MergeFromString(b"\x08\x63")
    for request, field in (
        (unknown, "items[0].input.content.parts[0].text.1023"),
        (unset, "items[0].input.content.parts[1].text.body"),
        (wrong_enum, "rest.state"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            await store.commit(request)
        assert (caught.value.reason, caught.value.metadata["field"]) == ("UNKNOWN_FIELDS", field)
    create = store_pb2.CreateSessionRequest(session_id="n")
    create.MergeFromString(UNKNOWN_FIELD)
    with pytest.raises(InvalidArgumentError):
        await store.create_session(create)


async def test_incomplete_records_are_refused(store: SessionStore) -> None:
    author = await new_session(store)
    kindless, typeless, restless = text_input("i"), operation("s", "o"), author.request(text_input("i"))
    kindless.input.kind = item_pb2.INPUT_KIND_CRASH
    typeless.type = "timer"
    restless.rest.Clear()
    for request in (
        author.request(kindless),
        author.request(operations=[typeless]),
        author.request(operations=[operation("other", "o")]),
        author.request(operations=[operation("s", "../x")]),
        author.request(item_pb2.Item(schema_version=1, turn=item_pb2.Turn(turn_id="t"))),
        restless,
    ):
        with pytest.raises(InvalidArgumentError):
            await store.commit(request)
    assert (await session_of(store, "s")).revision == 0


async def test_commit_without_items_changes_the_rest(store: SessionStore) -> None:
    author = await new_session(store)
    await author.commit(rest=working())
    session = await session_of(store, "s")
    assert (session.rest, session.last_sequence, session.revision) == (working(), 0, 1)
    await author.commit(rest=at_rest())
    assert (await session_of(store, "s")).rest == at_rest()


async def test_deleted_session_is_gone_for_ever(store: SessionStore) -> None:
    author = await new_session(store)
    await author.commit(text_input("i"), rest=working())
    delete = store_pb2.DeleteSessionRequest(session_id="s")
    with pytest.raises(FailedPreconditionError) as caught:
        await store.delete_session(delete)
    assert caught.value.reason == "SESSION_NOT_AT_REST"
    delete.force = True
    await store.delete_session(delete)
    await store.delete_session(delete)
    for call in (
        store.get_session(store_pb2.GetSessionRequest(session_id="s")),
        store.create_session(store_pb2.CreateSessionRequest(session_id="s", requested_settings=SETTINGS)),
        store.fork_session(store_pb2.ForkSessionRequest(request_id="r", parent_session_id="s", session_id="f")),
        store.list_items(store_pb2.ListItemsRequest(session_id="s")),
    ):
        with pytest.raises(FailedPreconditionError) as caught:
            await call
        assert caught.value.reason == "SESSION_DELETED"
    assert not (await store.list_sessions(store_pb2.ListSessionsRequest())).sessions


async def test_many_sessions_commit_at_once_and_a_bad_one_fails_alone(store: SessionStore) -> None:
    authors = [await new_session(store, f"s{number}") for number in range(20)]

    async def write(number: int, author: Author) -> str:
        bad = turn("t", "nowhere") if number % 5 == 0 else turn("t")
        try:
            await author.commit(text_input("i"), bad)
        except FailedPreconditionError as err:
            return err.reason
        return "stored"

    results = await asyncio.gather(*(write(*pair) for pair in enumerate(authors)))
    assert results == ["INVARIANT_VIOLATED" if number % 5 == 0 else "stored" for number in range(20)]
    lengths = [len(await items_of(store, author.session_id)) for author in authors]
    assert lengths == [0 if number % 5 == 0 else 2 for number in range(20)]
