"""Checksums of stored records: what SQLite would hand out changed, or in another's place, is not taken for history.

SQLite finds a page whose structure is broken, never a flipped bit inside a record, nor two records that changed places.
A CRC-32 over place and content finds both; it guards against disks and copies, not against people.
"""

from __future__ import annotations

import zlib

from harness.errors import DataLossError


def item_checksum(session_key: int, sequence: int, revision: int, record: bytes) -> int:
    """Return the checksum of an item's record at its place."""
    return zlib.crc32(record, zlib.crc32(f"{session_key}/{sequence}/{revision}".encode()))


def operation_checksum(session_key: int, operation_id: str, revision: int, record: bytes) -> int:
    """Return the checksum of an operation's record at its place."""
    return zlib.crc32(record, zlib.crc32(f"{session_key}/{operation_id}/{revision}".encode()))


def check(found: int, expected: int | None, place: str) -> None:
    """Refuse a record that is not the one that was written: RECORD_CORRUPT.

    Args:
        found: The checksum of what was read.
        expected: The one that was written with it; None: a release wrote it that knew none.
        place: Where it lies, for people: "item 7 of session 'a'".
    """
    if expected is not None and found != expected:
        raise DataLossError(
            f"{place} is damaged: it is not what was written", reason="RECORD_CORRUPT", metadata={"place": place}
        )
