"""Reads all of a store's file and says what is not sound; changes nothing. For a doctor: no session is opened by it."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from harness.errors import HarnessError
from harness.session_store import records
from harness.session_store.sqlite.history_check import wrong_histories
from harness.session_store.sqlite.migrations import MIGRATIONS, check_version
from harness.session_store.sqlite.rows import VISIBLE
from harness.session_store.sqlite.storage_errors import storage_error

SUPPORTED_VERSION = len(MIGRATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    """What was found."""

    version: int
    sessions: int
    items: int
    findings: tuple[str, ...]
    """What is not sound, one line each; empty: all is."""


def read_version(path: Path) -> int:
    """Return the version of a store's file.

    Raises:
        UnsupportedError: UNSUPPORTED_STORE_VERSION.
        FailedPreconditionError: NOT_A_SESSION_STORE, STATE_DIR_NOT_WRITABLE.
        DataLossError: STORE_CORRUPT.
    """
    with _opened(path) as connection:
        return _version(connection, path)


def check_state(path: Path) -> StoreState:
    """Read everything in a store's file; costs its whole size. Raises as `read_version` does."""
    with _opened(path) as connection:
        version = _version(connection, path)
        try:
            # One snapshot, whatever is written meanwhile.
            connection.execute("BEGIN")
            findings = tuple(_findings(connection))
            query = "SELECT COUNT(*) FROM sessions WHERE visibility = ?"
            (sessions,) = connection.execute(query, (VISIBLE,)).fetchone()
            (items,) = connection.execute("SELECT COUNT(*) FROM items").fetchone()
        except sqlite3.Error as error:
            raise storage_error(error, str(path)) from error
    return StoreState(version=version, sessions=sessions, items=items, findings=findings)


def _opened(path: Path) -> closing[sqlite3.Connection]:
    try:
        return closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None))
    except sqlite3.Error as error:
        raise storage_error(error, str(path)) from error


def _version(connection: sqlite3.Connection, path: Path) -> int:
    try:
        return check_version(connection, str(path))
    except sqlite3.Error as error:
        raise storage_error(error, str(path)) from error


def _findings(connection: sqlite3.Connection) -> Iterator[str]:
    for (line,) in connection.execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"the file is damaged: {line}"
    yield from _wrong_sequences(connection)
    yield from _unreadable_records(connection)
    yield from _wrong_blobs(connection)
    yield from wrong_histories(connection)


def _wrong_sequences(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield sessions whose items are not those that their row says: behind the base, gapless, up to the last.

    What is hidden, a session that was deleted or an import that was given up, is removed piece by piece.
    """
    query = """
        SELECT session_id, base_sequence, last_sequence, COUNT(sequence), MIN(sequence), MAX(sequence)
        FROM sessions LEFT JOIN items USING (session_key) WHERE visibility = ? GROUP BY session_key
    """
    for session_id, base, last, count, first, highest in connection.execute(query, (VISIBLE,)):
        is_whole = count == last - base and (count == 0 or (first == base + 1 and highest == last))
        if not is_whole:
            yield f"session {session_id!r} has {count} own items, expected {base + 1} to {last}"


def _unreadable_records(connection: sqlite3.Connection) -> Iterator[str]:
    items = "SELECT session_id, sequence, items.record FROM items JOIN sessions USING (session_key)"
    for session_id, sequence, record in connection.execute(items):
        try:
            records.decode_item(record, f"item {sequence} of session {session_id!r}")
        except HarnessError as error:
            yield error.message
    operations = "SELECT session_id, operation_id, operations.record FROM operations JOIN sessions USING (session_key)"
    for session_id, operation_id, record in connection.execute(operations):
        try:
            records.decode_operation(record, f"operation {operation_id!r} of session {session_id!r}")
        except HarnessError as error:
            yield error.message


def _wrong_blobs(connection: sqlite3.Connection) -> Iterator[str]:
    """Yield blobs whose content is not what their digest says. One without size is still being put."""
    blobs = """
        SELECT session_id, blob_key, digest FROM blobs JOIN sessions USING (session_key) WHERE size_bytes IS NOT NULL
    """
    chunks = "SELECT data FROM blob_chunks WHERE blob_key = ? ORDER BY offset_bytes"
    for session_id, blob_key, digest in connection.execute(blobs):
        content = hashlib.sha256()
        for (data,) in connection.execute(chunks, (blob_key,)):
            content.update(data)
        if content.hexdigest() != digest:
            yield f"blob {digest} of session {session_id!r} is not what its digest says"
