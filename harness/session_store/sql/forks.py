"""Makes a fork: a session that refers to a prefix of another. Runs on the writer's thread, inside a savepoint."""

from __future__ import annotations

from datetime import datetime

from harness.clock import timestamp
from harness.errors import OutOfRangeError
from harness.session_store.forks import OpenCall, ancestry_at, fork_items
from harness.session_store.sql import rows, sessions
from harness.session_store.sql.commits import insert_items
from harness.session_store.sql.reads import revision_of
from harness.session_store.sql.sql import Connection
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


def fork(
    connection: Connection,
    request: store_pb2.ForkSessionRequest,
    session_uid: str,
    now: datetime,
    is_alive: rows.OwnerCheck,
) -> store_pb2.ForkSessionResponse:
    """Make a fork, or return the one that the same request made."""
    known = _find_known(connection, request)
    if known is not None:
        session = rows.to_session(known, rows.read_record(connection, known), is_alive)
        return store_pb2.ForkSessionResponse(session=session, duplicate=True)
    parent = rows.find(connection, request.parent_session_id)
    cut = _checked_cut(connection, parent, request.cut_sequence)
    session_id = request.session_id or session_uid
    sessions.check_unused(connection, session_id)
    record = rows.read_record(connection, parent)
    ancestry = ancestry_at(parent.session_id, record.ancestry, cut)
    new_record = session_pb2.Session(
        requested_settings=record.requested_settings,
        initial_settings=record.initial_settings,
        create_time=timestamp(now),
        ancestry=ancestry,
    )
    revision = (_revision_of(connection, parent, cut) if cut else 0) + 1
    items = fork_items(ancestry[0], request.request_id, _open_calls(connection, parent, cut), revision, now)
    new = sessions.NewSession(
        session_id=session_id,
        session_uid=session_uid,
        record=new_record,
        rest=sessions.idle_rest(now),
        max_item_version=max(parent.max_item_version, items[0].schema_version),
        max_operation_version=parent.max_operation_version,
        base_sequence=cut,
        revision=revision,
        latest_turn_id=_latest_turn_id(connection, parent, cut),
        fork_request_id=request.request_id,
    )
    session_key = sessions.insert(connection, new, now)
    insert_items(connection, session_key, items)
    connection.execute(
        "UPDATE sessions SET last_sequence = ?1, fork_end_sequence = ?1 WHERE session_key = ?2",
        (items[-1].sequence, session_key),
    )
    _refer(connection, session_key, parent, cut)
    row = rows.find(connection, session_id)
    return store_pb2.ForkSessionResponse(session=rows.to_session(row, new_record, is_alive))


def _find_known(connection: Connection, request: store_pb2.ForkSessionRequest) -> rows.SessionRow | None:
    """Return the fork that the same request made; refuses an ID that another request used."""
    if request.session_id:
        row = rows.look_up(connection, request.session_id)
        if row is None or row.visibility == rows.DELETED:
            return None
        if _is_made_by(connection, row, request):
            return row
        raise sessions.exists_error(request.session_id)
    found = connection.execute(
        f"SELECT {rows.COLUMNS} FROM sessions WHERE fork_request_id = ? AND visibility = {rows.VISIBLE}",
        (request.request_id,),
    )
    made = (rows.SessionRow._make(row) for row in found.fetchall())
    return next((row for row in made if _is_made_by(connection, row, request)), None)


def _is_made_by(connection: Connection, row: rows.SessionRow, request: store_pb2.ForkSessionRequest) -> bool:
    (request_id,) = connection.execute(
        "SELECT fork_request_id FROM sessions WHERE session_key = ?", (row.session_key,)
    ).fetchone()
    if request_id != request.request_id:
        return False
    ancestry = rows.read_record(connection, row).ancestry
    return ancestry[0].parent_session_id == request.parent_session_id


def _checked_cut(connection: Connection, parent: rows.SessionRow, wanted: int) -> int:
    """Return where a cut falls: behind the statuses of a response, and behind what a fork itself wrote."""
    if wanted > parent.last_sequence:
        raise OutOfRangeError(
            f"session {parent.session_id!r} has no item {wanted}; its last is {parent.last_sequence}",
            reason="FORK_POINT_NOT_FOUND",
            metadata={"last_sequence": str(parent.last_sequence)},
        )
    cut = wanted or parent.last_sequence
    if cut == 0:
        return 0
    part = rows.range_of(connection, parent, cut)
    (fork_end,) = connection.execute(
        "SELECT fork_end_sequence FROM sessions WHERE session_key = ?", (part.session_key,)
    ).fetchone()
    # Statuses stand before any later turn, so only the latest response's can lie behind the cut.
    (statuses_end,) = connection.execute(
        "SELECT max(first_status_sequence) FROM calls WHERE session_key = ?1 AND response_sequence ="
        " (SELECT max(response_sequence) FROM calls WHERE session_key = ?1 AND response_sequence <= ?2)",
        (part.session_key, cut),
    ).fetchone()
    return int(max(cut, fork_end, statuses_end or 0))


def _revision_of(connection: Connection, parent: rows.SessionRow, sequence: int) -> int:
    part = rows.range_of(connection, parent, sequence)
    return revision_of(connection, parent, part.session_key, sequence)


def _open_calls(connection: Connection, parent: rows.SessionRow, cut: int) -> list[OpenCall]:
    """Return the calls without final status at a cut, in order.

    All of them are of the session whose own item is at the cut: what it inherited was closed when it was forked.
    """
    if cut == 0:
        return []
    part = rows.range_of(connection, parent, cut)
    # The two halves of the condition stand apart so that each goes by its index.
    found = connection.execute(
        "SELECT turn_id, call_id FROM (SELECT turn_id, call_id, response_sequence, first_status_sequence FROM calls"
        " WHERE session_key = ?1 AND final_sequence = 0 AND response_sequence <= ?2"
        " UNION ALL SELECT turn_id, call_id, response_sequence, first_status_sequence FROM calls"
        " WHERE session_key = ?1 AND final_sequence > ?2 AND response_sequence <= ?2) AS open"
        " ORDER BY response_sequence, first_status_sequence",
        (part.session_key, cut),
    )
    return [OpenCall(turn_id=turn_id, call_id=call_id) for turn_id, call_id in found]


def _latest_turn_id(connection: Connection, parent: rows.SessionRow, cut: int) -> str:
    """Return the last turn at or before a cut, own or inherited; empty if there is none."""
    parts = [part for part in rows.item_ranges(connection, parent, 0) if part.after_sequence < cut]
    for part in reversed(parts):
        row = connection.execute(
            "SELECT turn_id FROM turns WHERE session_key = ? AND sequence <= ? ORDER BY sequence DESC LIMIT 1",
            (part.session_key, min(part.through_sequence, cut)),
        ).fetchone()
        if row is not None:
            return str(row[0])
    return ""


def _refer(connection: Connection, session_key: int, parent: rows.SessionRow, cut: int) -> None:
    """List the ranges of the ancestors' rows that a fork shows."""
    connection.executemany(
        "INSERT INTO ancestors (session_key, through_sequence, after_sequence, ancestor_key) VALUES (?, ?, ?, ?)",
        [
            (session_key, min(part.through_sequence, cut), part.after_sequence, part.session_key)
            for part in rows.item_ranges(connection, parent, 0)
            if part.after_sequence < cut
        ],
    )
