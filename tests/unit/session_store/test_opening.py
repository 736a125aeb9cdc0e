"""A store's file is made, migrated, refused or reopened as its version says."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from harness.errors import (
    DataLossError,
    FailedPreconditionError,
    HarnessError,
    UnavailableError,
    UnsupportedError,
)
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.migrations import MIGRATIONS, check_version, migrate, run_statements
from tests.contract.session_store_suite.leases import acquire, offers, runnable
from tests.support.session_records import (
    Author,
    incarnation,
    items_of,
    new_session,
    session_of,
    text_input,
    working,
    write_tool_turn,
)
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


def _add_column(connection: sqlite3.Connection) -> None:
    run_statements(
        connection,
        "ALTER TABLE sessions ADD COLUMN colour TEXT NOT NULL DEFAULT 'grey';\n"
        "UPDATE sessions SET colour = 'green' WHERE last_sequence > 0;\n",
    )


NEXT_VERSION = (*MIGRATIONS, _add_column)


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """Return a closed store with two sessions."""
    path = tmp_path / "state" / "sessions.db"
    async with SqliteSessionStore.open(path) as store:
        await write_tool_turn(await new_session(store))
        await new_session(store, "empty")
    return path


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


async def test_file_and_directory_are_their_owners_only(path: Path) -> None:
    async with SqliteSessionStore.open(path):
        modes = {stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()}
        assert (modes, stat.S_IMODE(path.parent.stat().st_mode)) == ({0o600}, 0o700)


async def test_reopened_store_goes_on(path: Path) -> None:
    async with SqliteSessionStore.open(path) as store:
        before = await items_of(store, "s")
        info = await store.get_server_info(store_pb2.GetServerInfoRequest())
        await Author(store, "s", sequence=5).commit(text_input("more"))
    async with SqliteSessionStore.open(path) as store:
        assert (await items_of(store, "s"))[:5] == before
        assert await store.get_server_info(store_pb2.GetServerInfoRequest()) == info


async def test_older_file_is_brought_forward(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, str(path), NEXT_VERSION)
        found = connection.execute("SELECT session_id, colour FROM sessions ORDER BY 1").fetchall()
        assert check_version(connection, str(path), NEXT_VERSION) == 3
        migrate(connection, str(path), NEXT_VERSION)
    assert found == [("empty", "grey"), ("s", "green")]


async def test_failed_migration_leaves_the_file_as_it_was(path: Path) -> None:
    def fail(connection: sqlite3.Connection) -> None:
        _add_column(connection)
        raise OSError("pulled the plug")

    before = dump(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        with pytest.raises(OSError, match="plug"):
            migrate(connection, str(path), (*MIGRATIONS, fail))
        assert check_version(connection, str(path)) == 2
    assert dump(path) == before


KILLED = """
import os, signal, sqlite3, sys
from harness.session_store.sqlite.migrations import MIGRATIONS, migrate

def die(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE sessions ADD COLUMN colour TEXT")
    connection.execute("DELETE FROM items")
    os.kill(os.getpid(), signal.SIGKILL)

migrate(sqlite3.connect(sys.argv[1], isolation_level=None), sys.argv[1], (*MIGRATIONS, die))
"""


async def test_killed_migration_starts_again(path: Path) -> None:
    root = Path(__file__).parents[3]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": f"{root}:{root / 'proto'}"},
        check=False,
        timeout=20,
    )
    assert killed.returncode == -signal.SIGKILL
    async with SqliteSessionStore.open(path) as store:
        assert len(await items_of(store, "s")) == 5
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, str(path), NEXT_VERSION)
        assert check_version(connection, str(path), NEXT_VERSION) == 3


async def test_newer_file_is_refused_untouched(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        migrate(connection, str(path), NEXT_VERSION)
    before = path.read_bytes()
    with pytest.raises(UnsupportedError) as caught:
        async with SqliteSessionStore.open(path):
            pass
    assert caught.value.reason == "UNSUPPORTED_STORE_VERSION"
    assert (caught.value.metadata["found"], caught.value.metadata["supported"]) == ("3", "2")
    assert path.read_bytes() == before


async def test_database_of_another_program_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(FailedPreconditionError) as caught:
        async with SqliteSessionStore.open(path):
            pass
    assert caught.value.reason == "NOT_A_SESSION_STORE"
    assert path.read_bytes() == before


async def test_file_that_is_no_database_is_data_loss(tmp_path: Path) -> None:
    path = tmp_path / "noise.db"
    path.write_bytes(b"noise" * 1_000)
    with pytest.raises(DataLossError) as caught:
        async with SqliteSessionStore.open(path):
            pass
    assert (caught.value.reason, caught.value.metadata["path"]) == ("STORE_CORRUPT", str(path))


async def test_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPreconditionError) as caught:
        async with SqliteSessionStore.open(tmp_path / "file" / "sessions.db"):
            pass
    assert caught.value.reason == "STATE_DIR_NOT_WRITABLE"


def _change_item(path: Path, change: str, sequence: int = 3) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        (record,) = connection.execute(
            "SELECT record FROM items WHERE session_key = 1 AND sequence = ?", (sequence,)
        ).fetchone()
        item = item_pb2.Item.FromString(record)
        if change == "version":
            item.schema_version = 99
        record = item.SerializeToString()
        if change == "fields":
            record += b"\xf8\x3f\x01"
        if change == "noise":
            record = b"\xff" * 10
        connection.execute(
            "UPDATE items SET record = ?, checksum = NULL WHERE session_key = 1 AND sequence = ?", (record, sequence)
        )


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ("version", UnsupportedError, "UNSUPPORTED_ITEM_VERSION"),
        ("fields", FailedPreconditionError, "UNKNOWN_FIELDS"),
        ("noise", DataLossError, "RECORD_CORRUPT"),
    ],
)
async def test_record_that_cannot_be_read_stops_its_session_only(
    path: Path, change: str, error: type[HarnessError], reason: str
) -> None:
    _change_item(path, change)
    async with SqliteSessionStore.open(path) as store:
        watch = aiter(store.watch_session(store_pb2.WatchSessionRequest(session_id="s")))
        for call in (items_of(store, "s"), anext(watch)):
            with pytest.raises(error) as caught:
                await call
            assert caught.value.reason == reason
            assert caught.value.metadata["place"] == "item 3 of session 's'"
        await Author(store, "empty").commit(text_input("i"))
        assert len((await store.list_sessions(store_pb2.ListSessionsRequest())).sessions) == 2
        page = await store.list_items(store_pb2.ListItemsRequest(session_id="s", page_size=2))
        assert len(page.items) == 2


async def test_session_of_a_later_format_is_listed_and_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE sessions SET format_version = 99 WHERE session_id = 's'")
    async with SqliteSessionStore.open(path) as store:
        for call in (session_of(store, "s"), Author(store, "s", sequence=5).commit(text_input("more"))):
            with pytest.raises(UnsupportedError) as caught:
                await call
            assert caught.value.reason == "UNSUPPORTED_SESSION_VERSION"
        listed = await store.list_sessions(store_pb2.ListSessionsRequest())
        assert [session.session_id for session in listed.sessions] == ["empty", "s"]
        await Author(store, "empty").commit(text_input("i"))


async def test_leases_start_afresh_with_the_store(path: Path) -> None:
    lease = Duration(seconds=30)
    async with SqliteSessionStore.open(path) as store:
        epoch = (await acquire(store, incarnation("a"), lease=lease)).session.epoch
    async with SqliteSessionStore.open(path) as store:
        with pytest.raises(UnavailableError) as caught:
            await acquire(store, incarnation("b"))
        assert 29 < (caught.value.retry_after_s or 0) <= 30
        await Author(store, "s", epoch=epoch, sequence=5).commit(text_input("more"), rest=working())
        await acquire(store, incarnation("a", 2))
    async with SqliteSessionStore.open(path) as store:
        with pytest.raises(FailedPreconditionError):
            await store.renew_lease(store_pb2.RenewLeaseRequest(incarnation=incarnation("a", 1)))
        await store.release_lease(store_pb2.ReleaseLeaseRequest(incarnation=incarnation("a", 2)))
    async with SqliteSessionStore.open(path) as store:
        assert await offers(aiter(store.watch_runnable(runnable("b"))), 1) == ["s"]
        assert not (await acquire(store, incarnation("b"))).was_taken_over
        assert (await session_of(store, "s")).epoch == 3
