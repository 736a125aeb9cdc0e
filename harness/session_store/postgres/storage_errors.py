"""Turns what PostgreSQL and its driver say into the library's errors, and says what may be tried again."""

from __future__ import annotations

from typing import Final

import psycopg
from psycopg import errors

from harness.errors import (
    DataLossError,
    FailedPreconditionError,
    HarnessError,
    ResourceExhaustedError,
    UnavailableError,
)

_RETRY_AFTER_S: Final = 1.0

# A row that another made between a look and the insert is found by the next look.
_CONTENTION: Final = (errors.SerializationFailure, errors.DeadlockDetected, errors.UniqueViolation)
_AWAY: Final = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.TooManyConnections,
    errors.IdleInTransactionSessionTimeout,
    errors.LockNotAvailable,
    # A standby that a failover left behind, or is about to raise.
    errors.ReadOnlySqlTransaction,
)
_NOT_ALLOWED: Final = (
    errors.InsufficientPrivilege,
    errors.InvalidPassword,
    errors.InvalidAuthorizationSpecification,
    errors.InvalidCatalogName,
)


def is_transient(error: psycopg.Error, *, is_broken: bool) -> bool:
    """Return whether a transaction of which nothing was committed may be tried again."""
    if isinstance(error, _CONTENTION + _AWAY):
        return True
    # Without a state the server has said nothing: it could not be reached, or is gone.
    return is_broken or (isinstance(error, psycopg.OperationalError) and error.sqlstate is None)


def storage_error(error: psycopg.Error, place: str) -> HarnessError:
    """Return the error that callers see: STORAGE_FULL, STORE_NOT_ALLOWED, STORE_CORRUPT, STORAGE_FAILED.

    The driver's texts name host, user and statement, never a password or a value of ours.
    """
    metadata = {"path": place}
    said = error.diag.message_primary or type(error).__name__
    if isinstance(error, errors.DiskFull | errors.OutOfMemory):
        return ResourceExhaustedError(
            f"there is no room left in {place} ({said}); nothing was written: make room and repeat",
            reason="STORAGE_FULL",
            metadata=metadata,
            retry_after_s=_RETRY_AFTER_S,
        )
    if isinstance(error, _NOT_ALLOWED):
        return FailedPreconditionError(
            f"{place} cannot be used ({said}): check the database, its user and its rights",
            reason="STORE_NOT_ALLOWED",
            metadata=metadata,
        )
    if isinstance(error, errors.DataCorrupted | errors.IndexCorrupted):
        return DataLossError(f"{place} is damaged ({said})", reason="STORE_CORRUPT", metadata=metadata)
    return UnavailableError(
        f"{place} could not be read or written ({said}); repeat with the same ID",
        reason="STORAGE_FAILED",
        metadata=metadata,
        retry_after_s=_RETRY_AFTER_S,
    )


def unknown_outcome(error: psycopg.Error, place: str) -> UnavailableError:
    """Return what a caller gets whose change may have been committed and can't be tried again."""
    return UnavailableError(
        f"the connection to {place} was lost while a change was committed ({type(error).__name__}): it may be there",
        reason="STORAGE_FAILED",
        metadata={"path": place},
        retry_after_s=_RETRY_AFTER_S,
    )
