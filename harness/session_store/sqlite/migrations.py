"""Versions of the database file: makes a new file, brings an older one forward, refuses a newer one untouched.

Each step is one transaction that also raises `PRAGMA user_version`, so a process that dies in the middle leaves the
version before, and the next start goes on from there.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Sequence
from typing import Final

from harness.errors import FailedPreconditionError, UnsupportedError
from harness.session_store.sqlite.schema import APPLICATION_ID, VERSION_1, VERSION_2

Migration = Callable[[sqlite3.Connection], None]
"""Changes a file of the version before to its own, inside a transaction that it neither begins nor ends."""


def run_statements(connection: sqlite3.Connection, script: str) -> None:
    """Run statements one by one inside the caller's transaction (`executescript` would commit it)."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""


def _make_version_1(connection: sqlite3.Connection) -> None:
    run_statements(connection, VERSION_1)
    connection.execute("INSERT INTO store (store_id) VALUES (?)", (secrets.token_hex(16),))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")


def _make_version_2(connection: sqlite3.Connection) -> None:
    run_statements(connection, VERSION_2)


MIGRATIONS: Final[Sequence[Migration]] = (_make_version_1, _make_version_2)
"""The n-th makes version n of n - 1."""


def check_version(connection: sqlite3.Connection, path: str, migrations: Sequence[Migration] = MIGRATIONS) -> int:
    """Return the file's version, or refuse the file; writes nothing.

    Raises:
        UnsupportedError: UNSUPPORTED_STORE_VERSION; a later release wrote the file.
        FailedPreconditionError: NOT_A_SESSION_STORE; the database belongs to another program.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    is_empty = connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None
    if application_id != APPLICATION_ID and not is_empty:
        raise FailedPreconditionError(
            f"{path!r} is a database of another program; name another file",
            reason="NOT_A_SESSION_STORE",
            metadata={"path": path},
        )
    if version > len(migrations):
        raise UnsupportedError(
            f"{path!r} has format {version}; this release reads up to {len(migrations)}: use a later release",
            reason="UNSUPPORTED_STORE_VERSION",
            metadata={"path": path, "found": str(version), "supported": str(len(migrations))},
        )
    return int(version)


def migrate(connection: sqlite3.Connection, path: str, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring a file to the newest version; raises as `check_version` does."""
    for target in range(check_version(connection, path, migrations) + 1, len(migrations) + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Another process may have migrated while this one waited for the lock.
            if check_version(connection, path, migrations) < target:
                migrations[target - 1](connection)
                connection.execute(f"PRAGMA user_version = {target}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
