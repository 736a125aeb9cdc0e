"""Tells damage of the file from a fault of ours: looks for values that no release ever writes.

SQLite keeps any kind of value in any column, and a few wrong bytes turn a number into a text. Nothing is checked while
all goes well; whoever meets an error that nobody expected asks here first.
"""

from __future__ import annotations

import sqlite3
from typing import Final

_KINDS: Final = {"INTEGER": "integer", "TEXT": "text", "BLOB": "blob"}


def find_wrong_value(connection: sqlite3.Connection) -> str | None:
    """Return the place of a value of the wrong kind, for example "column step of table operations", or None.

    Reads the whole file.
    """
    tables = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
    )
    for (table,) in tables.fetchall():
        for _, column, declared, *_ in connection.execute(f'PRAGMA table_info("{table}")').fetchall():
            kind = _KINDS.get(declared)
            if kind is None:
                continue
            # No number that is stored counts below nothing.
            negative = f' OR "{column}" < 0' if kind == "integer" else ""
            query = f'SELECT 1 FROM "{table}" WHERE typeof("{column}") NOT IN (?, \'null\'){negative} LIMIT 1'
            if connection.execute(query, (kind,)).fetchone() is not None:
                return f"column {column} of table {table}"
    return None
