"""Runs the statements of the store on a PostgreSQL connection: translates placeholders, locks and texts.

A transaction of PostgreSQL sees what others commit meanwhile, where SQLite has one writer. So whoever changes a session
locks its row first, when looking it up, and keeps it until the end: after that all is as with one writer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import psycopg
from psycopg.adapt import Loader
from psycopg.types.string import StrDumper, TextLoader

from harness.session_store.sql import facts, leases, retention, rows
from harness.session_store.sql.sql import Parameters

_PLACEHOLDER: Final = re.compile(r"\?(\d+)?|(?<![:\w]):([a-z_]+)|%|'[^']*'")

_LOCKING: Final = {
    rows.BY_ID: f"{rows.BY_ID} FOR UPDATE",
    # A blob that a commit names must not grow old meanwhile, and the other way round.
    facts.OWN_BLOB: f"{facts.OWN_BLOB} FOR UPDATE",
    retention.EXPIRED_BLOBS: f"{retention.EXPIRED_BLOBS} FOR UPDATE SKIP LOCKED",
    leases.KNOWN_INCARNATION: f"{leases.KNOWN_INCARNATION} FOR UPDATE",
}

# PostgreSQL keeps every character in a text but NUL; these two stand for it and for the mark itself.
_MARK: Final = "\x01"
_NUL: Final = f"{_MARK}0"
_MARKED: Final = f"{_MARK}1"


class _StrDumper(StrDumper):
    def dump(self, obj: Any) -> Any:
        return super().dump(obj.replace(_MARK, _MARKED).replace("\0", _NUL))


class _TextLoader(TextLoader):
    def load(self, data: Any) -> Any:
        # Bytes come only from databases in no encoding, and the tables are in UTF-8.
        text = str(super().load(data))
        return text.replace(_NUL, "\0").replace(_MARKED, _MARK) if _MARK in text else text


class _SumLoader(Loader):
    """A sum of whole numbers is a whole number."""

    def load(self, data: Any) -> int:
        return int(bytes(data))


def adapt(connection: psycopg.Connection) -> None:
    """Let values go in and out as the statements expect."""
    adapters = connection.adapters
    adapters.register_dumper(str, _StrDumper)
    adapters.register_loader("text", _TextLoader)
    adapters.register_loader("numeric", _SumLoader)


class PostgresConnection:
    """Runs statements that are written for SQLite; `harness.session_store.sql.Connection`."""

    def __init__(self, connection: psycopg.Connection, *, is_writer: bool) -> None:
        self.raw = connection
        self._is_writer = is_writer

    def execute(self, sql: str, parameters: Parameters = (), /) -> psycopg.Cursor[tuple[Any, ...]]:
        """Run one statement."""
        return self.raw.execute(translate(self._locking(sql)).encode(), _named(parameters))

    def executemany(self, sql: str, parameters: Iterable[Parameters], /) -> psycopg.Cursor[tuple[Any, ...]]:
        """Run one statement with each of many parameters, all sent together."""
        cursor = self.raw.cursor()
        named = [_named(one) for one in parameters]
        if named:
            cursor.executemany(translate(self._locking(sql)).encode(), named)
        return cursor

    def _locking(self, sql: str) -> str:
        return _LOCKING.get(sql, sql) if self._is_writer else sql


@lru_cache(maxsize=512)
def translate(sql: str) -> str:
    """Return a statement with the driver's placeholders."""
    count = 0

    def placeholder(found: re.Match[str]) -> str:
        nonlocal count
        if found[0] == "%":
            return "%%"
        if found[0].startswith("'"):
            return found[0].replace("%", "%%")
        if found[2]:
            return f"%({found[2]})s"
        count += 1
        return f"%(p{found[1] or count})s"

    return _PLACEHOLDER.sub(placeholder, sql)


def _named(parameters: Parameters) -> Mapping[str, Any]:
    if not isinstance(parameters, Mapping):
        parameters = {f"p{number}": value for number, value in enumerate(parameters, start=1)}
    # Flags are numbers, as on SQLite.
    return {name: int(value) if isinstance(value, bool) else value for name, value in parameters.items()}
