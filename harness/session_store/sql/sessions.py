"""Makes, lists and deletes sessions. Functions that write run on the writer's thread, inside a savepoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from harness.clock import timestamp
from harness.errors import AlreadyExistsError, DataLossError, FailedPreconditionError
from harness.session_store import SESSION_FORMAT_VERSION
from harness.session_store.sql import rows
from harness.session_store.sql.commits import check_epoch
from harness.session_store.sql.sql import Connection
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

PAGE_BYTES: Final = 4 * 1024 * 1024
_DEFAULT_PAGE: Final = 50
_MAX_PAGE: Final = 500
# Sorts behind every character of an ID.
_BEHIND_IDS: Final = "\x7f"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A session to insert. Fields that every new session has alike are not here."""

    session_id: str
    session_uid: str
    record: session_pb2.Session
    """What never changes: requested and initial settings, time of creation, ancestry."""

    rest: session_pb2.Rest
    visibility: int = rows.VISIBLE
    max_item_version: int = 0
    max_operation_version: int = 0
    base_sequence: int = 0
    revision: int = 0
    latest_turn_id: str = ""
    epoch: int = 0
    fork_request_id: str | None = None


def insert(connection: Connection, new: NewSession, now: datetime) -> int:
    """Insert a session without items of its own and return its key."""
    (session_key,) = connection.execute(
        "INSERT INTO sessions (session_id, session_uid, visibility, format_version, max_item_version,"
        " max_operation_version, update_time_us, base_sequence, last_sequence, revision, latest_turn_id, epoch,"
        " fork_request_id, rest, session_state, due_time_us)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING session_key",
        (
            new.session_id,
            new.session_uid,
            new.visibility,
            SESSION_FORMAT_VERSION,
            new.max_item_version,
            new.max_operation_version,
            rows.microseconds(now),
            new.base_sequence,
            new.base_sequence,
            new.revision,
            new.latest_turn_id,
            new.epoch,
            new.fork_request_id,
            new.rest.SerializeToString(),
            new.rest.session_state,
            rows.due_time_us(new.rest),
        ),
    ).fetchone()
    connection.execute(
        "INSERT INTO session_records (session_key, record) VALUES (?, ?)",
        (session_key, new.record.SerializeToString()),
    )
    return int(session_key)


def idle_rest(now: datetime) -> session_pb2.Rest:
    """Return the rest of a session in which nothing is to be done."""
    return session_pb2.Rest(
        state=session_pb2.REST_STATE_AT_REST,
        session_state=session_pb2.SESSION_STATE_IDLE,
        since_time=timestamp(now),
    )


def check_unused(connection: Connection, session_id: str) -> None:
    """Refuse an ID that is or was in use: SESSION_EXISTS, SESSION_DELETED."""
    row = rows.look_up(connection, session_id)
    if row is None:
        return
    if row.visibility == rows.DELETED:
        raise rows.deleted_error(session_id)
    raise exists_error(session_id)


def exists_error(session_id: str) -> AlreadyExistsError:
    """Return what a request for a session ID in use by another session gets."""
    return AlreadyExistsError(
        f"session {session_id!r} exists and is another one; choose another ID",
        reason="SESSION_EXISTS",
        metadata={"session_id": session_id},
    )


def create(
    connection: Connection,
    request: store_pb2.CreateSessionRequest,
    session_uid: str,
    now: datetime,
    is_alive: rows.OwnerCheck,
) -> store_pb2.CreateSessionResponse:
    """Make a session, or return the one that the same request made."""
    row = rows.look_up(connection, request.session_id)
    if row is not None:
        if row.visibility == rows.DELETED:
            raise rows.deleted_error(request.session_id)
        record = rows.read_record(connection, row)
        if record.requested_settings != request.requested_settings:
            raise exists_error(request.session_id)
        return store_pb2.CreateSessionResponse(session=rows.to_session(row, record, is_alive), duplicate=True)
    record = session_pb2.Session(
        requested_settings=request.requested_settings,
        initial_settings=request.initial_settings,
        create_time=timestamp(now),
    )
    new = NewSession(session_id=request.session_id, session_uid=session_uid, record=record, rest=idle_rest(now))
    insert(connection, new, now)
    row = rows.find(connection, request.session_id)
    return store_pb2.CreateSessionResponse(session=rows.to_session(row, record, is_alive))


def get(connection: Connection, session_id: str, is_alive: rows.OwnerCheck) -> session_pb2.Session:
    """Return one session."""
    row = rows.find(connection, session_id)
    return rows.to_session(row, rows.read_record(connection, row), is_alive)


def list_page(
    connection: Connection, request: store_pb2.ListSessionsRequest, is_alive: rows.OwnerCheck
) -> store_pb2.ListSessionsResponse:
    """Return a page of sessions by ID; reads the index up to the page's end and the rows of the page."""
    size = min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE)
    ids = _page_of_ids(connection, request, size + 1)
    response = store_pb2.ListSessionsResponse()
    total_bytes = 0
    for session_id in ids[:size]:
        row = rows.look_up(connection, session_id)
        if row is None:
            raise DataLossError(f"session {session_id!r} is listed and not there", reason="STORE_CORRUPT")
        record = rows.read_record(connection, row)
        response.sessions.append(rows.to_session(row, record, is_alive))
        total_bytes += record.ByteSize()
        if total_bytes > PAGE_BYTES:
            break
    if len(response.sessions) < len(ids):
        response.next_page_token = response.sessions[-1].session_id
    return response


def _page_of_ids(connection: Connection, request: store_pb2.ListSessionsRequest, count: int) -> Sequence[str]:
    bounds = (request.page_token, request.id_prefix, request.id_prefix + _BEHIND_IDS, count)
    where = f"visibility = {rows.VISIBLE} AND session_id > ? AND session_id >= ? AND session_id < ?"
    if not request.states:
        found = connection.execute(f"SELECT session_id FROM sessions WHERE {where} ORDER BY session_id LIMIT ?", bounds)
        return [session_id for (session_id,) in found]
    ids: list[str] = []
    for state in set(request.states):
        found = connection.execute(
            f"SELECT session_id FROM sessions WHERE session_state = ? AND {where} ORDER BY session_id LIMIT ?",
            (state, *bounds),
        )
        ids.extend(session_id for (session_id,) in found)
    return sorted(ids)[:count]


def delete(
    connection: Connection, request: store_pb2.DeleteSessionRequest, now: datetime, is_alive: rows.OwnerCheck
) -> None:
    """Put a session out of sight at once; its rows go later, in small steps."""
    row = rows.look_up(connection, request.session_id)
    if row is not None and row.visibility == rows.DELETED:
        return
    row = rows.find(connection, request.session_id)
    check_epoch(row, request.epoch, is_alive)
    if not request.force and rows.rest_of(row).state != session_pb2.REST_STATE_AT_REST:
        raise FailedPreconditionError(
            f"session {row.session_id!r} is not at rest: stop it first, or force",
            reason="SESSION_NOT_AT_REST",
            metadata={"session_id": row.session_id},
        )
    # An ancestor that was deleted before may have waited for this fork only.
    connection.execute(
        f"UPDATE sessions SET needs_purge = 1 WHERE visibility = {rows.DELETED}"
        " AND session_key IN (SELECT ancestor_key FROM ancestors WHERE session_key = ?)",
        (row.session_key,),
    )
    connection.execute("DELETE FROM ancestors WHERE session_key = ?", (row.session_key,))
    connection.execute(
        "UPDATE sessions SET visibility = ?, needs_purge = 1, owner_id = '', owner_name = '', owner_address = '',"
        " former_owner = NULL, due_time_us = NULL, update_time_us = ? WHERE session_key = ?",
        (rows.DELETED, rows.microseconds(now), row.session_key),
    )
