"""Reads pages of items, operations and changes by index. What a page costs depends on its size alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from harness.errors import DataLossError, NotFoundError, OutOfRangeError
from harness.session_store import records, validation
from harness.session_store.sql import rows
from harness.session_store.sql.checksums import check, item_checksum, operation_checksum
from harness.session_store.sql.facts import find_input
from harness.session_store.sql.sql import Connection
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

PAGE_BYTES: Final = 4 * 1024 * 1024
DEFAULT_PAGE: Final = 256
_MAX_PAGE: Final = 1_000

_PIECE: Final = 100
"""Rows of one statement."""


class StoredItem(NamedTuple):
    """An item as it lies in the file."""

    owner_key: int
    """Whose row it is: the session's, or an ancestor's."""

    sequence: int
    revision: int
    record: bytes
    checksum: int | None


class StoredOperation(NamedTuple):
    """An operation as it lies in the file."""

    operation_id: str
    revision: int
    record: bytes
    checksum: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a watcher has come."""

    sequence: int
    revision: int


def stored_items(connection: Connection, row: rows.SessionRow, after_sequence: int) -> Iterator[StoredItem]:
    """Yield a session's items behind a sequence, inherited ones included, as they are asked for.

    Raises:
        DataLossError: HISTORY_DAMAGED, one is missing. What stands before it was yielded; nothing behind it ever is,
            so that no history is shortened unnoticed.
    """
    expected = after_sequence + 1
    for part in rows.item_ranges(connection, row, after_sequence):
        for sequence, revision, record, checksum in _items_of(connection, part):
            if sequence != expected:
                raise missing_item(row, expected)
            yield StoredItem(part.session_key, sequence, revision, record, checksum)
            expected += 1
    if expected <= row.last_sequence:
        raise missing_item(row, expected)


def _items_of(connection: Connection, part: rows.ItemRange) -> Iterator[tuple[int, int, bytes, int | None]]:
    """Yield a range's rows, piece by piece: some engines hand out a statement's rows only all together."""
    after_sequence = part.after_sequence
    while True:
        found = connection.execute(
            "SELECT sequence, revision, record, checksum FROM items"
            " WHERE session_key = ? AND sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?",
            (part.session_key, after_sequence, part.through_sequence, _PIECE),
        )
        count = 0
        for columns in found:
            yield columns
            after_sequence = columns[0]
            count += 1
        if count < _PIECE:
            return


def missing_item(row: rows.SessionRow, sequence: int) -> DataLossError:
    """Return what a reader gets in whose way an item is missing that the session's row counts."""
    return DataLossError(
        f"item {sequence} of session {row.session_id!r} is missing, its last is {row.last_sequence}",
        reason="HISTORY_DAMAGED",
        metadata={"session_id": row.session_id, "sequence": str(sequence)},
    )


def decode_item(row: rows.SessionRow, stored: StoredItem) -> item_pb2.Item:
    """Return a stored item in the current version; raises RECORD_CORRUPT where it is not what was written."""
    place = f"item {stored.sequence} of session {row.session_id!r}"
    found = item_checksum(stored.owner_key, stored.sequence, stored.revision, stored.record)
    check(found, stored.checksum, place)
    return records.decode_item(stored.record, place)


def list_items(connection: Connection, request: store_pb2.ListItemsRequest) -> store_pb2.ListItemsResponse:
    """Return a page of items in sequence."""
    row = rows.find(connection, request.session_id)
    if request.input_id:
        return _item_of_input(connection, row, request)
    size = min(request.page_size or DEFAULT_PAGE, _MAX_PAGE)
    response = store_pb2.ListItemsResponse(next_after_sequence=request.after_sequence)
    total_bytes = 0
    for stored in stored_items(connection, row, min(request.after_sequence, validation.MAX_INTEGER)):
        total_bytes += len(stored.record)
        if len(response.items) == size or (response.items and total_bytes > PAGE_BYTES):
            response.more = True
            break
        response.items.append(decode_item(row, stored))
        response.next_after_sequence = stored.sequence
    return response


def _item_of_input(
    connection: Connection, row: rows.SessionRow, request: store_pb2.ListItemsRequest
) -> store_pb2.ListItemsResponse:
    found = find_input(connection, row.session_key, request.input_id)
    response = store_pb2.ListItemsResponse(next_after_sequence=request.after_sequence)
    if found is not None and found[1] > request.after_sequence:
        stored = next(stored_items(connection, row, found[1] - 1))
        response.items.append(decode_item(row, stored))
        response.next_after_sequence = stored.sequence
    return response


def list_operations(
    connection: Connection, request: store_pb2.ListOperationsRequest
) -> store_pb2.ListOperationsResponse:
    """Return a page of a session's own operations in the order in which they were made."""
    row = rows.find(connection, request.session_id)
    if request.operation_id:
        return _one_operation(connection, row, request.operation_id)
    is_unsettled = request.filter == store_pb2.OPERATION_FILTER_UNSETTLED
    size = min(request.page_size or DEFAULT_PAGE, _MAX_PAGE)
    found = connection.execute(
        "SELECT operation_key, operation_id, revision, record, checksum FROM operations"
        " WHERE session_key = ? AND operation_key > ?"
        f"{' AND is_settled = 0' if is_unsettled else ''} ORDER BY operation_key LIMIT ?",
        (row.session_key, page_number(request.page_token), size + 1),
    )
    response = store_pb2.ListOperationsResponse()
    total_bytes = 0
    last_key = 0
    for operation_key, *stored in found:
        operation = StoredOperation._make(stored)
        total_bytes += len(operation.record)
        if len(response.operations) == size or (response.operations and total_bytes > PAGE_BYTES):
            response.next_page_token = str(last_key)
            break
        response.operations.append(decode_operation(row, operation))
        last_key = operation_key
    return response


def page_number(token: str) -> int:
    """Return what a page token of ours holds: INVALID_PAGE_TOKEN where it is none."""
    if token and not (token.isascii() and token.isdecimal() and len(token) <= 18):
        validation.refuse("INVALID_PAGE_TOKEN", "page_token", "must come from the page before")
    return int(token or "0")


def _one_operation(connection: Connection, row: rows.SessionRow, operation_id: str) -> store_pb2.ListOperationsResponse:
    found = connection.execute(
        "SELECT operation_id, revision, record, checksum FROM operations WHERE session_key = ? AND operation_id = ?",
        (row.session_key, operation_id),
    ).fetchone()
    if found is None:
        raise NotFoundError(
            f"session {row.session_id!r} has no operation {operation_id[:140]!r}",
            reason="OPERATION_NOT_FOUND",
            metadata={"operation_id": operation_id[:140]},
        )
    return store_pb2.ListOperationsResponse(operations=[decode_operation(row, StoredOperation._make(found))])


def decode_operation(row: rows.SessionRow, stored: StoredOperation) -> operation_pb2.Operation:
    """Return one of a session's operations in the current version; raises RECORD_CORRUPT too."""
    place = f"operation {stored.operation_id!r} of session {row.session_id!r}"
    found = operation_checksum(row.session_key, stored.operation_id, stored.revision, stored.record)
    check(found, stored.checksum, place)
    return records.decode_operation(stored.record, place)


def cursor_at(connection: Connection, row: rows.SessionRow, revision: int) -> Cursor:
    """Return where a watcher that has seen everything up to a revision stands.

    Raises:
        OutOfRangeError: REVISION_AHEAD.
    """
    if revision > row.revision:
        raise OutOfRangeError(
            f"session {row.session_id!r} is at revision {row.revision}, the cursor is at {revision}",
            reason="REVISION_AHEAD",
            metadata={"revision": str(row.revision)},
        )
    # Revisions never fall with the sequence and sequences have no gaps, so bisecting needs no index of its own.
    low, high = 0, row.last_sequence
    if revision == row.revision:
        low = high
    while low < high:
        middle = (low + high + 1) // 2
        part = rows.range_of(connection, row, middle)
        if revision_of(connection, row, part.session_key, middle) <= revision:
            low = middle
        else:
            high = middle - 1
    return Cursor(sequence=low, revision=revision)


def revision_of(connection: Connection, row: rows.SessionRow, owner_key: int, sequence: int) -> int:
    """Return the revision of an item of a session, whose own or ancestor's row it is: HISTORY_DAMAGED."""
    found = connection.execute(
        "SELECT revision FROM items WHERE session_key = ? AND sequence = ?", (owner_key, sequence)
    ).fetchone()
    if found is None:
        raise missing_item(row, sequence)
    return int(found[0])


def read_changes(
    connection: Connection, row: rows.SessionRow, cursor: Cursor
) -> tuple[store_pb2.WatchSessionResponse, Cursor]:
    """Return the changes behind a cursor as far as a page goes, whole commits only, and the cursor behind them."""
    response = store_pb2.WatchSessionResponse()
    items, item_horizon = _items_behind(connection, row, cursor)
    operations, operation_horizon = _operations_behind(connection, row, cursor)
    horizon = min(item_horizon, operation_horizon)
    response.items.extend(decode_item(row, stored) for stored in items if stored.revision <= horizon)
    response.operations.extend(
        decode_operation(row, operation) for operation in operations if operation.revision <= horizon
    )
    response.revision = horizon
    response.is_current = horizon == row.revision
    if response.is_current:
        # What the rest was after an older commit is not kept.
        response.rest.CopyFrom(rows.rest_of(row))
    sequence = response.items[-1].sequence if response.items else cursor.sequence
    return response, Cursor(sequence=sequence, revision=horizon)


def _items_behind(connection: Connection, row: rows.SessionRow, cursor: Cursor) -> tuple[list[StoredItem], int]:
    """Return a page of items and the last revision of which it holds all items."""
    items: list[StoredItem] = []
    total_bytes = 0
    for stored in stored_items(connection, row, cursor.sequence):
        is_full = len(items) >= DEFAULT_PAGE or total_bytes >= PAGE_BYTES
        if is_full and stored.revision != items[-1].revision:
            return items, stored.revision - 1
        items.append(stored)
        total_bytes += len(stored.record)
    return items, row.revision


def _operations_behind(
    connection: Connection, row: rows.SessionRow, cursor: Cursor
) -> tuple[list[StoredOperation], int]:
    """Return a page of operations by revision and the last revision of which it holds all."""
    operations: list[StoredOperation] = []
    total_bytes = 0
    for operation in _operations_by_revision(connection, row, cursor.revision):
        is_full = len(operations) >= DEFAULT_PAGE or total_bytes >= PAGE_BYTES
        if is_full and operation.revision != operations[-1].revision:
            return operations, operation.revision - 1
        operations.append(operation)
        total_bytes += len(operation.record)
    return operations, row.revision


def _operations_by_revision(connection: Connection, row: rows.SessionRow, revision: int) -> Iterator[StoredOperation]:
    """Yield the operations behind a revision, piece by piece."""
    behind = (revision, validation.MAX_INTEGER)
    while True:
        found = connection.execute(
            "SELECT operation_key, operation_id, revision, record, checksum FROM operations"
            " WHERE session_key = ? AND (revision, operation_key) > (?, ?) ORDER BY revision, operation_key LIMIT ?",
            (row.session_key, *behind, _PIECE),
        )
        count = 0
        for operation_key, *stored in found:
            operation = StoredOperation._make(stored)
            yield operation
            behind = (operation.revision, operation_key)
            count += 1
        if count < _PIECE:
            return
