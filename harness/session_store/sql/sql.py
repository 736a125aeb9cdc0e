"""What the statements of a store over SQL need from its engine. Pure: protocols only.

The statements are written once, for SQLite, in the part of SQL that PostgreSQL shares; placeholders are `?`, `?1` and
`:name`. An engine's connection runs them as they are or translates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Parameters = Sequence[Any] | Mapping[str, Any]


class Cursor(Protocol):
    """The rows of one statement, as tuples."""

    @property
    def rowcount(self) -> int:
        """Return how many rows a statement changed."""
        ...

    def fetchone(self) -> Any:
        """Return the next row, or None."""
        ...

    def fetchall(self) -> list[Any]:
        """Return the rows that are left."""
        ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """A connection inside a transaction that others begin and end; used on one thread at a time."""

    def execute(self, sql: str, parameters: Parameters = ..., /) -> Cursor:
        """Run one statement."""
        ...

    def executemany(self, sql: str, parameters: Iterable[Parameters], /) -> Cursor:
        """Run one statement with each of many parameters; with none it does nothing."""
        ...


class Reader(Protocol):
    """Runs functions that read."""

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Run a function on one state of the store."""
        ...


class Writer(Protocol):
    """Runs functions that change the store."""

    async def write(self, function: Callable[[Connection], T], on_durable: Callable[[T], None] | None = None) -> T:
        """Run a function, whole or not at all, and return its result once that is durable."""
        ...
