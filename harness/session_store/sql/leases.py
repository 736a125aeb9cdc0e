"""Leases: which incarnation of a coordinator owns which session, and until when.

Ownership is a column of the session's row and changes in the writer's transactions only. Expiry is kept in memory, by
the store's monotonic clock, and begins afresh when the store starts: a store that was away is no owner's fault.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from google.protobuf.duration_pb2 import Duration

from harness.clock import Clock
from harness.errors import FailedPreconditionError, UnavailableError, UnsupportedError
from harness.session_store import validation
from harness.session_store.sql import rows
from harness.session_store.sql.sql import Connection
from unreal_agent.server.v1 import server_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

DEFAULT_LEASE_S: Final = 10.0
_MAX_LEASE_S: Final = 600.0


KNOWN_INCARNATION: Final = "SELECT incarnation_id, address, lease_us FROM incarnations WHERE name = ?"


class Leases(Protocol):
    """When leases end, by the clock of the store."""

    def keep(self, incarnation_id: str, lease_s: float) -> None:
        """Let an incarnation's lease end this long from now."""
        ...

    def forget(self, incarnation_id: str) -> None:
        """End an incarnation's lease at once."""
        ...

    def remaining_s(self, incarnation_id: str) -> float:
        """Return the seconds until an incarnation's lease ends; 0 where it has none."""
        ...

    def is_alive(self, incarnation_id: str) -> bool:
        """Return whether an incarnation's lease is not over."""
        ...


class LeaseTable:
    """Expiry of every incarnation that this store has heard of; used by the loop and by the writer's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._deadlines: dict[str, float] = {}

    def keep(self, incarnation_id: str, lease_s: float) -> None:
        """Let an incarnation's lease end this long from now."""
        with self._lock:
            self._deadlines[incarnation_id] = self._clock.monotonic_s() + lease_s

    def replace(self, remaining_s: Mapping[str, float]) -> None:
        """Forget all leases and keep these, each for so long."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._deadlines = {one: now_s + rest_s for one, rest_s in remaining_s.items()}

    def forget(self, incarnation_id: str) -> None:
        """End an incarnation's lease at once."""
        with self._lock:
            self._deadlines.pop(incarnation_id, None)

    def remaining_s(self, incarnation_id: str) -> float:
        """Return the seconds until an incarnation's lease ends; 0 where it has none."""
        with self._lock:
            deadline = self._deadlines.get(incarnation_id)
        return 0.0 if deadline is None else max(0.0, deadline - self._clock.monotonic_s())

    def is_alive(self, incarnation_id: str) -> bool:
        """Return whether an incarnation's lease is not over."""
        return self.remaining_s(incarnation_id) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What naming an incarnation to the store did."""

    replaced_id: str
    """Incarnation of the same name that it replaced; empty if none."""


def lease_seconds(lease: Duration | None) -> float:
    """Return a lease's length: INVALID_LEASE unless more than 0 and at most 600 s; unset is 10 s."""
    if lease is None:
        return DEFAULT_LEASE_S
    lease_s = lease.seconds + lease.nanos / 1e9
    if not 0 < lease_s <= _MAX_LEASE_S:
        validation.refuse("INVALID_LEASE", "lease", f"must be more than 0 and at most {_MAX_LEASE_S:.0f} s")
    return lease_s


def load(connection: Connection, leases: Leases) -> None:
    """Begin the leases of all known incarnations afresh."""
    for incarnation_id, lease_us in connection.execute("SELECT incarnation_id, lease_us FROM incarnations"):
        leases.keep(incarnation_id, lease_us / 1e6)


def register(
    connection: Connection,
    leases: Leases,
    incarnation: session_pb2.Incarnation,
    lease_s: float,
    time_us: int,
) -> Registered:
    """Keep an incarnation alive; a new one replaces another of the same name at once.

    Raises:
        FailedPreconditionError: INCARNATION_REPLACED; it was replaced or has ended.
    """
    own_id = incarnation.incarnation_id
    lease_us = round(lease_s * 1e6)
    wanted = (own_id, incarnation.address, lease_us)
    # First, since it may wait for another that takes the name: what that ended is seen only behind it.
    known = connection.execute(KNOWN_INCARNATION, (incarnation.name,)).fetchone()
    if connection.execute("SELECT 1 FROM ended_incarnations WHERE incarnation_id = ?", (own_id,)).fetchone():
        raise FailedPreconditionError(
            f"incarnation {own_id!r} of {incarnation.name!r} was replaced or has ended: drop everything and exit",
            reason="INCARNATION_REPLACED",
            metadata={"name": incarnation.name, "incarnation_id": own_id},
        )
    replaced_id = ""
    if known is not None and known[0] != own_id:
        replaced_id = known[0]
        _end(connection, leases, replaced_id, time_us)
    if known != wanted:
        connection.execute(
            "INSERT INTO incarnations (name, incarnation_id, address, lease_us) VALUES (?, ?, ?, ?) ON CONFLICT (name)"
            " DO UPDATE SET incarnation_id = excluded.incarnation_id, address = excluded.address,"
            " lease_us = excluded.lease_us",
            (incarnation.name, *wanted),
        )
    # In memory at once, since the next change of the same transaction must see it; if the transaction fails, the worst
    # is a lease that is kept or ended early for no reason, which the epochs make harmless.
    leases.keep(own_id, lease_s)
    return Registered(replaced_id=replaced_id)


def acquire(
    connection: Connection, leases: Leases, request: store_pb2.AcquireLeaseRequest, time_us: int
) -> tuple[store_pb2.AcquireLeaseResponse, Registered]:
    """Bind a session to an incarnation; the same one again gets the same answer until its first commit."""
    incarnation = request.incarnation
    lease_s = lease_seconds(request.lease if request.HasField("lease") else None)
    row = rows.find(connection, request.session_id)
    _check_versions(row, request.versions)
    registered = register(connection, leases, incarnation, lease_s, time_us)
    response = store_pb2.AcquireLeaseResponse()
    if row.owner_id == incarnation.incarnation_id:
        if row.former_owner is not None:
            response.was_taken_over = True
            response.former_owner.ParseFromString(row.former_owner)
    else:
        _check_unowned(row, leases)
        if row.owner_id:
            response.was_taken_over = True
            response.former_owner.name = row.owner_name
            response.former_owner.incarnation_id = row.owner_id
            response.former_owner.address = row.owner_address
        row = _bind(connection, row, incarnation, response)
    response.session.CopyFrom(rows.to_session(row, rows.read_record(connection, row), leases.is_alive))
    return response, registered


def release(connection: Connection, leases: Leases, request: store_pb2.ReleaseLeaseRequest, time_us: int) -> None:
    """Give one session, or all of an incarnation's, back; what it does not hold stays as it is."""
    own_id = request.incarnation.incarnation_id
    free = "UPDATE sessions SET owner_id = '', owner_name = '', owner_address = '', former_owner = NULL"
    if request.session_id:
        connection.execute(
            f"{free} WHERE session_id = ? AND owner_id = ? AND epoch = ?", (request.session_id, own_id, request.epoch)
        )
        return
    connection.execute(f"{free} WHERE owner_id = ?", (own_id,))
    connection.execute(
        "DELETE FROM incarnations WHERE name = ? AND incarnation_id = ?", (request.incarnation.name, own_id)
    )
    _end(connection, leases, own_id, time_us)


def _end(connection: Connection, leases: Leases, incarnation_id: str, time_us: int) -> None:
    connection.execute(
        "INSERT INTO ended_incarnations (incarnation_id, end_time_us) VALUES (?, ?) ON CONFLICT DO NOTHING",
        (incarnation_id, time_us),
    )
    leases.forget(incarnation_id)


def _check_unowned(row: rows.SessionRow, leases: Leases) -> None:
    # An owner of the caller's own name is an older incarnation: `register` has just ended its lease.
    remaining_s = leases.remaining_s(row.owner_id)
    if row.owner_id and remaining_s > 0:
        raise UnavailableError(
            f"session {row.session_id!r} is owned by {row.owner_name!r}",
            reason="NOT_OWNER",
            metadata={
                "owner_name": row.owner_name,
                "owner_incarnation_id": row.owner_id,
                "owner_address": row.owner_address,
                "epoch": str(row.epoch),
            },
            retry_after_s=remaining_s,
        )


def _check_versions(row: rows.SessionRow, versions: server_pb2.ReaderVersions) -> None:
    for kind, written, read in (
        ("session_format", row.format_version, versions.session_format),
        ("item", row.max_item_version, versions.item),
        ("operation", row.max_operation_version, versions.operation),
    ):
        if written > read:
            raise UnsupportedError(
                f"session {row.session_id!r} holds {kind} version {written}; the reader knows up to {read}",
                reason="UNSUPPORTED_SESSION_VERSION",
                metadata={"kind": kind, "found": str(written), "supported": str(read)},
            )


def _bind(
    connection: Connection,
    row: rows.SessionRow,
    incarnation: session_pb2.Incarnation,
    response: store_pb2.AcquireLeaseResponse,
) -> rows.SessionRow:
    former_owner = response.former_owner.SerializeToString() if response.was_taken_over else None
    bound = row._replace(
        epoch=row.epoch + 1,
        owner_id=incarnation.incarnation_id,
        owner_name=incarnation.name,
        owner_address=incarnation.address,
        former_owner=former_owner,
    )
    connection.execute(
        "UPDATE sessions SET epoch = ?, owner_id = ?, owner_name = ?, owner_address = ?, former_owner = ?"
        " WHERE session_key = ?",
        (
            bound.epoch,
            bound.owner_id,
            bound.owner_name,
            bound.owner_address,
            former_owner,
            row.session_key,
        ),
    )
    return bound
