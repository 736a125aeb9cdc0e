"""Tells a lack of file descriptors from what it looks like: a missing file, a closed directory, a damaged database."""

from __future__ import annotations

import errno
import os
import sqlite3
from typing import Final

from harness.errors import ResourceExhaustedError

NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors of a process, or a machine, that may open nothing more."""

# SQLite says only that a file could not be opened, or read, and not why.
_OPENING_FAILED: Final = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR})
_RETRY_AFTER_S: Final = 1.0

_NEEDED: Final = 3
"""A database needs its log and the log's index too: one free number is not enough."""


def is_lack_of_descriptors(error: BaseException) -> bool:
    """Return whether an error comes of too many open files. Of one from SQLite: whether one more can be opened now."""
    if isinstance(error, OSError):
        return error.errno in NO_DESCRIPTOR
    if isinstance(error, sqlite3.Error):
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        return code in _OPENING_FAILED and _may_open_no_more()
    return False


def no_descriptor_error(what: str) -> ResourceExhaustedError:
    """Return what callers get who would have needed another file; `what` is a path, or names the thing."""
    return ResourceExhaustedError(
        f"{what} can't be opened: too many files are open; raise the limit (ulimit -n) and repeat",
        reason="TOO_MANY_OPEN_FILES",
        metadata={"path": what},
        retry_after_s=_RETRY_AFTER_S,
    )


def _may_open_no_more() -> bool:
    opened: list[int] = []
    try:
        while len(opened) < _NEEDED:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in NO_DESCRIPTOR
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return False
