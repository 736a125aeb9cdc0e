"""The journal: what it keeps, how it fails."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.errors import (
    ConflictError,
    DataLossError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnsupportedError,
)
from harness.operations.journal import Journal, OperationRow, SessionRow, Submission
from harness.operations.local_manager import LocalOperationManager
from tests.support.eventually import eventually
from tests.support.operations import adding, bash, end_of, run
from unreal_agent.operation.v1 import operation_pb2


def row(operation_id: str, **fields: object) -> OperationRow:
    values: dict[str, object] = {
        "operation": bash("true", operation_id=operation_id),
        "accept_order": 1,
        "workspace": "/w",
        "position": 3,
        "acknowledged_step": 2,
        "attempt": 1,
        "boot_id": "boot",
        "is_discarded": False,
        "tombstone_time": None,
        "has_files": True,
    }
    return OperationRow(**(values | fields))  # type: ignore[arg-type]


def nothing() -> None:
    """Whom it concerns is not asked."""


def test_what_is_written_is_read_after_a_reopening(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    session = SessionRow(session_id="s", epoch=4, owner="o")
    journal.write([Submission(rows=[row("a")], sessions=[session], written=nothing)])
    instance_id = journal.load().instance_id
    journal.close()
    journal = Journal(tmp_path / "journal")
    content = journal.load()
    assert (content.instance_id, content.rows, content.sessions) == (instance_id, [row("a")], [session])
    assert (content.position, content.accept_order) == (3, 1)
    assert journal.find(["a", "none"]) == {"a": row("a")}
    journal.close()


def test_of_several_states_the_newest_is_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    submissions = [Submission(rows=[row("a", position=position)], written=nothing) for position in (1, 2)]
    journal.write(submissions)
    assert journal.find(["a"])["a"].position == 2
    journal.close()


def test_journal_of_a_newer_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    Journal(tmp_path / "journal").close()
    with sqlite3.connect(tmp_path / "journal") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = (tmp_path / "journal").read_bytes()
    for _ in range(2):
        with pytest.raises(UnsupportedError) as refusal:
            Journal(tmp_path / "journal")
        assert refusal.value.reason == "UNSUPPORTED_JOURNAL_VERSION"
    assert (tmp_path / "journal").read_bytes() == before


def test_file_that_is_no_journal_is_data_loss(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(b"nonsense " * 1000)
    with pytest.raises(DataLossError):
        Journal(tmp_path / "journal")


def test_state_that_can_not_be_decoded_is_data_loss(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.write([Submission(rows=[row("a")], written=nothing)])
    journal.close()
    with sqlite3.connect(tmp_path / "journal") as connection:
        connection.execute("UPDATE operations SET operation = x'ff'")
    connection.close()
    journal = Journal(tmp_path / "journal")
    with pytest.raises(DataLossError) as refusal:
        journal.load()
    assert "'a'" in refusal.value.message
    journal.close()


def test_second_opening_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with pytest.raises(FailedPreconditionError):
        Journal(tmp_path / "journal")
    journal.close()
    Journal(tmp_path / "journal").close()


def _limit_pages(journal: Journal, is_full: bool) -> None:
    """Let SQLite refuse to grow the file, as on a full disk."""
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages if is_full else 1 << 30}")


async def test_full_disk_refuses_new_work_and_delays_results_without_losing_any(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    async with LocalOperationManager.open(tmp_path / "state", name="local") as manager:
        loop_thread: ThreadPoolExecutor = manager._thread
        running = bash("sleep 0.2; head -c 39000 /dev/zero | tr '\\0' x; echo x >> count")
        await manager.add_operations(adding([running], tmp_path / "workspace"))
        loop_thread.submit(_limit_pages, manager._journal, True).result()
        large = bash(f"echo {'y' * 60_000}")
        with pytest.raises(ResourceExhaustedError) as refusal:
            await manager.add_operations(adding([large], tmp_path / "workspace"))
        assert refusal.value.reason == "DISK_FULL"
        await eventually((tmp_path / "workspace" / "count").exists, within_s=10)
        loop_thread.submit(_limit_pages, manager._journal, False).result()
        ended = await end_of(manager, running.operation_id)
        assert ended.status == operation_pb2.OPERATION_STATUS_COMPLETED
        assert (await run(manager, large, tmp_path / "workspace")).bash.exit_code == 0
    assert (tmp_path / "workspace" / "count").read_text() == "x\n"


async def test_fence_of_a_refused_add_is_written_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    async with LocalOperationManager.open(tmp_path / "state", name="local") as manager:
        await run(manager, bash("true"), tmp_path / "workspace")
        manager._thread.submit(_limit_pages, manager._journal, True).result()
        large = adding([bash(f"echo {'y' * 60_000}")], tmp_path / "workspace", epoch=7)
        with pytest.raises(ResourceExhaustedError):
            await manager.add_operations(large)
        manager._thread.submit(_limit_pages, manager._journal, False).result()
        await manager.add_operations(large)
    async with LocalOperationManager.open(tmp_path / "state", name="local") as manager:
        with pytest.raises(ConflictError):
            await manager.add_operations(adding([bash("true")], tmp_path / "workspace", epoch=6))
