"""Whatever a release has stored, every later one reads. The files are never updated; a new version adds new ones."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from google.protobuf import text_format

from harness.session_store import get_blob_bytes, records
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.schema import APPLICATION_ID
from harness.session_store.sqlite.state_check import check_state
from tests.support.session_records import items_of, operations_of, session_of
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

GOLDEN = Path(__file__).parents[2] / "golden" / "session_store"
RECORDS = sorted(path.stem for path in GOLDEN.glob("*.binpb"))


@pytest.mark.parametrize("name", RECORDS)
def test_stored_record_decodes_for_ever(name: str) -> None:
    record = (GOLDEN / f"{name}.binpb").read_bytes()
    text = (GOLDEN / f"{name}.txtpb").read_text()
    if name.startswith("operation-"):
        operation = records.decode_operation(record, name)
        assert operation == text_format.Parse(text, operation_pb2.Operation())
        records.check_fields_known(operation, name)
    else:
        item = records.decode_item(record, name)
        assert item == text_format.Parse(text, item_pb2.Item())
        records.check_fields_known(item, name)


def test_every_kind_of_record_is_kept() -> None:
    kinds = set[str]()
    for name in RECORDS:
        record = (GOLDEN / f"{name}.binpb").read_bytes()
        if name.startswith("operation-"):
            kinds.add(str(operation_pb2.Operation.FromString(record).WhichOneof("state")))
            continue
        item = item_pb2.Item.FromString(record)
        kinds.add(str(item.WhichOneof("item")))
        kinds.add(str(item.input.WhichOneof("payload")))
        kinds.add(str(item.input.control.WhichOneof("control")))
    oneofs = (
        item_pb2.Item.DESCRIPTOR.oneofs_by_name["item"],
        item_pb2.Input.DESCRIPTOR.oneofs_by_name["payload"],
        item_pb2.Control.DESCRIPTOR.oneofs_by_name["control"],
        operation_pb2.Operation.DESCRIPTOR.oneofs_by_name["state"],
    )
    assert {field.name for oneof in oneofs for field in oneof.fields} <= kinds


async def test_stored_file_opens_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((GOLDEN / "store-v1.sql").read_text())
        connection.executescript(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 1;")
    assert check_state(path).findings == ()
    async with SqliteSessionStore.open(path) as store:
        info = (await store.get_server_info(store_pb2.GetServerInfoRequest())).info
        session, child = await session_of(store, "s"), await session_of(store, "c")
        assert (info.instance_id, session.session_uid) == ("store-1", "uid-1")
        assert (session.last_sequence, session.epoch, session.owner.name) == (10, 1, "a")
        assert (child.last_sequence, child.ancestry[0].cut_sequence) == (8, 6)
        assert [item.sequence for item in await items_of(store, "c")] == list(range(1, 9))
        assert [one.operation_id for one in await operations_of(store, "s")] == ["o1", "o2"]
        image = (await items_of(store, "s"))[5].input.content.parts[1].image.blob
        assert await get_blob_bytes(store, "c", image.digest) == b"image"
        assert [one.label for one in (await store.list_tokens(store_pb2.ListTokensRequest())).tokens] == ["laptop"]
