"""Writes one commit: runs on the writer's thread, inside a savepoint."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from harness.clock import timestamp
from harness.errors import ConflictError
from harness.session_store import SESSION_FORMAT_VERSION
from harness.session_store.invariants import CommitPlan, Head, needs_of, plan_commit
from harness.session_store.sql import rows
from harness.session_store.sql.checksums import item_checksum, operation_checksum
from harness.session_store.sql.facts import read_facts
from harness.session_store.sql.sql import Connection
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

# Epoch 0 is a caller without a lease: it writes while nobody owns the session, or the owner named here is dead.
_ADVANCE: Final = f"""
UPDATE sessions SET
    last_sequence = last_sequence + :count, revision = revision + 1, update_time_us = :time_us,
    last_commit_id = :commit_id, rest = :rest, session_state = :session_state, due_time_us = :due_time_us,
    max_item_version = CASE WHEN max_item_version < :item_version THEN :item_version ELSE max_item_version END,
    max_operation_version =
        CASE WHEN max_operation_version < :operation_version THEN :operation_version ELSE max_operation_version END,
    former_owner = CASE WHEN :epoch > 0 THEN NULL ELSE former_owner END
WHERE session_id = :session_id AND visibility = {rows.VISIBLE} AND format_version <= {SESSION_FORMAT_VERSION}
    AND last_commit_id <> :commit_id AND last_sequence = :expected_sequence
    AND ((epoch = :epoch AND owner_id <> '') OR (:epoch = 0 AND owner_id IN ('', :dead_owner_id)))
RETURNING session_key, base_sequence, revision, latest_turn_id, is_turn_open
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advanced:
    """A session's row after the first statement of a commit."""

    session_key: int
    base_sequence: int
    revision: int
    latest_turn_id: str
    is_turn_open: int


def commit(
    connection: Connection, request: store_pb2.CommitRequest, now: datetime, is_alive: rows.OwnerCheck
) -> store_pb2.CommitResponse:
    """Write a commit that passed `validation.check_commit`, or raise and leave the undoing to the savepoint."""
    advanced = _advance(connection, request, now, dead_owner_id="")
    if advanced is None:
        answer = _answer_or_refuse(connection, request, is_alive)
        if answer is not None:
            return answer
        owner_id = rows.find(connection, request.session_id).owner_id
        advanced = _advance(connection, request, now, dead_owner_id=owner_id)
        assert advanced is not None  # every other reason was looked for, in the same transaction
    head = Head(
        last_sequence=request.expected_sequence,
        latest_turn_id=advanced.latest_turn_id,
        is_turn_open=bool(advanced.is_turn_open),
    )
    is_fork = advanced.base_sequence > 0
    facts = read_facts(connection, advanced.session_key, needs_of(request), is_fork=is_fork)
    plan = plan_commit(head, facts, request)
    insert_items(
        connection,
        advanced.session_key,
        [
            _stored_item(item, request.expected_sequence + index, advanced.revision, now)
            for index, item in enumerate(request.items, start=1)
        ],
    )
    write_plan(connection, advanced.session_key, advanced.revision, plan)
    if plan.head.latest_turn_id != head.latest_turn_id or plan.head.is_turn_open != head.is_turn_open:
        write_head(connection, advanced.session_key, plan.head)
    return store_pb2.CommitResponse(
        last_sequence=plan.head.last_sequence, revision=advanced.revision, commit_time=timestamp(now)
    )


def _advance(
    connection: Connection, request: store_pb2.CommitRequest, now: datetime, *, dead_owner_id: str
) -> _Advanced | None:
    """Do a commit's first statement: take the session's next revision where epoch and sequence match."""
    row = connection.execute(
        _ADVANCE,
        {
            "count": len(request.items),
            "time_us": rows.microseconds(now),
            "commit_id": request.commit_id,
            "rest": request.rest.SerializeToString(),
            "session_state": request.rest.session_state,
            "due_time_us": rows.due_time_us(request.rest),
            "item_version": max((item.schema_version for item in request.items), default=0),
            "operation_version": max((operation.schema_version for operation in request.operations), default=0),
            "epoch": request.epoch,
            "session_id": request.session_id,
            "expected_sequence": request.expected_sequence,
            "dead_owner_id": dead_owner_id,
        },
    ).fetchone()
    if row is None:
        return None
    session_key, base_sequence, revision, latest_turn_id, is_turn_open = row
    return _Advanced(
        session_key=session_key,
        base_sequence=base_sequence,
        revision=revision,
        latest_turn_id=latest_turn_id,
        is_turn_open=is_turn_open,
    )


def _answer_or_refuse(
    connection: Connection, request: store_pb2.CommitRequest, is_alive: rows.OwnerCheck
) -> store_pb2.CommitResponse | None:
    """Find out, in the order of the contract, why a commit's first statement hit no row.

    Returns:
        The first answer where the commit is known; None where the owner is dead and the caller holds no lease.
    """
    row = rows.find(connection, request.session_id)
    if row.last_commit_id == request.commit_id:
        return store_pb2.CommitResponse(
            last_sequence=row.last_sequence,
            revision=row.revision,
            commit_time=timestamp(rows.instant_of(row.update_time_us)),
            duplicate=True,
        )
    check_epoch(row, request.epoch, is_alive)
    if row.last_sequence != request.expected_sequence:
        raise ConflictError(
            f"session {row.session_id!r} is at sequence {row.last_sequence}, expected {request.expected_sequence}",
            reason="SEQUENCE_CONFLICT",
            metadata={"last_sequence": str(row.last_sequence), "revision": str(row.revision)},
        )
    return None


def check_epoch(row: rows.SessionRow, epoch: int, is_alive: rows.OwnerCheck) -> None:
    """Refuse a writer that does not hold the session: STALE_EPOCH. Epoch 0 writes while nobody owns it."""
    is_owner = epoch == row.epoch and row.owner_id != ""
    is_unowned = epoch == 0 and not (row.owner_id and is_alive(row.owner_id))
    if not is_owner and not is_unowned:
        raise ConflictError(
            f"session {row.session_id!r} is under epoch {row.epoch}, got {epoch}",
            reason="STALE_EPOCH",
            metadata={"epoch": str(row.epoch), "owner_name": row.owner_name, "owner_address": row.owner_address},
        )


def _stored_item(item: item_pb2.Item, sequence: int, revision: int, now: datetime) -> item_pb2.Item:
    stored = item_pb2.Item()
    stored.CopyFrom(item)
    stored.sequence = sequence
    stored.revision = revision
    if not stored.HasField("record_time"):
        stored.record_time.CopyFrom(timestamp(now))
    return stored


def insert_items(connection: Connection, session_key: int, items: list[item_pb2.Item]) -> None:
    """Append items that carry their sequence and revision."""
    connection.executemany(
        "INSERT INTO items (session_key, sequence, revision, record, checksum) VALUES (?, ?, ?, ?, ?)",
        [_item_columns(session_key, item) for item in items],
    )


def _item_columns(session_key: int, item: item_pb2.Item) -> tuple[int, int, int, bytes, int]:
    record = item.SerializeToString()
    checksum = item_checksum(session_key, item.sequence, item.revision, record)
    return session_key, item.sequence, item.revision, record, checksum


def write_head(connection: Connection, session_key: int, head: Head) -> None:
    """Keep which turn is the latest and whether it is open."""
    connection.execute(
        "UPDATE sessions SET latest_turn_id = ?, is_turn_open = ? WHERE session_key = ?",
        (head.latest_turn_id, head.is_turn_open, session_key),
    )


def write_plan(connection: Connection, session_key: int, revision: int, plan: CommitPlan) -> None:
    """Write a commit's operations and the indexes of its items."""
    connection.executemany(
        "INSERT INTO inputs (session_key, input_id, sequence) VALUES (?, ?, ?)",
        [(session_key, input_id, sequence) for input_id, sequence in plan.inputs.items()],
    )
    connection.executemany(
        "INSERT INTO turns (session_key, turn_id, sequence, kind) VALUES (?, ?, ?, ?)",
        [(session_key, turn_id, sequence, kind) for turn_id, (sequence, kind) in plan.new_turns.items()],
    )
    connection.executemany(
        "UPDATE turns SET answer_sequence = ? WHERE session_key = ? AND turn_id = ?",
        [(sequence, session_key, turn_id) for turn_id, sequence in plan.answered_turns.items()],
    )
    _write_calls(connection, session_key, plan)
    _write_operations(connection, session_key, revision, plan)
    # An inherited blob has no row of the session's own and is referenced already.
    connection.executemany(
        "UPDATE blobs SET reference_sequence = ? WHERE session_key = ? AND digest = ? AND reference_sequence IS NULL",
        [(sequence, session_key, digest) for digest, sequence in plan.blob_references.items()],
    )


def _write_calls(connection: Connection, session_key: int, plan: CommitPlan) -> None:
    for call in plan.calls.values():
        operation_ids = " ".join(call.operation_ids)
        if call.response_sequence:
            connection.execute(
                "INSERT INTO calls (session_key, call_id, turn_id, response_sequence, first_status_sequence,"
                " final_sequence, operation_ids) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    session_key,
                    call.call_id,
                    call.turn_id,
                    call.response_sequence,
                    call.first_status_sequence,
                    call.final_sequence,
                    operation_ids,
                ),
            )
        else:
            connection.execute(
                "UPDATE calls SET final_sequence = ?, operation_ids = ? WHERE session_key = ? AND call_id = ?",
                (call.final_sequence, operation_ids, session_key, call.call_id),
            )


def _write_operations(connection: Connection, session_key: int, revision: int, plan: CommitPlan) -> None:
    for change in plan.operations:
        operation = change.operation
        record = operation.SerializeToString()
        checksum = operation_checksum(session_key, operation.operation_id, revision, record)
        if change.is_new:
            connection.execute(
                "INSERT INTO operations (session_key, operation_id, type, type_version, status, step, call_id,"
                " revision, is_settled, record, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    session_key,
                    operation.operation_id,
                    operation.type,
                    operation.type_version,
                    operation.status,
                    operation.step,
                    operation.call_id,
                    revision,
                    change.is_settled,
                    record,
                    checksum,
                ),
            )
        else:
            connection.execute(
                "UPDATE operations SET status = ?, step = ?, revision = ?, is_settled = ?, record = ?, checksum = ?"
                " WHERE session_key = ? AND operation_id = ?",
                (
                    operation.status,
                    operation.step,
                    revision,
                    change.is_settled,
                    record,
                    checksum,
                    session_key,
                    operation.operation_id,
                ),
            )
    connection.executemany(
        "UPDATE operations SET is_settled = 1 WHERE session_key = ? AND operation_id = ?",
        [(session_key, operation_id) for operation_id in plan.settled_operation_ids],
    )
