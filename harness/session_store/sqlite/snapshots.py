"""One state of the file, for as long as it is held."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from harness.session_store.sql.sql import Connection
from harness.session_store.sqlite.connections import connect, translated_errors
from harness.session_store.sqlite.storage_errors import storage_error

T = TypeVar("T")


class HeldFile:
    """A reading connection in a transaction; a `HeldState`."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        try:
            self._connection = connect(path, is_writer=False)
            self._connection.execute("BEGIN")
        except sqlite3.Error as err:
            raise storage_error(err, self._path) from err

    def read(self, function: Callable[[Connection], T]) -> T:
        """Run a function on the state."""
        with translated_errors(self._connection, self._path):
            return function(self._connection)

    def close(self) -> None:
        """Let go of the state."""
        self._connection.close()
