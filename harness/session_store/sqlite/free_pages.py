"""Gives room that became free back to the file system, in small steps as `retention` takes them."""

from __future__ import annotations

from typing import Final

from harness.session_store.sql.retention import remove_some
from harness.session_store.sql.sql import Connection

_STEP_PAGES: Final = 1_000
_KEPT_PAGES: Final = 256
"""Free pages that stay for what is written next."""

_INCREMENTAL: Final = 2
"""How SQLite names `auto_vacuum = INCREMENTAL`."""


def remove_and_give_back(connection: Connection, time_us: int) -> bool:
    """Remove a bounded number of rows, then room; return whether there may be more."""
    return remove_some(connection, time_us) or _give_back(connection)


def _give_back(connection: Connection) -> bool:
    """Cut some free pages off the file's end; return whether there are more. The log's next checkpoint shortens it."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (mode,) = connection.execute("PRAGMA auto_vacuum").fetchone()
    if mode != _INCREMENTAL or free <= _KEPT_PAGES:
        return False
    # Python's driver steps the statement once, whatever number it is given: a page each.
    for _ in range(min(_STEP_PAGES, free - _KEPT_PAGES)):
        connection.execute("PRAGMA incremental_vacuum(1)")
    (left,) = connection.execute("PRAGMA freelist_count").fetchone()
    return int(left) < int(free)
