"""Rows of the session table, and the message that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from harness.clock import timestamp
from harness.errors import DataLossError, FailedPreconditionError, NotFoundError, UnsupportedError
from harness.session_store import SESSION_FORMAT_VERSION, records
from harness.session_store.sql.sql import Connection
from unreal_agent.session.v1 import session_pb2

VISIBLE: Final = 0
DELETED: Final = 1
IMPORTING: Final = 2

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

OwnerCheck = Callable[[str], bool]
"""Says of an incarnation's ID whether its lease is not over."""


class SessionRow(NamedTuple):
    """A session as the table holds it; the fields are the columns."""

    session_key: int
    session_id: str
    session_uid: str
    visibility: int
    format_version: int
    max_item_version: int
    max_operation_version: int
    update_time_us: int
    base_sequence: int
    fork_end_sequence: int
    last_sequence: int
    revision: int
    latest_turn_id: str
    is_turn_open: int
    last_commit_id: str
    epoch: int
    owner_id: str
    owner_name: str
    owner_address: str
    former_owner: bytes | None
    rest: bytes


COLUMNS: Final = ", ".join(f"sessions.{name}" for name in SessionRow._fields)
BY_ID: Final = f"SELECT {COLUMNS} FROM sessions WHERE session_id = ?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRange:
    """Items that a session shows, from one session's own rows: after and up to these sequences."""

    session_key: int
    after_sequence: int
    through_sequence: int


def microseconds(instant: datetime) -> int:
    """Return an instant as a column holds it."""
    return (instant - _EPOCH) // _MICROSECOND


def instant_of(time_us: int) -> datetime:
    """Return the instant that a column holds."""
    return _EPOCH + time_us * _MICROSECOND


def look_up(connection: Connection, session_id: str) -> SessionRow | None:
    """Return a session's row, deleted or not, or None where the ID was never used."""
    row = connection.execute(BY_ID, (session_id,)).fetchone()
    return None if row is None else SessionRow._make(row)


def find(connection: Connection, session_id: str) -> SessionRow:
    """Return a session's row; raises SESSION_NOT_FOUND, SESSION_DELETED or UNSUPPORTED_SESSION_VERSION."""
    row = look_up(connection, session_id)
    if row is None:
        raise NotFoundError(
            f"session {session_id[:140]!r} does not exist",
            reason="SESSION_NOT_FOUND",
            metadata={"session_id": session_id[:140]},
        )
    if row.visibility == DELETED:
        raise deleted_error(session_id)
    if row.format_version > SESSION_FORMAT_VERSION:
        raise UnsupportedError(
            f"session {session_id!r} has format {row.format_version}; this release reads up to"
            f" {SESSION_FORMAT_VERSION}",
            reason="UNSUPPORTED_SESSION_VERSION",
            metadata={"found": str(row.format_version), "supported": str(SESSION_FORMAT_VERSION)},
        )
    return row


def deleted_error(session_id: str) -> FailedPreconditionError:
    """Return what every use of a deleted session's ID gets."""
    return FailedPreconditionError(
        f"session {session_id!r} was deleted; its ID is never used again",
        reason="SESSION_DELETED",
        metadata={"session_id": session_id},
    )


def read_record(connection: Connection, row: SessionRow) -> session_pb2.Session:
    """Return what never changes in a session: settings, ancestry, time of creation."""
    found = connection.execute(
        "SELECT record FROM session_records WHERE session_key = ?", (row.session_key,)
    ).fetchone()
    if found is None:
        raise DataLossError(
            f"the settings and ancestry of session {row.session_id!r} are missing",
            reason="HISTORY_DAMAGED",
            metadata={"session_id": row.session_id},
        )
    return decode_record(found[0], row)


def decode_record(record: bytes, row: SessionRow) -> session_pb2.Session:
    """Decode a session's record."""
    return records.decode(session_pb2.Session, record, f"the record of session {row.session_id!r}")


def rest_of(row: SessionRow) -> session_pb2.Rest:
    """Decode a session's rest."""
    return records.decode(session_pb2.Rest, row.rest, f"the rest of session {row.session_id!r}")


def to_session(row: SessionRow, record: session_pb2.Session, is_alive: OwnerCheck) -> session_pb2.Session:
    """Return the message that a row and its record stand for."""
    session = session_pb2.Session()
    session.CopyFrom(record)
    session.session_id = row.session_id
    session.session_uid = row.session_uid
    session.format_version = row.format_version
    session.max_item_version = row.max_item_version
    session.max_operation_version = row.max_operation_version
    session.update_time.CopyFrom(timestamp(instant_of(row.update_time_us)))
    session.last_sequence = row.last_sequence
    session.revision = row.revision
    session.rest.CopyFrom(rest_of(row))
    session.epoch = row.epoch
    if row.owner_id and is_alive(row.owner_id):
        session.owner.name = row.owner_name
        session.owner.incarnation_id = row.owner_id
        session.owner.address = row.owner_address
    return session


def due_time_us(rest: session_pb2.Rest) -> int | None:
    """Return from when on a session wants a coordinator; None at rest."""
    match rest.state:
        case session_pb2.REST_STATE_WORKING:
            return 0
        case session_pb2.REST_STATE_WAITING_UNTIL:
            return microseconds(rest.wake_time.ToDatetime(tzinfo=UTC))
        case _:
            return None


def item_ranges(connection: Connection, row: SessionRow, after_sequence: int) -> Iterator[ItemRange]:
    """Yield where a session's items behind a sequence lie, in order: ancestors' ranges first, its own last."""
    if after_sequence < row.base_sequence:
        inherited = connection.execute(
            "SELECT ancestor_key, after_sequence, through_sequence FROM ancestors"
            " WHERE session_key = ? AND through_sequence > ? ORDER BY through_sequence",
            (row.session_key, after_sequence),
        )
        for ancestor_key, after, through in inherited:
            yield ItemRange(
                session_key=ancestor_key, after_sequence=max(after, after_sequence), through_sequence=through
            )
    after = max(row.base_sequence, after_sequence)
    if after < row.last_sequence:
        yield ItemRange(session_key=row.session_key, after_sequence=after, through_sequence=row.last_sequence)


def range_of(connection: Connection, row: SessionRow, sequence: int) -> ItemRange:
    """Return the range that holds one existing item of a session."""
    return next(item_ranges(connection, row, sequence - 1))
