"""Reads all of a store's file and says what is not sound; changes nothing. For a doctor: no session is opened by it."""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final
from urllib.parse import quote

from harness.errors import HarnessError
from harness.primitives.sqlite_log import find_damage
from harness.session_store.sql import rows
from harness.session_store.sql.reads import StoredItem, StoredOperation, decode_item, decode_operation
from harness.session_store.sqlite.history_check import wrong_history
from harness.session_store.sqlite.migrations import MIGRATIONS, check_version, run_statements
from harness.session_store.sqlite.schema import VERSION_1_AS_2
from harness.session_store.sqlite.storage_errors import storage_error

SUPPORTED_VERSION = len(MIGRATIONS)

MAX_FINDINGS: Final = 1_000
"""Of one file; a file with more is lost, and memory is not."""

_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR})
_TREE: Final = re.compile(r"(?:Tree|On tree page) (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    """What was found."""

    version: int
    sessions: int
    items: int
    findings: tuple[str, ...]
    """What is not sound, one line each, at most `MAX_FINDINGS`; empty: all is."""


def read_version(path: Path) -> int:
    """Return the version of a store's file.

    Raises:
        UnsupportedError: UNSUPPORTED_STORE_VERSION.
        FailedPreconditionError: NOT_A_SESSION_STORE, STATE_DIR_NOT_WRITABLE.
        DataLossError: STORE_CORRUPT.
    """
    with _translated(path), _connected(path) as connection:
        return check_version(connection, str(path))


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Hold one state of a store's file, of any version that is read, for reading; raises as `read_version` does."""
    with _translated(path), _connected(path) as connection:
        if check_version(connection, str(path)) == 1:
            run_statements(connection, VERSION_1_AS_2)
        # One snapshot, whatever is written meanwhile.
        connection.execute("BEGIN")
        yield connection


def check_state(path: Path) -> StoreState:
    """Read everything in a store's file; costs its whole size, holds one session's keys. Raises as `read_version`."""
    with opened(path) as connection:
        version = check_version(connection, str(path))
        damage = find_damage(path)
        findings = [damage] if damage is not None else []
        findings += islice(_findings(connection), MAX_FINDINGS)
        return StoreState(
            version=version,
            sessions=_count(connection, f"SELECT COUNT(*) FROM sessions WHERE visibility = {rows.VISIBLE}"),
            items=_count(
                connection,
                f"SELECT COUNT(*) FROM items JOIN sessions USING (session_key) WHERE visibility = {rows.VISIBLE}",
            ),
            findings=tuple(findings),
        )


def _connected(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None))


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise storage_error(error, str(path)) from error


def _is_damage(error: sqlite3.Error) -> bool:
    return ((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF) in _DAMAGED


def _count(connection: sqlite3.Connection, query: str) -> int:
    try:
        (found,) = connection.execute(query).fetchone()
    except sqlite3.Error as error:
        if not _is_damage(error):
            raise
        return 0
    return int(found)


def _guarded(findings: Iterator[str], where: Callable[[], str]) -> Iterator[str]:
    """Yield what a part finds, and where it met a page that can't be read; the next part goes on behind it."""
    try:
        yield from findings
    except sqlite3.Error as error:
        if not _is_damage(error):
            raise
        yield f"{where()} can't be read: {error}"


def _findings(connection: sqlite3.Connection) -> Iterator[str]:
    yield from _guarded(_broken_pages(connection), lambda: "the file's structure")
    keys = connection.execute("SELECT session_key FROM sessions ORDER BY session_key")
    yield from _guarded(_wrong_sessions(connection, keys), lambda: "the table of sessions")


def _broken_pages(connection: sqlite3.Connection) -> Iterator[str]:
    names = dict(connection.execute("SELECT rootpage, tbl_name FROM sqlite_master WHERE rootpage > 0"))

    def named(found: re.Match[str]) -> str:
        name = names.get(int(found[1]))
        return f"{found[0]} ({name})" if name else found[0]

    for (text,) in connection.execute("PRAGMA integrity_check"):
        for line in text.splitlines():
            if line != "ok" and not line.startswith("***"):
                yield f"the file is damaged: {_TREE.sub(named, line)}"


def _wrong_sessions(connection: sqlite3.Connection, keys: sqlite3.Cursor) -> Iterator[str]:
    for (session_key,) in keys:
        found = connection.execute(f"SELECT {rows.COLUMNS} FROM sessions WHERE session_key = ?", (session_key,))
        yield from _wrong_session(connection, rows.SessionRow._make(found.fetchone()))


def _wrong_session(connection: sqlite3.Connection, row: rows.SessionRow) -> Iterator[str]:
    """Yield what is not sound in a session; of a hidden one, whose rows go piece by piece, only what is there."""
    name = f"session {row.session_id!r}"
    is_sound = True
    parts = [(_wrong_items, "items"), (_wrong_operations, "operations"), (_wrong_blobs, "blobs")]
    for part, what in parts:
        for finding in _guarded(part(connection, row), partial("{} of {}".format, what, name)):
            is_sound = False
            yield finding
    # What is damaged is no history: replaying it would only say so again.
    if is_sound and row.visibility == rows.VISIBLE:
        yield from _guarded(wrong_history(connection, row), lambda: f"the history of {name}")


def _wrong_items(connection: sqlite3.Connection, row: rows.SessionRow) -> Iterator[str]:
    expected = row.base_sequence + 1
    found = connection.execute(
        "SELECT sequence, revision, record, checksum FROM items WHERE session_key = ? ORDER BY sequence",
        (row.session_key,),
    )
    for sequence, revision, record, checksum in found:
        if row.visibility == rows.VISIBLE and sequence != expected:
            yield _missing(row, expected, sequence - 1)
        try:
            item = decode_item(row, StoredItem(row.session_key, sequence, revision, record, checksum))
            if (item.sequence, item.revision) != (sequence, revision):
                yield f"item {sequence} of session {row.session_id!r} and its index disagree"
        except HarnessError as error:
            yield error.message
        expected = sequence + 1
    if row.visibility == rows.VISIBLE and expected <= row.last_sequence:
        yield _missing(row, expected, row.last_sequence)
    if row.visibility == rows.VISIBLE and expected > row.last_sequence + 1:
        yield f"session {row.session_id!r} has items up to {expected - 1}, its row says {row.last_sequence}"


def _missing(row: rows.SessionRow, first: int, last: int) -> str:
    what = f"item {first}" if first == last else f"items {first} to {last}"
    return f"session {row.session_id!r} lacks {what}; its last is {row.last_sequence}"


def _wrong_operations(connection: sqlite3.Connection, row: rows.SessionRow) -> Iterator[str]:
    found = connection.execute(
        "SELECT status, step, operation_id, revision, record, checksum FROM operations WHERE session_key = ?",
        (row.session_key,),
    )
    for status, step, *stored in found:
        record = StoredOperation._make(stored)
        try:
            operation = decode_operation(row, record)
        except HarnessError as error:
            yield error.message
            continue
        if (operation.operation_id, operation.status, operation.step) != (record.operation_id, status, step):
            yield f"operation {record.operation_id!r} of session {row.session_id!r} and its index disagree"


def _wrong_blobs(connection: sqlite3.Connection, row: rows.SessionRow) -> Iterator[str]:
    """Yield blobs whose content is not what their digest says. One without size is still being put."""
    blobs = "SELECT blob_key, digest FROM blobs WHERE session_key = ? AND size_bytes IS NOT NULL"
    chunks = "SELECT data FROM blob_chunks WHERE blob_key = ? ORDER BY offset_bytes"
    for blob_key, digest in connection.execute(blobs, (row.session_key,)):
        content = hashlib.sha256()
        for (data,) in connection.execute(chunks, (blob_key,)):
            content.update(data)
        if content.hexdigest() != digest:
            yield f"blob {digest} of session {row.session_id!r} is not what its digest says"
