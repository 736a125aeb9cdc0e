"""Brings a database to this release's tables; safe where several replicas start at once."""

from __future__ import annotations

import secrets
from typing import Final

import psycopg

from harness.errors import UnsupportedError
from harness.session_store.postgres.schema import VERSION_1

MIGRATIONS: Final = (VERSION_1,)

_LOCK: Final = 0x554E5253
"""Advisory lock that one replica holds while it migrates ("UNRS")."""


def migrate(connection: psycopg.Connection, place: str) -> str:
    """Bring the tables up to date, in one transaction, and return the store's ID.

    Raises:
        UnsupportedError: UNSUPPORTED_STORE_VERSION; nothing was changed.
    """
    with connection.transaction():
        # The isolation is READ COMMITTED: what the one before wrote is seen behind the lock.
        connection.execute(b"SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        version = _version(connection)
        if version > len(MIGRATIONS):
            raise UnsupportedError(
                f"{place} has version {version}; this release reads up to {len(MIGRATIONS)}",
                reason="UNSUPPORTED_STORE_VERSION",
                metadata={"found": str(version), "supported": str(len(MIGRATIONS))},
            )
        for statements in MIGRATIONS[version:]:
            connection.execute(statements.encode())
        if version == 0:
            connection.execute(
                b"INSERT INTO store (store_id, version) VALUES (%s, %s)", (secrets.token_hex(16), len(MIGRATIONS))
            )
        elif version < len(MIGRATIONS):
            connection.execute(b"UPDATE store SET version = %s", (len(MIGRATIONS),))
        row = connection.execute(b"SELECT store_id FROM store").fetchone()
    assert row is not None  # written in the transaction that made the table
    return str(row[0])


def _version(connection: psycopg.Connection) -> int:
    row = connection.execute(b"SELECT to_regclass('store') IS NOT NULL").fetchone()
    if row is None or not row[0]:
        return 0
    found = connection.execute(b"SELECT version FROM store").fetchone()
    return 0 if found is None else int(found[0])
