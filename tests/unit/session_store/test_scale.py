"""What a call costs does not depend on how much is stored. Counted in steps of the database, not in time."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from harness.session_store.sql import reads, rows, sessions
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.connections import connect
from tests.contract.session_store_suite.forks import author_of, fork
from tests.support.session_records import (
    new_session,
    operation,
    response,
    text_input,
    turn,
    waiting,
    working,
)
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

T = TypeVar("T")


class Counted:
    """A reading connection that counts the steps of the database's machine."""

    def __init__(self, path: Path) -> None:
        self.connection = connect(path, is_writer=False)
        self.steps = 0
        self.connection.set_progress_handler(self._count, 1)

    def _count(self) -> int:
        self.steps += 1
        return 0

    def steps_of(self, function: Callable[[sqlite3.Connection], object]) -> int:
        self.steps = 0
        function(self.connection)
        return self.steps


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """Return a closed store: a long session, a short one, a deep fork of either, and many small ones."""
    path = tmp_path / "sessions.db"
    async with SqliteSessionStore.open(path) as store:
        for session_id, commits in (("short", 3), ("long", 60)):
            author = await new_session(store, session_id)
            for number in range(commits):
                await author.commit(
                    *(text_input(f"i{number}-{index}", "x" * 1_000) for index in range(100)),
                    operations=[operation(session_id, f"o{number}")],
                )
            parent = session_id
            for level in range(20):
                await fork(store, parent, f"{session_id}-{level:02}")
                parent = f"{session_id}-{level:02}"
                await (await author_of(store, parent)).commit(text_input(f"fork-{level}"))
        for number in range(300):
            await new_session(store, f"small-{number:03}")
    return path


def page_of(session_id: str, after: int) -> Callable[[sqlite3.Connection], object]:
    request = store_pb2.ListItemsRequest(session_id=session_id, after_sequence=after, page_size=100)
    return lambda connection: reads.list_items(connection, request)


async def test_page_of_items_costs_the_same_at_any_place_and_depth(path: Path) -> None:
    counted = Counted(path)
    shallow = counted.steps_of(page_of("short", 100))
    assert shallow < 3_000
    for session_id, after in (("long", 0), ("long", 5_800), ("long-19", 0), ("long-19", 3_000), ("long-19", 5_800)):
        assert counted.steps_of(page_of(session_id, after)) < shallow * 1.2
    # The end of the deepest fork lies in twenty sessions, one range each.
    assert counted.steps_of(page_of("long-19", 5_940)) < shallow * 3
    counted.connection.close()


async def test_page_of_sessions_costs_the_page(path: Path) -> None:
    counted = Counted(path)

    def listed(prefix: str) -> Callable[[sqlite3.Connection], object]:
        request = store_pb2.ListSessionsRequest(page_size=20, id_prefix=prefix)
        return lambda connection: sessions.list_page(connection, request, lambda _: False)

    small = counted.steps_of(listed("small-"))
    assert small < 3_000
    assert counted.steps_of(listed("long-")) < small * 1.2
    plan = counted.connection.execute(
        f"EXPLAIN QUERY PLAN SELECT session_id FROM sessions WHERE visibility = {rows.VISIBLE} AND session_id > ?"
        " ORDER BY session_id LIMIT 50",
        ("",),
    ).fetchall()
    assert "COVERING INDEX sessions_in_order" in plan[0][3]
    counted.connection.close()


async def test_watch_from_a_late_revision_reads_no_history(path: Path) -> None:
    counted = Counted(path)

    def changes(session_id: str, revision: int) -> Callable[[sqlite3.Connection], object]:
        def read(connection: sqlite3.Connection) -> object:
            row = rows.find(connection, session_id)
            return reads.read_changes(connection, row, reads.cursor_at(connection, row, revision))

        return read

    assert counted.steps_of(changes("long", 59)) < 5_000
    assert counted.steps_of(changes("long", 60)) < 500
    counted.connection.close()


async def test_commit_costs_the_same_after_any_history(path: Path) -> None:
    async with SqliteSessionStore.open(path) as store:
        steps = 0

        def count() -> int:
            nonlocal steps
            steps += 1
            return 0

        store._file_writer._connection.set_progress_handler(count, 1)
        costs = []
        for session_id in ("short", "long", "long-19"):
            author = await author_of(store, session_id)
            steps = 0
            await author.commit(text_input("next"), turn("t1"), rest=working())
            await author.commit(
                response("t1", ["c1"]), waiting("t1", "c1", "x"), operations=[operation(session_id, "x", "c1")]
            )
            costs.append(steps)
        store._file_writer._connection.set_progress_handler(None, 1)
    assert max(costs) < 2_500
    assert costs[1] < costs[0] * 1.2
