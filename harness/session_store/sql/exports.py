"""Streams a session as one consistent revision. Reads only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from typing import Final

from harness.session_store import BLOB_CHUNK_BYTES
from harness.session_store.sql import rows
from harness.session_store.sql.blobs import StoredBlob, damaged_blob, read_chunk
from harness.session_store.sql.reads import StoredOperation, decode_item, decode_operation, stored_items
from harness.session_store.sql.sql import Connection, Reader
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

EXPORT_VERSION: Final = 1
# Records of one message; with a piece of a blob as the unit it stays under the 1 MiB of one message.
_MESSAGE_BYTES: Final = BLOB_CHUNK_BYTES
_PAGE: Final = 500

_OwnerCheckOf = Callable[[Connection], rows.OwnerCheck]


async def export(
    state: Reader, session_id: str, is_alive: _OwnerCheckOf
) -> AsyncGenerator[store_pb2.ExportSessionResponse]:
    """Yield a session's records, all from one state: header, items, operations, blobs, end."""
    row = await state.read(partial(rows.find, session_id=session_id))
    yield await state.read(partial(_header, row=row, is_alive=is_alive))
    end = store_pb2.ExportEnd()
    while True:
        page = await state.read(partial(_items, row=row, after_sequence=end.items))
        if not page.records:
            break
        end.items += len(page.records)
        yield page
    last_key = 0
    while True:
        page, last_key = await state.read(partial(_operations, row=row, after_key=last_key))
        if not page.records:
            break
        end.operations += len(page.records)
        yield page
    for stored in await state.read(partial(_blobs, row=row)):
        end.blobs += 1
        for offset_bytes in _offsets(stored.blob.size_bytes):
            yield await state.read(partial(_chunk, stored=stored, offset_bytes=offset_bytes))
    yield store_pb2.ExportSessionResponse(records=[store_pb2.ExportRecord(end=end)])


def _offsets(size_bytes: int) -> Iterator[int]:
    from_start = range(0, size_bytes, BLOB_CHUNK_BYTES)
    # An empty blob is one empty piece.
    yield from from_start or (0,)


def _header(connection: Connection, row: rows.SessionRow, is_alive: _OwnerCheckOf) -> store_pb2.ExportSessionResponse:
    session = rows.to_session(row, rows.read_record(connection, row), is_alive(connection))
    header = store_pb2.ExportHeader(export_version=EXPORT_VERSION, session=session, revision=row.revision)
    return store_pb2.ExportSessionResponse(records=[store_pb2.ExportRecord(header=header)])


def _items(connection: Connection, row: rows.SessionRow, after_sequence: int) -> store_pb2.ExportSessionResponse:
    page = store_pb2.ExportSessionResponse()
    total_bytes = 0
    for stored in stored_items(connection, row, after_sequence):
        total_bytes += len(stored.record)
        if page.records and (total_bytes > _MESSAGE_BYTES or len(page.records) == _PAGE):
            break
        page.records.add(item=decode_item(row, stored))
    return page


def _operations(
    connection: Connection, row: rows.SessionRow, after_key: int
) -> tuple[store_pb2.ExportSessionResponse, int]:
    found = connection.execute(
        "SELECT operation_key, operation_id, revision, record, checksum FROM operations"
        " WHERE session_key = ? AND operation_key > ? ORDER BY operation_key LIMIT ?",
        (row.session_key, after_key, _PAGE),
    )
    page = store_pb2.ExportSessionResponse()
    total_bytes = 0
    for operation_key, *stored in found:
        operation = StoredOperation._make(stored)
        total_bytes += len(operation.record)
        if page.records and (total_bytes > _MESSAGE_BYTES or len(page.records) == _PAGE):
            break
        page.records.add(operation=decode_operation(row, operation))
        after_key = operation_key
    return page, after_key


def _blobs(connection: Connection, row: rows.SessionRow) -> list[StoredBlob]:
    """Return every referenced blob that the session can read, once."""
    found = connection.execute(
        "SELECT digest, size_bytes, media_type, blob_key FROM blobs"
        " WHERE session_key = ?1 AND reference_sequence IS NOT NULL"
        " UNION ALL SELECT digest, size_bytes, media_type, blob_key FROM ancestors JOIN blobs"
        " ON blobs.session_key = ancestor_key AND reference_sequence <= through_sequence"
        " WHERE ancestors.session_key = ?1",
        (row.session_key,),
    )
    blobs = {
        digest: StoredBlob(
            blob_key=blob_key, blob=llm_pb2.BlobRef(digest=digest, size_bytes=size_bytes, media_type=media_type)
        )
        for digest, size_bytes, media_type, blob_key in found
    }
    return [blobs[digest] for digest in sorted(blobs)]


def _chunk(connection: Connection, stored: StoredBlob, offset_bytes: int) -> store_pb2.ExportSessionResponse:
    data = read_chunk(connection, stored.blob_key, offset_bytes)
    if data is None and stored.blob.size_bytes:
        raise damaged_blob(stored.blob.digest)
    chunk = store_pb2.BlobChunk(blob=stored.blob, offset=offset_bytes, data=data or b"")
    return store_pb2.ExportSessionResponse(records=[store_pb2.ExportRecord(blob_chunk=chunk)])
