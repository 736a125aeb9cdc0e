"""Takes in an export: writes it in small steps out of sight, and shows it in one, or removes it again.

Everything that the export says is checked as if it had been committed here; nothing of it is held in memory but the
records of one step.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Any, Final, TypeVar

from harness.clock import Clock, timestamp
from harness.errors import InvalidArgumentError, UnsupportedError
from harness.session_store import BLOB_CHUNK_BYTES, SESSION_FORMAT_VERSION, records, validation
from harness.session_store.forks import OpenCall, closing_items
from harness.session_store.invariants import TERMINAL_STATUSES, Head, blobs_in, needs_of, plan_import
from harness.session_store.sql import rows, sessions
from harness.session_store.sql.blobs import insert_chunk
from harness.session_store.sql.checksums import operation_checksum
from harness.session_store.sql.commits import insert_items, write_head, write_plan
from harness.session_store.sql.exports import EXPORT_VERSION
from harness.session_store.sql.facts import read_facts
from harness.session_store.sql.sql import Connection, Writer
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

T = TypeVar("T")

_STEP_BYTES: Final = 1024 * 1024
_STEP_RECORDS: Final = 500

_MAX_COUNTER: Final = 2**62
"""Largest epoch, revision and step that is taken over: each counts on from here, and must not run out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The session that is being made."""

    session_key: int
    session_id: str
    session_uid: str
    header: store_pb2.ExportHeader


class _PartialBlob:
    """A blob whose pieces are coming in."""

    def __init__(self, chunk: store_pb2.BlobChunk) -> None:
        self.blob = chunk.blob
        self.hasher = hashlib.sha256()
        self.size_bytes = 0


class Import:
    """One import. `take` every message, then `finish`; `abandon` in every other case."""

    def __init__(self, writer: Writer, clock: Clock, session_uid: str) -> None:
        self._writer = writer
        self._clock = clock
        self._session_uid = session_uid
        self._target: _Target | None = None
        self._head = Head(last_sequence=0, latest_turn_id="", is_turn_open=False)
        self._waiting: list[item_pb2.Item] = []
        self._waiting_bytes = 0
        self._counts = store_pb2.ExportEnd()
        self._blob: _PartialBlob | None = None
        self._end: store_pb2.ExportEnd | None = None
        self._is_done = False

    async def take(self, request: store_pb2.ImportSessionRequest) -> None:
        """Take in one message."""
        records.check_fields_known(request, "the import")
        for record in request.records:
            if self._end is not None:
                raise _invalid("it goes on behind its end")
            await self._take_record(request.session_id, record)

    async def _take_record(self, wanted_id: str, record: store_pb2.ExportRecord) -> None:
        kind = record.WhichOneof("record")
        if (kind == "header") != (self._target is None):
            raise _invalid("it must begin with its only header")
        if kind == "header":
            self._target = await self._begin(wanted_id, record.header)
            return
        if kind == "item":
            await self._take_item(record.item)
            return
        await self._flush_items(is_all=True)
        if kind == "operation":
            await self._take_operation(record.operation)
        elif kind == "blob_chunk":
            await self._take_chunk(record.blob_chunk)
        else:
            self._end = record.end

    async def finish(self) -> str:
        """Show the session and return its ID."""
        target = self._require_target()
        self._require_blob_end()
        if self._end is None or self._end != self._counts:
            raise _invalid("it is not whole")
        await self._write(partial(_publish, target=target, head=self._head))
        self._is_done = True
        return target.session_id

    async def abandon(self) -> None:
        """Remove what was written so far, where the import is not finished; may be called always."""
        if self._target is not None and not self._is_done:
            self._is_done = True
            await self._write(partial(_discard, session_key=self._target.session_key))

    async def _begin(self, wanted_id: str, header: store_pb2.ExportHeader) -> _Target:
        if header.export_version != EXPORT_VERSION:
            raise UnsupportedError(
                f"the export has version {header.export_version}; this release reads {EXPORT_VERSION}",
                reason="UNSUPPORTED_EXPORT_VERSION",
                metadata={"found": str(header.export_version), "supported": str(EXPORT_VERSION)},
            )
        if not 1 <= header.session.format_version <= SESSION_FORMAT_VERSION:
            raise UnsupportedError(
                f"the exported session has format {header.session.format_version}; this release reads up to"
                f" {SESSION_FORMAT_VERSION}",
                reason="UNSUPPORTED_SESSION_VERSION",
                metadata={"found": str(header.session.format_version), "supported": str(SESSION_FORMAT_VERSION)},
            )
        session_id = wanted_id or header.session.session_id
        validation.check_session_id(session_id)
        _check_counter(header.session.epoch, "header.session.epoch")
        _check_counter(header.revision, "header.revision")
        validation.check_timestamp(header.session.create_time, "header.session.create_time")
        begin = partial(_insert_hidden, session_id=session_id, session_uid=self._session_uid, header=header)
        session_key = await self._write(partial(begin, now=self._clock.now()))
        return _Target(session_key=session_key, session_id=session_id, session_uid=self._session_uid, header=header)

    async def _take_item(self, item: item_pb2.Item) -> None:
        if self._counts.operations or self._counts.blobs or self._blob is not None:
            raise _invalid("items must come before operations and blobs")
        place = f"item {item.sequence} of the export"
        records.check_item_version(item, place)
        validation.check_item(item, place)
        self._waiting.append(item)
        self._waiting_bytes += item.ByteSize()
        self._counts.items += 1
        if self._waiting_bytes > _STEP_BYTES or len(self._waiting) > _STEP_RECORDS:
            await self._flush_items(is_all=False)

    async def _flush_items(self, *, is_all: bool) -> None:
        """Write waiting items, commit by commit; the last commit may not have come whole yet."""
        commits = [list(items) for _, items in groupby(self._waiting, key=lambda item: item.revision)]
        kept = [] if is_all or not commits else commits.pop()
        if not commits:
            return
        target = self._require_target()
        step = partial(_write_items, target=target, head=self._head, commits=commits)
        self._head = await self._write(partial(step, now=self._clock.now()))
        self._waiting = kept
        self._waiting_bytes = sum(item.ByteSize() for item in kept)

    async def _take_operation(self, operation: operation_pb2.Operation) -> None:
        target = self._require_target()
        if self._counts.blobs or self._blob is not None:
            raise _invalid("operations must come before blobs")
        place = f"operation {operation.operation_id[:140]!r} of the export"
        records.check_operation_version(operation, place)
        validation.check_operation(operation, operation.session_id, place)
        _check_counter(operation.step, f"{place}.step")
        ended = _ended(operation, target.session_id, self._clock.now())
        step = partial(_write_operation, target=target, head=self._head, operation=ended)
        await self._write(partial(step, now=self._clock.now()))
        self._counts.operations += 1

    async def _take_chunk(self, chunk: store_pb2.BlobChunk) -> None:
        target = self._require_target()
        if self._blob is None or self._blob.blob.digest != chunk.blob.digest:
            self._require_blob_end()
            validation.check_blob_ref(chunk.blob, "blob_chunk.blob")
            self._blob = _PartialBlob(chunk)
            self._counts.blobs += 1
        blob = self._blob
        is_piece = len(chunk.data) == min(BLOB_CHUNK_BYTES, blob.blob.size_bytes - blob.size_bytes)
        if chunk.offset != blob.size_bytes or not is_piece:
            raise _invalid(f"blob {chunk.blob.digest} has an unexpected piece at {chunk.offset}")
        blob.hasher.update(chunk.data)
        blob.size_bytes += len(chunk.data)
        await self._write(partial(_write_chunk, session_key=target.session_key, chunk=chunk))

    def _require_blob_end(self) -> None:
        blob = self._blob
        if blob is None:
            return
        if blob.size_bytes != blob.blob.size_bytes or blob.hasher.hexdigest() != blob.blob.digest:
            problem = f"the export's blob {blob.blob.digest} does not fit its content"
            raise InvalidArgumentError(problem, reason="DIGEST_MISMATCH", metadata={"digest": blob.blob.digest})
        self._blob = None

    def _require_target(self) -> _Target:
        if self._target is None:
            raise _invalid("it is empty")
        return self._target

    async def _write(self, function: Callable[[Connection], T]) -> T:
        return await self._writer.write(function)


async def import_session(
    writer: Writer, clock: Clock, session_uid: str, requests: AsyncIterator[store_pb2.ImportSessionRequest]
) -> str:
    """Take in an export and return the new session's ID; all or nothing."""
    running = Import(writer, clock, session_uid)
    try:
        async for request in requests:
            await running.take(request)
        return await running.finish()
    finally:
        await running.abandon()


def _invalid(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"the export cannot be imported: {problem}", reason="INVALID_EXPORT")


def _check_counter(value: int, field: str) -> None:
    if value > _MAX_COUNTER:
        validation.refuse("INVALID_NUMBER", field, f"must be at most {_MAX_COUNTER}, got {value}")


def _insert_hidden(
    connection: Connection,
    session_id: str,
    session_uid: str,
    header: store_pb2.ExportHeader,
    now: datetime,
) -> int:
    sessions.check_unused(connection, session_id)
    record = session_pb2.Session(
        requested_settings=header.session.requested_settings,
        initial_settings=header.session.initial_settings,
        create_time=header.session.create_time,
    )
    new = sessions.NewSession(
        # No session's ID holds a slash: the row can't be found until it is shown.
        session_id=f"import/{session_uid}",
        session_uid=session_uid,
        record=record,
        rest=sessions.idle_rest(now),
        visibility=rows.IMPORTING,
        # A manager refuses an epoch lower than one that it has seen of this session.
        epoch=header.session.epoch,
    )
    return sessions.insert(connection, new, now)


def _write_items(
    connection: Connection, target: _Target, head: Head, commits: list[list[item_pb2.Item]], now: datetime
) -> Head:
    for items in commits:
        request = store_pb2.CommitRequest(items=items)
        facts = read_facts(connection, target.session_key, needs_of(request), is_fork=False)
        plan = plan_import(head, facts, items)
        if items[-1].sequence != plan.head.last_sequence or items[-1].revision > target.header.revision:
            raise _invalid(f"item {items[-1].sequence} has no place in the history")
        insert_items(connection, target.session_key, items)
        write_plan(connection, target.session_key, items[0].revision, plan)
        _expect_blobs(connection, target.session_key, plan.blob_references, now)
        head = plan.head
    connection.execute(
        "UPDATE sessions SET last_sequence = ? WHERE session_key = ?", (head.last_sequence, target.session_key)
    )
    _note_version(
        connection, target, "max_item_version", max(item.schema_version for items in commits for item in items)
    )
    write_head(connection, target.session_key, head)
    return head


def _expect_blobs(connection: Connection, session_key: int, references: dict[str, int], now: datetime) -> None:
    """Make rows without size for blobs that must come."""
    connection.executemany(
        "INSERT INTO blobs (session_key, digest, media_type, put_time_us, reference_sequence)"
        " VALUES (?, ?, '', ?, ?) ON CONFLICT DO NOTHING",
        [(session_key, digest, rows.microseconds(now), sequence) for digest, sequence in references.items()],
    )


def _ended(operation: operation_pb2.Operation, session_id: str, now: datetime) -> operation_pb2.Operation:
    """Return an operation as it is imported: under the new session, and ended where it was not."""
    ended = operation_pb2.Operation()
    ended.CopyFrom(operation)
    ended.session_id = session_id
    if operation.status not in TERMINAL_STATUSES:
        was_sent = operation.instance_id != ""
        ended.status = (
            operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN if was_sent else operation_pb2.OPERATION_STATUS_CANCELED
        )
        ended.step += 1
        ended.end_time.CopyFrom(timestamp(now))
        ended.error.reason = "NOT_CARRIED_OVER"
        ended.error.message = "The session was moved to another store while this was under way."
    return ended


def _write_operation(
    connection: Connection,
    target: _Target,
    head: Head,
    operation: operation_pb2.Operation,
    now: datetime,
) -> None:
    if (
        operation.call_id
        and not connection.execute(
            "SELECT 1 FROM calls WHERE session_key = ? AND call_id = ?", (target.session_key, operation.call_id)
        ).fetchone()
    ):
        raise _invalid(f"operation {operation.operation_id!r} belongs to an unknown call")
    record = operation.SerializeToString()
    values: tuple[Any, ...] = (
        target.session_key,
        operation.operation_id,
        operation.type,
        operation.type_version,
        operation.status,
        operation.step,
        operation.call_id,
        target.header.revision,
        # A call that is open is closed when the session is shown; without a call an outcome stays of interest.
        bool(operation.call_id),
        record,
        operation_checksum(target.session_key, operation.operation_id, target.header.revision, record),
    )
    inserted = connection.execute(
        "INSERT INTO operations (session_key, operation_id, type, type_version, status, step, call_id, revision,"
        " is_settled, record, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
        values,
    )
    if inserted.rowcount == 0:
        raise _invalid(f"operation {operation.operation_id!r} occurs twice")
    _note_version(connection, target, "max_operation_version", operation.schema_version)
    references = {blob.digest: head.last_sequence for blob in blobs_in(operation)}
    _expect_blobs(connection, target.session_key, references, now)


def _write_chunk(connection: Connection, session_key: int, chunk: store_pb2.BlobChunk) -> None:
    row = connection.execute(
        "UPDATE blobs SET size_bytes = ?, media_type = ? WHERE session_key = ? AND digest = ? RETURNING blob_key",
        (chunk.blob.size_bytes, chunk.blob.media_type, session_key, chunk.blob.digest),
    ).fetchone()
    if row is None:
        raise _invalid(f"nothing names blob {chunk.blob.digest}")
    if chunk.data:
        insert_chunk(connection, row[0], chunk.offset, chunk.data)


def _publish(connection: Connection, target: _Target, head: Head) -> None:
    """Close what is open and show the session."""
    sessions.check_unused(connection, target.session_id)
    missing = connection.execute(
        "SELECT digest FROM blobs WHERE session_key = ? AND size_bytes IS NULL", (target.session_key,)
    ).fetchone()
    if missing is not None:
        raise _invalid(f"blob {missing[0]} is missing")
    now = rows.instant_of(_update_time_us(connection, target.session_key))
    found = connection.execute(
        "SELECT turn_id, call_id FROM calls WHERE session_key = ? AND final_sequence = 0"
        " ORDER BY response_sequence, first_status_sequence",
        (target.session_key,),
    )
    open_calls = [OpenCall(turn_id=turn_id, call_id=call_id) for turn_id, call_id in found]
    revision = target.header.revision + 1
    items = closing_items(open_calls, head.last_sequence, revision, now)
    insert_items(connection, target.session_key, items)
    connection.executemany(
        "UPDATE calls SET final_sequence = ? WHERE session_key = ? AND call_id = ?",
        [(item.sequence, target.session_key, item.tool_call_status.call_id) for item in items],
    )
    rest = target.header.session.rest
    if open_calls or rest.state != session_pb2.REST_STATE_AT_REST:
        rest = sessions.idle_rest(now)
    connection.execute(
        "UPDATE sessions SET visibility = ?, session_id = ?, revision = ?, last_sequence = ?, is_turn_open = 0,"
        " rest = ?, session_state = ? WHERE session_key = ?",
        (
            rows.VISIBLE,
            target.session_id,
            revision if items else target.header.revision,
            head.last_sequence + len(items),
            rest.SerializeToString(),
            rest.session_state,
            target.session_key,
        ),
    )
    _note_version(connection, target, "max_item_version", max((item.schema_version for item in items), default=0))


def _note_version(connection: Connection, target: _Target, column: str, version: int) -> None:
    """Raise the highest version that is written in the session."""
    connection.execute(
        f"UPDATE sessions SET {column} = ?1 WHERE session_key = ?2 AND {column} < ?1", (version, target.session_key)
    )


def _update_time_us(connection: Connection, session_key: int) -> int:
    (time_us,) = connection.execute(
        "SELECT update_time_us FROM sessions WHERE session_key = ?", (session_key,)
    ).fetchone()
    return int(time_us)


def _discard(connection: Connection, session_key: int) -> None:
    connection.execute("UPDATE sessions SET needs_purge = 1 WHERE session_key = ?", (session_key,))
