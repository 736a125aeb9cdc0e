"""Leases in the database: expiry is judged by the server's `clock_timestamp()` alone, whichever replica asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from harness.session_store.sql.leases import LeaseTable
from harness.session_store.sql.sql import Connection, Reader

T = TypeVar("T")


class PostgresLeases:
    """The leases as one transaction sees them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def keep(self, incarnation_id: str, lease_s: float) -> None:
        """Let an incarnation's lease end this long from now."""
        self._connection.execute(
            "UPDATE incarnations SET lease_end = clock_timestamp() + ? * interval '1 second' WHERE incarnation_id = ?",
            (lease_s, incarnation_id),
        )

    def forget(self, incarnation_id: str) -> None:
        """End an incarnation's lease at once."""
        self._connection.execute(
            "UPDATE incarnations SET lease_end = clock_timestamp() WHERE incarnation_id = ?", (incarnation_id,)
        )

    def remaining_s(self, incarnation_id: str) -> float:
        """Return the seconds until an incarnation's lease ends; 0 where it has none."""
        row = self._connection.execute(
            "SELECT CAST(extract(epoch FROM lease_end - clock_timestamp()) AS float8) FROM incarnations"
            " WHERE incarnation_id = ?",
            (incarnation_id,),
        ).fetchone()
        return 0.0 if row is None else max(0.0, float(row[0]))

    def is_alive(self, incarnation_id: str) -> bool:
        """Return whether an incarnation's lease is not over."""
        return self.remaining_s(incarnation_id) > 0


class LeaseReader:
    """Reads, and with each reading looks at the leases: for whoever must know them between two readings.

    Tells too of watching incarnations that another replica has ended, of which no notification came.
    """

    def __init__(
        self,
        readers: Reader,
        table: LeaseTable,
        watching: Callable[[], list[str]],
        ended: Callable[[str], None],
    ) -> None:
        self._readers = readers
        self._table = table
        self._watching = watching
        self._ended = ended

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Run a function on one state of the store, the table of leases being of the same moment."""
        watching = self._watching()

        def look(connection: Connection) -> tuple[T, list[str]]:
            self._table.replace(
                dict(
                    connection.execute(
                        "SELECT incarnation_id, CAST(extract(epoch FROM lease_end - clock_timestamp()) AS float8)"
                        " FROM incarnations"
                    ).fetchall()
                )
            )
            ended = connection.execute(
                "SELECT incarnation_id FROM ended_incarnations WHERE incarnation_id = ANY(?)", (watching,)
            ).fetchall()
            return function(connection), [incarnation_id for (incarnation_id,) in ended]

        found, ended = await self._readers.read(look)
        for incarnation_id in ended:
            self._ended(incarnation_id)
        return found
