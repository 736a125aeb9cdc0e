"""Finds commits that a damaged write-ahead log of SQLite keeps from being read. Reads only the headers of its frames.

SQLite reads its log up to the first frame that does not fit and takes the rest for what a crash cut off. That is right
for the commit that was being written; but each commit is on stable storage before the next is written
(`synchronous=FULL`), so at most one whole commit can lie behind a frame that was never finished. Two or more mean that
the log was damaged later, and that a history would be shortened by what was acknowledged.
"""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

_HEADER: Final = struct.Struct(">IIIIIIII")
_FRAME: Final = struct.Struct(">IIII")
_FRAME_BYTES: Final = 24
_MAGIC: Final = frozenset({0x377F0682, 0x377F0683})
# Where the log's index says how many frames count (walformat.html, 2.1).
_INDEX_FRAMES: Final = struct.Struct("=I")
_INDEX_FRAMES_OFFSET: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """What the log of a database file holds, sound or not."""

    salts: tuple[int, int] = (0, 0)
    """Made anew each time the log begins from its start."""

    commit_frames: tuple[int, ...] = ()
    """Numbers of the frames that end a commit, from 1."""

    is_headless: bool = False
    """Its first bytes are damaged: nothing in it is read, and what it held can't be told."""


def read_log(database: Path) -> LogState:
    """Return what the log of a database file holds."""
    try:
        with _log_of(database).open("rb") as file:
            header = file.read(_HEADER.size)
            if not header:
                return LogState()
            if len(header) < _HEADER.size:
                # The first write of a log can be cut off; a log that held commits was whole for long.
                return LogState()
            magic, _, page_bytes, _, *found, _, _ = _HEADER.unpack(header)
            if magic not in _MAGIC or not 512 <= page_bytes <= 65_536:
                return LogState(is_headless=True)
            salts = (found[0], found[1])
            commits: list[int] = []
            number = 1
            while True:
                file.seek(_HEADER.size + (number - 1) * (_FRAME_BYTES + page_bytes))
                frame = file.read(_FRAME.size)
                if len(frame) < _FRAME.size:
                    return LogState(salts=salts, commit_frames=tuple(commits))
                _, database_pages, *frame_salts = _FRAME.unpack(frame)
                if database_pages and tuple(frame_salts) == salts:
                    commits.append(number)
                number += 1
    except FileNotFoundError:
        return LogState()


def find_damage(database: Path) -> str | None:
    """Return where the log of a file is damaged, for people; None where all commits in it are read. Changes nothing.

    Raises:
        sqlite3.Error: The file itself can't be read.
    """
    before = read_log(database)
    if before.is_headless:
        return f"the write-ahead log {str(_log_of(database))!r} is damaged at its beginning: nothing in it can be read"
    if not before.commit_frames:
        return None
    # Only a connection that can't write leaves the log as it is when it closes.
    address = f"file:{quote(str(database))}?mode=ro"
    with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        counted = _counted_frames(database)
        if counted is None or read_log(database).salts != before.salts:
            # It began anew meanwhile, so all of it was read.
            return None
    unread = sum(number > counted for number in before.commit_frames)
    if unread <= 1:
        return None
    place = f"the write-ahead log {str(_log_of(database))!r} is damaged at frame {counted + 1}"
    return f"{place}: {unread} commits from there on can't be read"


def _log_of(database: Path) -> Path:
    return database.with_name(f"{database.name}-wal")


def _counted_frames(database: Path) -> int | None:
    try:
        with database.with_name(f"{database.name}-shm").open("rb") as file:
            file.seek(_INDEX_FRAMES_OFFSET)
            found = file.read(_INDEX_FRAMES.size)
    except FileNotFoundError:
        return None
    return int(_INDEX_FRAMES.unpack(found)[0]) if len(found) == _INDEX_FRAMES.size else None
