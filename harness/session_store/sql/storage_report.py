"""Says what a session takes up in the file. Reads all of it, one record at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, cast

from harness.primitives.messages import find_messages
from harness.session_store.sql import rows
from harness.session_store.sql.reads import StoredItem, StoredOperation, decode_item, decode_operation
from harness.session_store.sql.sql import Connection
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import session_pb2

_INHERITED: Final = (
    "SELECT COUNT(*), coalesce(sum(length(record)), 0) FROM ancestors JOIN items"
    " ON items.session_key = ancestor_key AND sequence > after_sequence AND sequence <= through_sequence"
    " WHERE ancestors.session_key = ?"
)


def report(connection: Connection, session_id: str) -> session_pb2.SessionStorage:
    """Return what a session takes up; raises as reading it does."""
    row = rows.find(connection, session_id)
    storage = session_pb2.SessionStorage()
    storage.items.extend(_amounts(_item_sizes(connection, row)))
    storage.operations.extend(_amounts(_operation_sizes(connection, row, storage)))
    key = (row.session_key,)
    storage.inherited_items, storage.inherited_item_bytes = connection.execute(_INHERITED, key).fetchone()
    storage.blobs, storage.blob_bytes, storage.unnamed_blobs = connection.execute(
        "SELECT COUNT(*), coalesce(sum(size_bytes), 0), COUNT(*) FILTER (WHERE reference_sequence IS NULL)"
        " FROM blobs WHERE session_key = ?",
        key,
    ).fetchone()
    storage.forks, through = connection.execute(
        "SELECT COUNT(DISTINCT session_key), coalesce(max(through_sequence), 0) FROM ancestors WHERE ancestor_key = ?",
        key,
    ).fetchone()
    storage.shared_items, item_bytes = connection.execute(
        "SELECT COUNT(*), coalesce(sum(length(record)), 0) FROM items WHERE session_key = ? AND sequence <= ?",
        (row.session_key, through),
    ).fetchone()
    (blob_bytes,) = connection.execute(
        "SELECT coalesce(sum(size_bytes), 0) FROM blobs WHERE session_key = ? AND reference_sequence <= ? AND ? > 0",
        (row.session_key, through, through),
    ).fetchone()
    storage.shared_bytes = item_bytes + blob_bytes
    return storage


def _amounts(sizes: Iterable[tuple[str, int]]) -> list[session_pb2.StoredAmount]:
    amounts: dict[str, session_pb2.StoredAmount] = {}
    for kind, size in sizes:
        amount = amounts.setdefault(kind, session_pb2.StoredAmount(kind=kind))
        amount.count += 1
        amount.bytes += size
    return [amounts[kind] for kind in sorted(amounts)]


def _item_sizes(connection: Connection, row: rows.SessionRow) -> Iterator[tuple[str, int]]:
    found = connection.execute(
        "SELECT session_key, sequence, revision, record, checksum FROM items WHERE session_key = ?", (row.session_key,)
    )
    for stored in map(StoredItem._make, found):
        yield decode_item(row, stored).WhichOneof("item") or "", len(stored.record)


def _operation_sizes(
    connection: Connection, row: rows.SessionRow, storage: session_pb2.SessionStorage
) -> Iterator[tuple[str, int]]:
    """Yield type and size of each operation; adds its output files to the report."""
    found = connection.execute(
        "SELECT operation_id, revision, record, checksum FROM operations WHERE session_key = ?", (row.session_key,)
    )
    for stored in map(StoredOperation._make, found):
        operation = decode_operation(row, stored)
        for output in _outputs(operation):
            storage.output_files += 1
            storage.output_bytes += output.total_bytes
        yield operation.type, len(stored.record)


def _outputs(operation: operation_pb2.Operation) -> Iterator[operation_pb2.CapturedOutput]:
    # find_messages yields messages of the type asked for.
    found = cast(
        "Iterable[operation_pb2.CapturedOutput]",
        find_messages(operation, operation_pb2.CapturedOutput.DESCRIPTOR),
    )
    return (output for output in found if output.path)
