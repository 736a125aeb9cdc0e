"""Removes what nobody can see any more: deleted sessions, abandoned imports, blobs that no commit named.

Works in small steps through the writer, so that no commit waits long; what a fork refers to stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from harness.clock import Clock
from harness.errors import HarnessError, UnavailableError
from harness.session_store.sql import rows
from harness.session_store.sql.blobs import UNREFERENCED_LIFE_US
from harness.session_store.sql.sql import Connection, Writer

logger = logging.getLogger(__name__)

_STEP_ROWS: Final = 500
_STEP_BLOBS: Final = 8

EXPIRED_BLOBS: Final = "SELECT blob_key FROM blobs WHERE reference_sequence IS NULL AND put_time_us <= ? LIMIT ?"

_INTERVAL_S: Final = 600.0
_RETRY_S: Final = 5.0
_INCARNATIONS_KEPT_US: Final = 30 * 24 * 3600 * 1_000_000
"""Longer than any process that was replaced could go on unnoticed."""


class Retention:
    """The task that removes; wakes when a session is deleted, and now and then for what has grown old."""

    def __init__(self, writer: Writer, clock: Clock, remove: Callable[[Connection, int], bool]) -> None:
        """Take over what removes a bounded number of rows at a time and says whether there may be more."""
        self._remove = remove
        self._writer = writer
        self._clock = clock
        self._wake = asyncio.Event()
        self._is_closed = False

    def notify(self) -> None:
        """Tell that there is something to remove."""
        self._wake.set()

    def close(self) -> None:
        """End `run` after the step in progress."""
        self._is_closed = True
        self._wake.set()

    async def run(self) -> None:
        """Remove until the store closes."""
        while not self._is_closed:
            self._wake.clear()
            wait_s = _INTERVAL_S
            try:
                if await self._step():
                    continue
            except UnavailableError as err:
                if err.reason == "STORE_CLOSED":
                    return
                logger.exception("what is deleted could not be removed")
                wait_s = _RETRY_S
            except HarnessError:
                logger.exception("what is deleted could not be removed")
                wait_s = _RETRY_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _step(self) -> bool:
        time_us = rows.microseconds(self._clock.now())
        return await self._writer.write(lambda connection: self._remove(connection, time_us))


def remove_some(connection: Connection, time_us: int) -> bool:
    """Remove a bounded number of rows; return whether there may be more."""
    row = connection.execute("SELECT session_key, visibility FROM sessions WHERE needs_purge = 1 LIMIT 1").fetchone()
    if row is not None:
        _purge(connection, *row)
        return True
    connection.execute(
        "DELETE FROM ended_incarnations WHERE end_time_us < ?"
        " AND incarnation_id NOT IN (SELECT owner_id FROM sessions WHERE owner_id <> '')",
        (time_us - _INCARNATIONS_KEPT_US,),
    )
    expired = connection.execute(
        EXPIRED_BLOBS,
        (time_us - UNREFERENCED_LIFE_US, _STEP_BLOBS),
    ).fetchall()
    _remove_blobs(connection, expired)
    return bool(expired)


def abandon_imports(connection: Connection) -> None:
    """Mark what a process that died while importing left behind; for use at the start."""
    connection.execute("UPDATE sessions SET needs_purge = 1 WHERE visibility = ?", (rows.IMPORTING,))


def _purge(connection: Connection, session_key: int, visibility: int) -> None:
    """Remove some of a hidden session's rows, and the mark with the last of them."""
    (kept_through,) = connection.execute(
        "SELECT coalesce(max(through_sequence), 0) FROM ancestors WHERE ancestor_key = ?", (session_key,)
    ).fetchone()
    # Blobs first: they are the largest, and so room comes back soonest.
    blobs = connection.execute(
        "SELECT blob_key FROM blobs WHERE session_key = ?"
        " AND (reference_sequence IS NULL OR reference_sequence > ? OR ? = 0) LIMIT ?",
        (session_key, kept_through, kept_through, _STEP_BLOBS),
    ).fetchall()
    if blobs:
        _remove_blobs(connection, blobs)
        return
    for table, key, sequence in (
        ("items", "item_key", "sequence"),
        ("inputs", "input_id", "sequence"),
        ("turns", "turn_id", "sequence"),
        ("calls", "call_id", "response_sequence"),
    ):
        removed = connection.execute(
            f"DELETE FROM {table} WHERE session_key = ?1 AND {key} IN"
            f" (SELECT {key} FROM {table} WHERE session_key = ?1 AND {sequence} > ?2 LIMIT ?3)",
            (session_key, kept_through, _STEP_ROWS),
        )
        if removed.rowcount:
            return
    removed = connection.execute(
        "DELETE FROM operations WHERE operation_key IN"
        " (SELECT operation_key FROM operations WHERE session_key = ? LIMIT ?)",
        (session_key, _STEP_ROWS),
    )
    if removed.rowcount:
        return
    connection.execute("DELETE FROM session_records WHERE session_key = ?", (session_key,))
    if visibility == rows.IMPORTING:
        connection.execute("DELETE FROM sessions WHERE session_key = ?", (session_key,))
    else:
        # The row stays for ever: its ID is never used again.
        connection.execute("UPDATE sessions SET needs_purge = 0 WHERE session_key = ?", (session_key,))


def _remove_blobs(connection: Connection, blob_keys: list[tuple[int]]) -> None:
    connection.executemany("DELETE FROM blob_chunks WHERE blob_key = ?", blob_keys)
    connection.executemany("DELETE FROM blobs WHERE blob_key = ?", blob_keys)
