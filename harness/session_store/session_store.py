"""Contract of the session store: append-only history and operation state of sessions.

Owns durable truth and enforces every invariant of a history whoever calls; it decides nothing, calls no model and
starts no operation. Messages are those of `sessionstore/v1`; their comments are the specification. A message that is
passed in or handed out is never mutated by either side.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

SESSION_FORMAT_VERSION = 1
ITEM_SCHEMA_VERSION = 1
INPUT_SCHEMA_VERSION = 1
OPERATION_SCHEMA_VERSION = 1

MAX_INLINE_TEXT_BYTES = 64 * 1024
"""Texts above this are stored as blobs."""

BLOB_CHUNK_BYTES = 512 * 1024
"""Largest piece of a blob in one message."""


class SessionStore(Protocol):
    """Sessions, their items, operations, blobs and leases.

    Every method that takes a request raises `harness.errors` classes with the reasons named in the service's comments.
    A caller that is cancelled leaves either the whole effect or none; repeating the call with the same ID tells which.
    Async iterators end their work when they are closed.
    """

    async def get_server_info(self, request: store_pb2.GetServerInfoRequest) -> store_pb2.GetServerInfoResponse:
        """Say who answers and which versions are read and written."""
        ...

    async def create_session(self, request: store_pb2.CreateSessionRequest) -> store_pb2.CreateSessionResponse:
        """Make a session; idempotent by session ID."""
        ...

    async def get_session(self, request: store_pb2.GetSessionRequest) -> store_pb2.GetSessionResponse:
        """Return one session."""
        ...

    async def list_sessions(self, request: store_pb2.ListSessionsRequest) -> store_pb2.ListSessionsResponse:
        """Return a page of sessions by ID; costs the page."""
        ...

    async def delete_session(self, request: store_pb2.DeleteSessionRequest) -> store_pb2.DeleteSessionResponse:
        """Delete a session; idempotent."""
        ...

    async def fork_session(self, request: store_pb2.ForkSessionRequest) -> store_pb2.ForkSessionResponse:
        """Make a session that refers to a prefix of another."""
        ...

    async def commit(self, request: store_pb2.CommitRequest) -> store_pb2.CommitResponse:
        """Write items, operations and rest of one session, all or nothing; idempotent by commit ID."""
        ...

    async def list_items(self, request: store_pb2.ListItemsRequest) -> store_pb2.ListItemsResponse:
        """Return a page of items in sequence; costs the page."""
        ...

    async def list_operations(self, request: store_pb2.ListOperationsRequest) -> store_pb2.ListOperationsResponse:
        """Return a page of a session's own operations in their newest state; a fork inherits none."""
        ...

    def watch_session(self, request: store_pb2.WatchSessionRequest) -> AsyncIterator[store_pb2.WatchSessionResponse]:
        """Yield every change after a revision, for ever; without polling.

        The first message comes at once, also where nothing is new: with `is_current` it says that there is no more.
        Ends with `is_deleted`, or with UNAVAILABLE/STORE_CLOSED.
        """
        ...

    def watch_runnable(self, request: store_pb2.WatchRunnableRequest) -> AsyncIterator[store_pb2.WatchRunnableResponse]:
        """Yield offers of sessions that are unowned and working or due.

        Registers the incarnation as `renew_lease` does, with the default lease.
        """
        ...

    async def acquire_lease(self, request: store_pb2.AcquireLeaseRequest) -> store_pb2.AcquireLeaseResponse:
        """Bind a session to an incarnation under a new epoch.

        An incarnation that holds the session already gets its epoch again, and until its first commit also the news of
        the takeover: a repetition after a lost answer loses nothing.
        """
        ...

    async def renew_lease(self, request: store_pb2.RenewLeaseRequest) -> store_pb2.RenewLeaseResponse:
        """Keep all sessions of an incarnation."""
        ...

    async def release_lease(self, request: store_pb2.ReleaseLeaseRequest) -> store_pb2.ReleaseLeaseResponse:
        """Give one session, or all of an incarnation's, back; idempotent."""
        ...

    def export_session(self, request: store_pb2.ExportSessionRequest) -> AsyncIterator[store_pb2.ExportSessionResponse]:
        """Yield one consistent revision of a session."""
        ...

    async def import_session(
        self, requests: AsyncIterator[store_pb2.ImportSessionRequest]
    ) -> store_pb2.ImportSessionResponse:
        """Make a session from an export, all or nothing."""
        ...

    async def put_blob(self, requests: AsyncIterator[store_pb2.PutBlobRequest]) -> store_pb2.PutBlobResponse:
        """Store a blob for a session; idempotent by content."""
        ...

    def get_blob(self, request: store_pb2.GetBlobRequest) -> AsyncIterator[store_pb2.GetBlobResponse]:
        """Yield a blob in pieces."""
        ...

    async def create_token(self, request: store_pb2.CreateTokenRequest) -> store_pb2.CreateTokenResponse:
        """Make a client token; only its hash is kept."""
        ...

    async def list_tokens(self, request: store_pb2.ListTokensRequest) -> store_pb2.ListTokensResponse:
        """Return a page of tokens without their secrets."""
        ...

    async def revoke_token(self, request: store_pb2.RevokeTokenRequest) -> store_pb2.RevokeTokenResponse:
        """Revoke a token; idempotent."""
        ...

    def watch_tokens(self, request: store_pb2.WatchTokensRequest) -> AsyncIterator[store_pb2.WatchTokensResponse]:
        """Yield the valid tokens, then each change."""
        ...

    async def aclose(self) -> None:
        """Finish commits in flight, end watches and give everything back; may be called twice."""
        ...


async def put_blob_bytes(store: SessionStore, session_id: str, blob: llm_pb2.BlobRef, data: bytes) -> None:
    """Store `data` as the blob that `blob` names."""

    async def frames() -> AsyncIterator[store_pb2.PutBlobRequest]:
        yield store_pb2.PutBlobRequest(session_id=session_id, blob=blob, data=data[:BLOB_CHUNK_BYTES])
        for offset in range(BLOB_CHUNK_BYTES, len(data), BLOB_CHUNK_BYTES):
            yield store_pb2.PutBlobRequest(data=data[offset : offset + BLOB_CHUNK_BYTES])

    await store.put_blob(frames())


async def get_blob_bytes(store: SessionStore, session_id: str, digest: str) -> bytes:
    """Return a blob as a whole; the caller knows that it is small enough."""
    request = store_pb2.GetBlobRequest(session_id=session_id, digest=digest)
    return b"".join([frame.data async for frame in store.get_blob(request)])
