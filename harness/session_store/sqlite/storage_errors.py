"""Turns what SQLite and the file system say into the library's errors."""

from __future__ import annotations

import errno
import sqlite3
from typing import Final

from harness.errors import (
    DataLossError,
    FailedPreconditionError,
    HarnessError,
    ResourceExhaustedError,
    UnavailableError,
)
from harness.primitives.descriptors import is_lack_of_descriptors, no_descriptor_error

_NOT_WRITABLE: Final = frozenset(
    {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH}
)
_CORRUPT: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_RETRY_AFTER_S: Final = 1.0


def storage_error(error: sqlite3.Error | OSError, path: str) -> HarnessError:
    """Return the error that callers see.

    STORAGE_FULL, TOO_MANY_OPEN_FILES, STATE_DIR_NOT_WRITABLE, STORE_CORRUPT, STORAGE_FAILED.
    """
    metadata = {"path": path}
    if is_lack_of_descriptors(error):
        return no_descriptor_error(repr(path))
    # The low byte is the primary code; the rest only says where in SQLite it arose.
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    number = error.errno if isinstance(error, OSError) else None
    if code == sqlite3.SQLITE_FULL or number in _NO_SPACE:
        return ResourceExhaustedError(
            f"there is no room left for {path!r}; nothing was written: make room and repeat",
            reason="STORAGE_FULL",
            metadata=metadata,
            retry_after_s=_RETRY_AFTER_S,
        )
    if code in _NOT_WRITABLE or number is not None:
        return FailedPreconditionError(
            f"{path!r} cannot be written ({error}); nothing was written: check its owner and permissions",
            reason="STATE_DIR_NOT_WRITABLE",
            metadata=metadata,
        )
    if code in _CORRUPT:
        return DataLossError(
            f"{path!r} is damaged ({error})",
            reason="STORE_CORRUPT",
            metadata=metadata,
        )
    return UnavailableError(
        f"{path!r} could not be read or written ({error}); repeat with the same ID",
        reason="STORAGE_FAILED",
        metadata=metadata,
        retry_after_s=_RETRY_AFTER_S,
    )


def log_error(damage: str, path: str) -> DataLossError:
    """Return what opening a store gets whose log is damaged; it must not be written to."""
    return DataLossError(damage, reason="STORE_CORRUPT", metadata={"path": path})


def gone_error(path: str) -> DataLossError:
    """Return what callers of a store get whose file is not at its place any more."""
    return DataLossError(
        f"{path!r} was deleted or replaced while it was in use; nothing more is written",
        reason="STORE_GONE",
        metadata={"path": path},
    )
