"""What nobody can see any more goes, in small steps; what a fork refers to stays until the last such fork goes."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from harness.errors import NotFoundError
from harness.session_store import get_blob_bytes
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.state_check import check_state
from tests.contract.session_store_suite.exports import exported, stream
from tests.contract.session_store_suite.forks import fork
from tests.support.eventually import eventually
from tests.support.session_records import (
    blob_part,
    items_of,
    new_session,
    text_input,
    write_tool_turn,
)
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


class ManualClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.elapsed = timedelta()

    def now(self) -> datetime:
        return datetime(2030, 1, 1, tzinfo=UTC) + self.elapsed

    def monotonic_s(self) -> float:
        return self.elapsed.total_seconds()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(path: Path, clock: ManualClock) -> AsyncIterator[SqliteSessionStore]:
    async with SqliteSessionStore.open(path, clock=clock) as opened:
        yield opened


def rows_in(path: Path) -> dict[str, int]:
    tables = ("items", "inputs", "turns", "calls", "operations", "blobs", "blob_chunks", "ancestors", "sessions")
    with closing(sqlite3.connect(path)) as connection:
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


async def delete(store: SqliteSessionStore, session_id: str) -> None:
    await store.delete_session(store_pb2.DeleteSessionRequest(session_id=session_id, force=True))


EMPTY = dict.fromkeys(("items", "inputs", "turns", "calls", "operations", "blobs", "blob_chunks", "ancestors"), 0)


async def test_deleted_session_leaves_its_tombstone_only(store: SqliteSessionStore, path: Path) -> None:
    author = await new_session(store)
    for number in range(1, 5):
        await write_tool_turn(author, number)
    image = await author.put(b"x" * 2_000_000)
    await author.commit(*(text_input(f"many{number}") for number in range(1_200)))
    await author.commit(text_input("look", "look", blob_part(image)))
    await delete(store, "s")
    await eventually(lambda: rows_in(path) == EMPTY | {"sessions": 1})


async def test_what_a_fork_refers_to_goes_with_the_last_fork(store: SqliteSessionStore, path: Path) -> None:
    author = await new_session(store, "p")
    kept, dropped = await author.put(b"kept"), await author.put(b"dropped")
    await author.commit(text_input("i", "look", blob_part(kept)))
    await write_tool_turn(author, 1)
    await author.commit(text_input("j", "look", blob_part(dropped)))
    await fork(store, "p", "c", cut=4)
    await fork(store, "c", "cc")
    shown = await items_of(store, "cc")
    await delete(store, "p")
    # Five of the parent, the fork item and the closed call of "c", the fork item of "cc".
    await eventually(lambda: rows_in(path)["items"] == 8 and rows_in(path)["blobs"] == 1)
    await delete(store, "c")
    assert await items_of(store, "cc") == shown
    assert await get_blob_bytes(store, "cc", kept.digest) == b"kept"
    await delete(store, "cc")
    await eventually(lambda: rows_in(path) == EMPTY | {"sessions": 3})


async def test_blob_that_no_commit_names_lives_a_day(store: SqliteSessionStore, clock: ManualClock, path: Path) -> None:
    author = await new_session(store)
    named, unnamed, renewed = await author.put(b"named"), await author.put(b"unnamed"), await author.put(b"renewed")
    await author.commit(text_input("i", "look", blob_part(named)))
    clock.elapsed = timedelta(hours=23)
    await author.put(b"renewed")
    await wake(store)
    assert rows_in(path)["blobs"] == 3
    clock.elapsed = timedelta(hours=24)
    await wake(store)
    await eventually(lambda: rows_in(path)["blobs"] == 2)
    with pytest.raises(NotFoundError):
        await get_blob_bytes(store, "s", unnamed.digest)
    assert await get_blob_bytes(store, "s", renewed.digest) == b"renewed"
    assert await get_blob_bytes(store, "s", named.digest) == b"named"


async def wake(store: SqliteSessionStore) -> None:
    """Make the store look for what has grown old, as every deletion does."""
    made = await store.create_session(store_pb2.CreateSessionRequest())
    await delete(store, made.session.session_id)
    waste = f"SELECT count(*) FROM sessions WHERE session_id = '{made.session.session_id}' AND needs_purge = 1"

    def is_done() -> bool:
        with closing(sqlite3.connect(store._path)) as connection:
            return bool(connection.execute(waste).fetchone()[0] == 0)

    await eventually(is_done)


async def test_import_that_a_crash_cut_off_is_removed_at_the_next_start(path: Path) -> None:
    async with SqliteSessionStore.open(path) as store:
        await write_tool_turn(await new_session(store))
        await store.import_session(stream(await exported(store), "copy"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE sessions SET visibility = 2, session_id = 'import/x' WHERE session_id = 'copy'")
    async with SqliteSessionStore.open(path):
        await eventually(lambda: (rows_in(path)["sessions"], rows_in(path)["items"]) == (1, 5))
    assert check_state(path).findings == ()
