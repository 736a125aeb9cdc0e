"""The check of a store's file finds what is not sound, and nothing in what the store wrote."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.state_check import check_state
from tests.contract.session_store_suite.exports import exported, stream, write_history
from tests.contract.session_store_suite.forks import author_of, fork
from tests.support.session_records import text_input
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """Return a closed store with a history, forks of it, an import and a deleted session."""
    path = tmp_path / "sessions.db"
    async with SqliteSessionStore.open(path) as store:
        await write_history(store)
        await write_history(store, "other")
        await fork(store, "s", "c", cut=4)
        await (await author_of(store, "c")).commit(text_input("more"))
        await fork(store, "c", "cc")
        await fork(store, "other", "orphan", cut=6)
        await store.import_session(stream(await exported(store), "copy"))
        await store.import_session(stream(await exported(store, "cc"), "copy-of-fork"))
        await store.delete_session(store_pb2.DeleteSessionRequest(session_id="other", force=True))
    return path


async def test_what_the_store_wrote_is_sound(path: Path) -> None:
    found = check_state(path)
    assert found.findings == ()
    assert (found.version, found.sessions) == (2, 6)


async def test_an_import_that_is_being_removed_is_no_damage(path: Path) -> None:
    """Removing is done in steps, and the process may end between two of them."""
    before = check_state(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        imported = connection.execute("SELECT session_key FROM sessions WHERE session_id = 'copy'").fetchone()
        connection.execute(
            "UPDATE sessions SET session_id = 'import/1', visibility = 2, needs_purge = 1 WHERE session_key = ?",
            imported,
        )
        connection.execute("DELETE FROM items WHERE session_key = ? AND sequence > 3", imported)
    found = check_state(path)
    assert found.findings == ()
    assert found.sessions == before.sessions - 1


DAMAGES = {
    "DELETE FROM items WHERE session_key = 1 AND sequence = 3": "session 's'",
    "UPDATE items SET record = x'ff', checksum = NULL WHERE sequence = 3": "item 3 of session 's' cannot be decoded",
    "UPDATE items SET record = x'ff' WHERE session_key = 1 AND sequence = 3": "item 3 of session 's' is damaged",
    "DELETE FROM items WHERE session_key = 1 AND sequence > 8": "session 's' lacks item",
    "DELETE FROM ancestors WHERE session_key = 3": "session 'c': item 1 of session 'c' is missing",
    "DELETE FROM session_records WHERE session_key = 1": "settings and ancestry of session 's' are missing",
    "UPDATE sessions SET latest_turn_id = 't9' WHERE session_id = 's'": "its row says 't9'",
    "DELETE FROM inputs WHERE session_key = 1 AND input_id = 'look'": "disagree about input 'look'",
    "UPDATE calls SET final_sequence = 0 WHERE session_key = 1": "disagree about call 'c1'",
    "DELETE FROM operations WHERE session_key = 1 AND operation_id = 'o2'": "waits for operation 'o2'",
    "UPDATE operations SET record = x'0a' WHERE session_key = 1": "operation 'o1' of session 's' is damaged",
    "UPDATE operations SET step = 99 WHERE session_key = 1": "operation 'o1' of session 's' and its index disagree",
    "UPDATE blob_chunks SET data = x'00' WHERE blob_key = 1": "is not what its digest says",
    "DELETE FROM blobs WHERE session_key = 1": "which is missing",
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_is_found_with_its_place(path: Path, damage: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(damage)
    assert any(DAMAGES[damage] in finding for finding in check_state(path).findings)


async def test_swapped_records_break_the_chain(path: Path) -> None:
    """A copy of another turn's item under a sequence of its own is decoded well and still no history."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "UPDATE items SET record = (SELECT record FROM items WHERE session_key = 1 AND sequence = 8)"
            " WHERE session_key = 1 AND sequence = 2"
        )
    assert any("session 's'" in finding for finding in check_state(path).findings)
