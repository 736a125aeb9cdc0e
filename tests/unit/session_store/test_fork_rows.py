"""Whatever is done with a fork, not one byte of its parent's rows changes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from harness.session_store.sqlite import SqliteSessionStore
from tests.support.session_records import Author, blob_part, new_session, session_of, text_input, write_tool_turn
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

Rows = dict[str, list[tuple[object, ...]]]


def rows_of(path: Path, session_id: str) -> Rows:
    """Return every row that belongs to a session, of every table that has a session's."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        (key,) = connection.execute("SELECT session_key FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found: Rows = {}
        for name in names:
            columns = {column[1] for column in connection.execute(f"PRAGMA table_info({name})")}
            if "session_key" in columns:
                found[name] = connection.execute(f"SELECT * FROM {name} WHERE session_key = ?", (key,)).fetchall()
        found["blob_chunks"] = connection.execute(
            "SELECT c.* FROM blob_chunks c JOIN blobs USING (blob_key) WHERE session_key = ?", (key,)
        ).fetchall()
    return found


async def fork(store: SqliteSessionStore, parent: str, child: str, cut: int = 0) -> Author:
    request = store_pb2.ForkSessionRequest(
        request_id=f"fork-{child}", parent_session_id=parent, session_id=child, cut_sequence=cut
    )
    await store.fork_session(request)
    return Author(store, child, sequence=(await session_of(store, child)).last_sequence)


async def test_a_fork_changes_no_byte_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    async with SqliteSessionStore.open(path) as store:
        author = await new_session(store, "p")
        await author.commit(text_input("first", "look", blob_part(await author.put(b"an image"))))
        await write_tool_turn(author, 1)
        await write_tool_turn(author, 2, is_finished=False)
        before = rows_of(path, "p")
        assert all(before[name] for name in ("sessions", "items", "operations", "inputs", "turns", "calls", "blobs"))
        child = await fork(store, "p", "c")
        early = await fork(store, "p", "early", cut=1)
        for number, one in enumerate((child, early)):
            await one.commit(text_input(f"more-{number}", "more", blob_part(await one.put(b"another image"))))
            await write_tool_turn(one, 3 if one is child else 1)
        await fork(store, "c", "cc")
        assert rows_of(path, "p") == before
        for session_id in ("c", "cc", "early"):
            await store.delete_session(store_pb2.DeleteSessionRequest(session_id=session_id, force=True))
            assert rows_of(path, "p") == before
    async with SqliteSessionStore.open(path):
        assert rows_of(path, "p") == before
