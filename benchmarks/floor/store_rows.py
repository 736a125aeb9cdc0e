"""The store's floor: for each commit of one input the same rows as the product's, in a group transaction, unchecked."""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path

from benchmarks.floor.group_commit import GroupCommitWriter
from unreal_agent.session.v1 import item_pb2

STATEMENTS = (
    (
        "UPDATE sessions SET last_sequence = ?, revision = revision + 1, update_time_us = ?, last_commit_id = ?,"
        " rest = ?, session_state = 1 WHERE session_key = ?"
    ),
    "INSERT INTO items (session_key, sequence, revision, record, checksum) VALUES (?, ?, ?, ?, 0)",
    "INSERT INTO inputs (session_key, input_id, sequence) VALUES (?, ?, ?)",
)

_REST = b"\x08\x01\x20\x01"


class StoreFloor:
    """Writes to a file that the product made, and that nobody has open."""

    def __init__(self, path: Path) -> None:
        """Find the sessions in it."""
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute("SELECT session_id, session_key FROM sessions").fetchall()
        self._keys: dict[str, int] = dict(rows)
        self._sequences = {session_id: itertools.count(1) for session_id in self._keys}
        self._writer = GroupCommitWriter(path, schema="", statements=STATEMENTS)

    async def commit(self, session_id: str, item: item_pb2.Item) -> None:
        """Append one item."""
        key, sequence = self._keys[session_id], next(self._sequences[session_id])
        await self._writer.write(
            (sequence, sequence, f"commit-{sequence}", _REST, key),
            (key, sequence, sequence, item.SerializeToString()),
            (key, item.input.input_id, sequence),
        )

    async def close(self) -> None:
        """Close the file."""
        await self._writer.close()
