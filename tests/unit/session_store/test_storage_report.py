"""What a session takes up is counted by kind, with what it shares; room that is given up goes back to the disk."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.state_check import check_state
from tests.contract.session_store_suite.forks import author_of, fork
from tests.support.eventually import eventually
from tests.support.session_records import blob_part, items_of, new_session, text_input, write_tool_turn
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


async def storage_of(store: SqliteSessionStore, session_id: str) -> session_pb2.SessionStorage:
    request = store_pb2.GetSessionRequest(session_id=session_id, with_storage=True)
    return (await store.get_session(request)).storage


async def test_report_counts_each_kind_and_what_is_shared(tmp_path: Path) -> None:
    async with SqliteSessionStore.open(tmp_path / "sessions.db") as store:
        author = await new_session(store, "p")
        image = await author.put(b"x" * 5_000)
        await author.put(b"unnamed")
        await author.commit(text_input("i", "look", blob_part(image)))
        await write_tool_turn(author, 1)
        await author.commit(text_input("behind the cut"))
        await fork(store, "p", "c", cut=6)
        await (await author_of(store, "c")).commit(text_input("more"))
        await fork(store, "c", "cc")
        parent, child = await storage_of(store, "p"), await storage_of(store, "c")
        items = await items_of(store, "p")
    counts = {amount.kind: amount.count for amount in parent.items}
    assert counts == {"input": 3, "turn": 1, "model_response": 1, "tool_call_status": 2}
    assert sum(amount.bytes for amount in parent.items) == sum(item.ByteSize() for item in items)
    assert [(amount.kind, amount.count) for amount in parent.operations] == [("bash", 1)]
    assert (parent.blobs, parent.blob_bytes, parent.unnamed_blobs) == (2, 5_007, 1)
    assert (parent.forks, parent.shared_items) == (2, 6)
    assert parent.shared_bytes == sum(item.ByteSize() for item in items[:6]) + 5_000
    assert parent.inherited_items == 0
    assert (child.inherited_items, child.blobs, child.forks) == (6, 0, 1)
    assert child.inherited_item_bytes == sum(item.ByteSize() for item in items[:6])


async def test_report_is_made_where_it_is_asked_for(tmp_path: Path) -> None:
    async with SqliteSessionStore.open(tmp_path / "sessions.db") as store:
        await new_session(store)
        answer = await store.get_session(store_pb2.GetSessionRequest(session_id="s"))
        assert not answer.HasField("storage")


async def test_file_shrinks_when_sessions_are_deleted(tmp_path: Path) -> None:
    """A hundred megabytes: what remains is what the other session takes up, and a little to write to."""
    path = tmp_path / "sessions.db"
    async with SqliteSessionStore.open(path) as store:
        kept = await new_session(store, "kept")
        await write_tool_turn(kept, 1)
        for number in range(10):
            author = await new_session(store, f"large{number}")
            image = await author.put(random.Random(number).randbytes(10_000_000))
            await author.commit(text_input("i", "look", blob_part(image)))
            await kept.commit(text_input(f"between{number}", "text " * 200))
    full = path.stat().st_size
    assert full > 100_000_000

    def pages() -> tuple[int, int]:
        with closing(sqlite3.connect(path)) as connection:
            (count,) = connection.execute("PRAGMA page_count").fetchone()
            (waiting,) = connection.execute("SELECT COUNT(*) FROM sessions WHERE needs_purge = 1").fetchone()
        return int(count), int(waiting)

    async with SqliteSessionStore.open(path) as store:
        for number in range(10):
            await store.delete_session(store_pb2.DeleteSessionRequest(session_id=f"large{number}", force=True))
        await eventually(lambda: pages()[0] * 4096 < 3_000_000 and pages()[1] == 0, within_s=20)
        # The room that is left is used.
        await (await author_of(store, "kept")).commit(text_input("after"))
    assert path.stat().st_size < 3_000_000
    assert check_state(path).findings == ()
