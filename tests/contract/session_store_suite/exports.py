"""What every session store does with exports and imports, and what it says of itself. Needs a fixture `store`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable

import pytest

from harness.errors import AlreadyExistsError, FailedPreconditionError, HarnessError, NotFoundError
from harness.session_store import SessionStore, get_blob_bytes
from tests.contract.session_store_suite.forks import author_of, fork
from tests.support.session_records import (
    blob_part,
    items_of,
    new_session,
    operations_of,
    session_of,
    text_input,
    turn,
    write_tool_turn,
)
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

IMAGE = b"image" * 200_000


async def exported(store: SessionStore, session_id: str = "s") -> list[store_pb2.ExportRecord]:
    request = store_pb2.ExportSessionRequest(session_id=session_id)
    messages = [message async for message in store.export_session(request)]
    assert all(message.ByteSize() <= 1024 * 1024 for message in messages)
    return [record for message in messages for record in message.records]


async def stream(
    records: Iterable[store_pb2.ExportRecord], session_id: str
) -> AsyncIterator[store_pb2.ImportSessionRequest]:
    for record in records:
        yield store_pb2.ImportSessionRequest(session_id=session_id, records=[record])


async def write_history(store: SessionStore, session_id: str = "s") -> None:
    """Write a finished turn, an image, and a call that is still open."""
    author = await new_session(store, session_id)
    await write_tool_turn(author, 1)
    image = await author.put(IMAGE)
    await author.commit(text_input("look", "at this", blob_part(image)))
    await write_tool_turn(author, 2, is_finished=False)


async def test_export_comes_back_as_it_was(store: SessionStore) -> None:
    author = await new_session(store)
    await write_tool_turn(author, 1)
    image = await author.put(IMAGE)
    await author.commit(text_input("look", "at this", blob_part(image)))
    records = await exported(store)
    made = await store.import_session(stream(records, "copy"))
    original, copy = await session_of(store, "s"), made.session
    assert await items_of(store, "copy") == await items_of(store, "s")
    assert await get_blob_bytes(store, "copy", image.digest) == IMAGE
    assert (copy.last_sequence, copy.revision, copy.rest) == (
        original.last_sequence,
        original.revision,
        original.rest,
    )
    assert (copy.requested_settings, copy.create_time) == (original.requested_settings, original.create_time)
    assert copy.session_uid != original.session_uid
    moved = await operations_of(store, "copy")
    for one in moved:
        one.session_id = "s"
    assert moved == await operations_of(store, "s")
    kinds = [record.WhichOneof("record") for record in records]
    assert kinds == ["header", *["item"] * 6, "operation", *["blob_chunk"] * 2, "end"]


async def test_import_ends_what_was_open_and_goes_on(store: SessionStore) -> None:
    await write_history(store)
    await store.import_session(stream(await exported(store), "copy"))
    items = await items_of(store, "copy")
    assert items[:-1] == await items_of(store, "s")
    assert items[-1].tool_call_status.call_id == "c2"
    assert items[-1].tool_call_status.result.outcome == item_pb2.CALL_OUTCOME_NOT_CARRIED_OVER
    (ended,) = [one for one in await operations_of(store, "copy") if one.operation_id == "o2"]
    assert (ended.status, ended.error.reason) == (operation_pb2.OPERATION_STATUS_CANCELED, "NOT_CARRIED_OVER")
    assert await operations_of(store, "copy", store_pb2.OPERATION_FILTER_UNSETTLED) == []
    copy = await session_of(store, "copy")
    assert copy.rest.state == session_pb2.REST_STATE_AT_REST
    author = await author_of(store, "copy")
    with pytest.raises(AlreadyExistsError):
        await author.commit(text_input("i1"))
    await author.commit(text_input("new"), turn("t3", "t2"))


async def test_fork_is_exported_with_what_it_inherited(store: SessionStore) -> None:
    await write_history(store)
    await fork(store, "s", "child")
    await (await author_of(store, "child")).commit(text_input("more"))
    records = await exported(store, "child")
    await store.delete_session(store_pb2.DeleteSessionRequest(session_id="s", force=True))
    made = await store.import_session(stream(records, "copy"))
    assert await items_of(store, "copy") == await items_of(store, "child")
    assert not made.session.ancestry
    (image,) = [item.input.content.parts[1].image.blob for item in await items_of(store, "copy") if item.sequence == 6]
    assert await get_blob_bytes(store, "copy", image.digest) == IMAGE


async def test_import_needs_an_unused_id(store: SessionStore) -> None:
    await write_history(store)
    records = await exported(store)
    with pytest.raises(AlreadyExistsError) as caught:
        await store.import_session(stream(records, ""))
    assert caught.value.reason == "SESSION_EXISTS"
    await store.delete_session(store_pb2.DeleteSessionRequest(session_id="s", force=True))
    with pytest.raises(FailedPreconditionError):
        await store.import_session(stream(records, "s"))


Records = list[store_pb2.ExportRecord]


def _without(kind: str, index: int = 0) -> Callable[[Records], Records]:
    def damage(records: Records) -> Records:
        chosen = [record for record in records if record.WhichOneof("record") == kind][index]
        return [record for record in records if record is not chosen]

    return damage


def _changed_content(records: Records) -> Records:
    for record in records:
        if record.HasField("blob_chunk"):
            record.blob_chunk.data = b"x" * len(record.blob_chunk.data)
    return records


def _later_version(records: Records) -> Records:
    records[0].header.session.format_version = 99
    return records


def _later_item(records: Records) -> Records:
    records[1].item.schema_version = 99
    return records


def _broken_chain(records: Records) -> Records:
    records[2].item.turn.previous_turn_id = "nowhere"
    return records


def _epoch_without_successor(records: Records) -> Records:
    records[0].header.session.epoch = 2**63 - 1
    return records


def _step_without_successor(records: Records) -> Records:
    operation = next(record.operation for record in records if record.HasField("operation"))
    operation.step = 2**64 - 1
    return records


DAMAGES: dict[str, Callable[[Records], Records]] = {
    "no header": _without("header"),
    "no end": _without("end"),
    "an item is missing": _without("item", 2),
    "the last item is missing": _without("item", -1),
    "an operation is missing": _without("operation"),
    "a blob is cut": _without("blob_chunk", 1),
    "a blob is changed": _changed_content,
    "a later format": _later_version,
    "a later item": _later_item,
    "turns do not chain": _broken_chain,
    "the end comes twice": lambda records: [*records, records[-1]],
    "the order is wrong": lambda records: [records[0], *records[-2:0:-1], records[-1]],
    "an epoch that can't grow": _epoch_without_successor,
    "a step that can't grow": _step_without_successor,
    "nothing": lambda records: [],
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damaged_export_makes_nothing(store: SessionStore, damage: str) -> None:
    await write_history(store)
    records = await exported(store)
    with pytest.raises(HarnessError):
        await store.import_session(stream(DAMAGES[damage](records), "copy"))
    with pytest.raises(NotFoundError):
        await session_of(store, "copy")
    listed = await store.list_sessions(store_pb2.ListSessionsRequest())
    assert [session.session_id for session in listed.sessions] == ["s"]
    await store.import_session(stream(await exported(store), "copy"))


async def test_store_says_who_it_is_and_what_it_reads(store: SessionStore) -> None:
    info = (await store.get_server_info(store_pb2.GetServerInfoRequest())).info
    assert (info.component, bool(info.instance_id)) == ("session-store", True)
    assert {one.kind: one.max_read for one in info.versions} == {
        "session_format": 1,
        "item": 1,
        "operation": 1,
        "export": 1,
    }
