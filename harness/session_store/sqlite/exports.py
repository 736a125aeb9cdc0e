"""Streams a session as one consistent revision. Reads only."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from harness.session_store import BLOB_CHUNK_BYTES
from harness.session_store.sqlite import rows
from harness.session_store.sqlite.blobs import StoredBlob, damaged_blob, read_chunk
from harness.session_store.sqlite.connections import connect, translated_errors
from harness.session_store.sqlite.reads import StoredOperation, decode_item, decode_operation, stored_items
from harness.session_store.sqlite.storage_errors import storage_error
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

T = TypeVar("T")

EXPORT_VERSION: Final = 1
# Records of one message; with a piece of a blob as the unit it stays under the 1 MiB of one message.
_MESSAGE_BYTES: Final = BLOB_CHUNK_BYTES
_PAGE: Final = 500

Read = Callable[[Callable[[sqlite3.Connection], T]], T]


class Snapshot:
    """One state of the file, for as long as it is held: a connection and a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session-store-export")
        self._connection: sqlite3.Connection | None = None

    async def read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function on the state that the first read saw."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read, function)

    def _read(self, function: Callable[[sqlite3.Connection], T]) -> T:
        try:
            if self._connection is None:
                self._connection = connect(self._path, is_writer=False)
                self._connection.execute("BEGIN")
            with translated_errors(self._connection, str(self._path)):
                return function(self._connection)
        except sqlite3.Error as err:
            raise storage_error(err, str(self._path)) from err

    def close(self) -> None:
        """Let go of the state once a read in progress has ended."""
        self._thread.submit(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


@asynccontextmanager
async def snapshot(path: Path) -> AsyncIterator[Snapshot]:
    """Hold one state of the file."""
    held = Snapshot(path)
    try:
        yield held
    finally:
        held.close()


async def export(
    path: Path, session_id: str, is_alive: rows.OwnerCheck
) -> AsyncGenerator[store_pb2.ExportSessionResponse]:
    """Yield a session's records: header, items, operations, blobs, end."""
    async with snapshot(path) as state:
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


def _header(
    connection: sqlite3.Connection, row: rows.SessionRow, is_alive: rows.OwnerCheck
) -> store_pb2.ExportSessionResponse:
    session = rows.to_session(row, rows.read_record(connection, row), is_alive)
    header = store_pb2.ExportHeader(export_version=EXPORT_VERSION, session=session, revision=row.revision)
    return store_pb2.ExportSessionResponse(records=[store_pb2.ExportRecord(header=header)])


def _items(
    connection: sqlite3.Connection, row: rows.SessionRow, after_sequence: int
) -> store_pb2.ExportSessionResponse:
    page = store_pb2.ExportSessionResponse()
    total_bytes = 0
    for stored in stored_items(connection, row, after_sequence):
        total_bytes += len(stored.record)
        if page.records and (total_bytes > _MESSAGE_BYTES or len(page.records) == _PAGE):
            break
        page.records.add(item=decode_item(row, stored))
    return page


def _operations(
    connection: sqlite3.Connection, row: rows.SessionRow, after_key: int
) -> tuple[store_pb2.ExportSessionResponse, int]:
    found = connection.execute(
        "SELECT operation_key, operation_id, revision, record, checksum FROM operations"
        " WHERE session_key = ? AND operation_key > ? ORDER BY operation_key",
        (row.session_key, after_key),
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


def _blobs(connection: sqlite3.Connection, row: rows.SessionRow) -> list[StoredBlob]:
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


def _chunk(connection: sqlite3.Connection, stored: StoredBlob, offset_bytes: int) -> store_pb2.ExportSessionResponse:
    data = read_chunk(connection, stored.blob_key, offset_bytes)
    if data is None and stored.blob.size_bytes:
        raise damaged_blob(stored.blob.digest)
    chunk = store_pb2.BlobChunk(blob=stored.blob, offset=offset_bytes, data=data or b"")
    return store_pb2.ExportSessionResponse(records=[store_pb2.ExportRecord(blob_chunk=chunk)])
