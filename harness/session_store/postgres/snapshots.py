"""One state of the database, for as long as it is held. Lost with its connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import psycopg

from harness.session_store.postgres.connections import Database
from harness.session_store.postgres.statements import PostgresConnection
from harness.session_store.postgres.storage_errors import storage_error
from harness.session_store.sql.sql import Connection

T = TypeVar("T")


class HeldDatabase:
    """A reading connection in a transaction; a `HeldState`."""

    def __init__(self, database: Database) -> None:
        self._place = database.place
        try:
            self._connection = database.connect(is_writer=False)
            # Whoever takes the export may be slow.
            self._connection.execute(b"SET LOCAL idle_in_transaction_session_timeout = 0")
        except psycopg.Error as err:
            raise storage_error(err, self._place) from err

    def read(self, function: Callable[[Connection], T]) -> T:
        """Run a function on the state."""
        try:
            return function(PostgresConnection(self._connection, is_writer=False))
        except psycopg.Error as err:
            raise storage_error(err, self._place) from err

    def close(self) -> None:
        """Let go of the state."""
        self._connection.close()
