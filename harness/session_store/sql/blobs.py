"""Stores and reads blobs: content by SHA-256, per session, in pieces.

A blob that no commit names lives 24 hours. The functions run on the writer's or a reader's thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from harness.errors import DataLossError, NotFoundError
from harness.session_store import BLOB_CHUNK_BYTES, records, validation
from harness.session_store.sql import rows
from harness.session_store.sql.facts import find_blob
from harness.session_store.sql.sql import Connection, Reader
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

UNREFERENCED_LIFE_US: Final = 24 * 3600 * 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A blob that was received whole and is what its reference says."""

    session_id: str
    blob: llm_pb2.BlobRef
    data: bytearray


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlob:
    """Where a readable blob lies."""

    blob_key: int
    blob: llm_pb2.BlobRef


async def receive(requests: AsyncIterator[store_pb2.PutBlobRequest]) -> Upload:
    """Take in a blob; holds it in memory, within `validation.MAX_BLOB_BYTES`.

    Raises:
        InvalidArgumentError: INVALID_BLOB; UNKNOWN_FIELDS; DIGEST_MISMATCH where the content is not what the reference
            says.
    """
    session_id, blob = "", None
    hasher = hashlib.sha256()
    data = bytearray()
    async for request in requests:
        records.check_fields_known(request, "the request")
        if blob is None:
            validation.check_blob_ref(request.blob, "blob")
            session_id, blob = request.session_id, request.blob
        if len(request.data) > BLOB_CHUNK_BYTES:
            validation.refuse("INVALID_BLOB", "data", f"must have at most {BLOB_CHUNK_BYTES} bytes a frame")
        hasher.update(request.data)
        data += request.data
        if len(data) > blob.size_bytes:
            break
    if blob is None:
        validation.refuse("INVALID_BLOB", "blob", "must be named by the first frame; there was none")
    if len(data) != blob.size_bytes or hasher.hexdigest() != blob.digest:
        problem = f"does not fit the content: {len(data)} bytes with digest {hasher.hexdigest()}"
        validation.refuse("DIGEST_MISMATCH", "blob", problem)
    return Upload(session_id=session_id, blob=blob, data=data)


def put(connection: Connection, upload: Upload, time_us: int) -> None:
    """Store a blob for a session, or let the one that is there live on."""
    row = rows.find(connection, upload.session_id)
    known = connection.execute(
        "UPDATE blobs SET put_time_us = ? WHERE session_key = ? AND digest = ? RETURNING blob_key",
        (time_us, row.session_key, upload.blob.digest),
    ).fetchone()
    if known is not None:
        return
    (blob_key,) = connection.execute(
        "INSERT INTO blobs (session_key, digest, size_bytes, media_type, put_time_us) VALUES (?, ?, ?, ?, ?)"
        " RETURNING blob_key",
        (row.session_key, upload.blob.digest, upload.blob.size_bytes, upload.blob.media_type, time_us),
    ).fetchone()
    # Pieces of one size, whatever the frames were, so that readers know where each begins.
    for offset_bytes in range(0, len(upload.data), BLOB_CHUNK_BYTES):
        insert_chunk(
            connection, blob_key, offset_bytes, bytes(upload.data[offset_bytes : offset_bytes + BLOB_CHUNK_BYTES])
        )


def insert_chunk(connection: Connection, blob_key: int, offset_bytes: int, data: bytes) -> None:
    """Store one piece of a blob."""
    connection.execute(
        "INSERT INTO blob_chunks (blob_key, offset_bytes, data) VALUES (?, ?, ?)", (blob_key, offset_bytes, data)
    )


def find(connection: Connection, session_id: str, digest: str) -> StoredBlob:
    """Return a blob that a session can read, own or inherited: BLOB_NOT_FOUND."""
    row = rows.find(connection, session_id)
    found = find_blob(connection, row.session_key, digest)
    if found is None:
        raise _not_found(session_id, digest)
    size_bytes, blob_key, media_type = found
    blob = llm_pb2.BlobRef(digest=digest, size_bytes=size_bytes, media_type=media_type)
    return StoredBlob(blob_key=blob_key, blob=blob)


def read_chunk(connection: Connection, blob_key: int, offset_bytes: int) -> bytes | None:
    """Return the piece that begins at an offset; None where none does."""
    row = connection.execute(
        "SELECT data FROM blob_chunks WHERE blob_key = ? AND offset_bytes = ?", (blob_key, offset_bytes)
    ).fetchone()
    # Whatever a damaged file has in its place holds nothing of the content.
    return None if row is None else bytes(row[0]) if isinstance(row[0], (bytes, memoryview)) else b""


async def stream(readers: Reader, session_id: str, digest: str) -> AsyncIterator[store_pb2.GetBlobResponse]:
    """Yield a blob in pieces; holds one at a time."""
    stored = await readers.read(partial(find, session_id=session_id, digest=digest))
    offset_bytes = 0
    content = hashlib.sha256()
    while offset_bytes < stored.blob.size_bytes or offset_bytes == 0:
        chunk = await readers.read(partial(read_chunk, blob_key=stored.blob_key, offset_bytes=offset_bytes))
        if not chunk and stored.blob.size_bytes > 0:
            # Its session was deleted, or its 24 hours ended, in the middle; else this tells that it is there.
            await readers.read(partial(find, session_id=session_id, digest=digest))
            raise damaged_blob(digest)
        content.update(chunk or b"")
        if offset_bytes + len(chunk or b"") >= stored.blob.size_bytes and content.hexdigest() != digest:
            raise damaged_blob(digest)
        yield store_pb2.GetBlobResponse(blob=None if offset_bytes else stored.blob, data=chunk or b"")
        if not chunk:
            return
        offset_bytes += len(chunk)


def damaged_blob(digest: str) -> DataLossError:
    """Return what a reader gets of a blob whose content is not what its digest says."""
    return DataLossError(
        f"blob {digest} is damaged: its content is not what its digest says",
        reason="BLOB_DAMAGED",
        metadata={"digest": digest},
    )


def _not_found(session_id: str, digest: str) -> NotFoundError:
    return NotFoundError(
        f"session {session_id!r} has no blob {digest[:80]!r}",
        reason="BLOB_NOT_FOUND",
        metadata={"digest": digest[:80]},
    )
