"""A long session takes up what was said in it: nothing is stored over and over, whatever its length."""

from __future__ import annotations

import random
import sqlite3
import string
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.cli import Cli, bash
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

MAX_FACTOR = 1.6
"""Bytes of the file for each byte of the records: pages are never full, and indexes come on top."""

MAX_COPIES = 2.3
"""Bytes of the records for each byte said: an operation holds its command and output beside the items."""

EMPTY_BYTES = 200_000
"""Pages that every file has."""


def _words(count: int, rng: random.Random) -> str:
    return " ".join("".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(count))


def _said_bytes(record: bytes) -> int:
    """Return the size of an item without those that describe: the model's words, and results."""
    item = item_pb2.Item.FromString(record)
    match item.WhichOneof("item"):
        case "model_response" | "tool_call_status" | "input":
            return len(record)
        case _:
            return 0


def _grow(cli: Cli, script: str, turns: int) -> tuple[int, int, int]:
    """Run a session on for some turns; return bytes of the file, of the records, and of what was said."""
    done = cli.run(
        "run", "--provider", "scripted", "--script", script, "--session", "s", "-p", "go", "--max-turns", str(turns),
        timeout=1_500,
    )  # fmt: skip
    assert "the limit of" in done.stderr, done.stderr
    path = cli.state / "sessions.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        items = [record for (record,) in connection.execute("SELECT record FROM items")]
        operations = [record for (record,) in connection.execute("SELECT record FROM operations")]
    assert all(operation_pb2.Operation.FromString(one).IsInitialized() for one in operations)
    records = sum(map(len, items)) + sum(map(len, operations))
    return path.stat().st_size, records, sum(map(_said_bytes, items))


def check_growth(tmp_path: Path, first: int, second: int) -> None:
    """Grow one session twice and hold what the second part cost against the first."""
    cli = Cli(tmp_path)
    rng = random.Random(1)
    turn = [{"text": _words(50, rng), "tool_calls": [bash(f"echo '{_words(300, rng)}'")]} for _ in range(50)]
    script = cli.script(turn * ((first + second) // 50 + 2))
    file_before, records_before, said_before = _grow(cli, script, first)
    file, records, said = _grow(cli, script, second)
    assert file <= MAX_FACTOR * records + EMPTY_BYTES
    assert records <= MAX_COPIES * said
    # Linear: the later turns cost what the earlier ones did.
    per_turn_before, per_turn = records_before / first, (records - records_before) / second
    assert per_turn <= 1.1 * per_turn_before
    assert (file - file_before) / second <= MAX_FACTOR * per_turn_before * 1.1


def test_session_stays_near_the_size_of_its_content(tmp_path: Path) -> None:
    check_growth(tmp_path, 30, 90)


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_session_with_ten_thousand_turns_stays_near_the_size_of_its_content(tmp_path: Path) -> None:
    check_growth(tmp_path, 1_000, 9_000)
