"""`RemoteSessionStore`: the session store of another process, behind the same protocol as a local one.

A lost connection is made up for wherever repeating is harmless: reads, requests with the caller's ID, commits. Watches
of sessions resume from their last revision without gap or repeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import grpc

from clients._rpc import calls
from clients._rpc.channel import open_channel
from clients._rpc.tls import ClientTls
from clients.session_store.commit_pipe import CommitPipe
from harness.errors import HarnessError, InvalidArgumentError, UnavailableError
from harness.primitives.streams import closing
from harness.primitives.task_groups import tasks_behind
from harness.session_store.validation import MAX_COMMIT_BYTES
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2_grpc as store_grpc

logger = logging.getLogger(__name__)

ResponseT = TypeVar("ResponseT")
RequestT = TypeVar("RequestT")

CALL_TIMEOUT_S: Final = 30.0
"""What a call may take, the way back of a restarted store included."""

TRANSFER_TIMEOUT_S: Final = 600.0
"""What an import may take."""

_CLOSE_S: Final = 5.0
"""What commits in flight may take when the store is closed."""


class RemoteSessionStore:
    """A session store over gRPC. Use it with `async with`.

    A lost store is waited for: each call up to `CALL_TIMEOUT_S`, a watch of a session for ever. What the protocol says
    of the iterators `watch_runnable` and `watch_tokens` includes that they end with UNAVAILABLE; so they do here.
    """

    def __init__(
        self,
        store: grpc.aio.Channel | str,
        *,
        token: str = "",
        tls: ClientTls | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Remember where the store is.

        Args:
            store: An address, or a channel, which stays the caller's to close.
            token: Bearer token, with an address.
            tls: For a TCP address; None: plain text.
            timeout_s: Of each call but transfers.
        """
        self._store = store
        self._token = token
        self._tls = tls
        self._timeout_s = timeout_s
        self._stack = AsyncExitStack()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        """Get ready; nothing is dialled before the first call."""
        await self._stack.enter_async_context(self._running())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Close."""
        return await self._stack.__aexit__(kind, error, trace)

    async def aclose(self) -> None:
        """Wait a moment for commits in flight, end the watches and hang up; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._pipe.wait_until_idle()
        except TimeoutError:
            logger.warning("closed with commits in flight")
        self._pipe.fail_all(_closed_error())
        if isinstance(self._store, str):
            await self._channel.close()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        is_own = isinstance(self._store, str)
        if isinstance(self._store, str):
            self._channel = open_channel(self._store, token=self._token, tls=self._tls)
        else:
            self._channel = self._store
        self._stub = store_grpc.SessionStoreServiceStub(self._channel)
        self._pipe = CommitPipe(self._stub.CommitStream)
        try:
            async with tasks_behind() as tasks:
                sending = tasks.create_task(self._pipe.run())
                try:
                    yield
                finally:
                    await self.aclose()
                    sending.cancel()
        finally:
            if is_own:
                await self._channel.close()

    async def get_server_info(self, request: store_pb2.GetServerInfoRequest) -> store_pb2.GetServerInfoResponse:
        return await self._call(self._stub.GetServerInfo, request)

    async def create_session(self, request: store_pb2.CreateSessionRequest) -> store_pb2.CreateSessionResponse:
        return await self._call(self._stub.CreateSession, request, is_idempotent=bool(request.session_id))

    async def get_session(self, request: store_pb2.GetSessionRequest) -> store_pb2.GetSessionResponse:
        return await self._call(self._stub.GetSession, request)

    async def list_sessions(self, request: store_pb2.ListSessionsRequest) -> store_pb2.ListSessionsResponse:
        return await self._call(self._stub.ListSessions, request)

    async def delete_session(self, request: store_pb2.DeleteSessionRequest) -> store_pb2.DeleteSessionResponse:
        return await self._call(self._stub.DeleteSession, request)

    async def fork_session(self, request: store_pb2.ForkSessionRequest) -> store_pb2.ForkSessionResponse:
        return await self._call(self._stub.ForkSession, request, is_idempotent=bool(request.session_id))

    async def commit(self, request: store_pb2.CommitRequest) -> store_pb2.CommitResponse:
        if request.ByteSize() > MAX_COMMIT_BYTES:
            # Before it is sent: the server would have to break the stream, which is not this session's alone.
            raise InvalidArgumentError(
                f"the commit must have at most {MAX_COMMIT_BYTES} bytes, got {request.ByteSize()}",
                reason="COMMIT_TOO_LARGE",
                metadata={"field": "the commit"},
            )
        self._check_open()
        return await self._pipe.commit(request, timeout_s=self._timeout_s)

    async def list_items(self, request: store_pb2.ListItemsRequest) -> store_pb2.ListItemsResponse:
        return await self._call(self._stub.ListItems, request)

    async def list_operations(self, request: store_pb2.ListOperationsRequest) -> store_pb2.ListOperationsResponse:
        return await self._call(self._stub.ListOperations, request)

    async def watch_session(
        self, request: store_pb2.WatchSessionRequest
    ) -> AsyncIterator[store_pb2.WatchSessionResponse]:
        cursor = store_pb2.WatchSessionRequest()
        cursor.CopyFrom(request)
        was_current = False
        pauses = calls.pauses_s()
        while True:
            try:
                async with closing(self._stream(self._stub.WatchSession, cursor)) as responses:
                    async for response in responses:
                        pauses = calls.pauses_s()
                        # After a break the store says again that there is nothing new.
                        if was_current and not response.is_deleted and response.revision == cursor.after_revision:
                            continue
                        cursor = store_pb2.WatchSessionRequest(
                            session_id=request.session_id, after_revision=response.revision
                        )
                        was_current = response.is_current
                        yield response
                        if response.is_deleted:
                            return
                error: HarnessError = UnavailableError("the store ended the watch", reason="WATCH_ENDED")
            except HarnessError as err:
                if self._is_closed or not (calls.is_gone(err) or err.reason == "FELL_BEHIND"):
                    raise
                error = err
            logger.warning(
                "watch resumed",
                extra={
                    "session_id": request.session_id,
                    "revision": cursor.after_revision,
                    "reason": error.reason,
                },
            )
            await asyncio.sleep(next(pauses))

    def watch_runnable(self, request: store_pb2.WatchRunnableRequest) -> AsyncIterator[store_pb2.WatchRunnableResponse]:
        return self._stream(self._stub.WatchRunnable, request)

    async def acquire_lease(self, request: store_pb2.AcquireLeaseRequest) -> store_pb2.AcquireLeaseResponse:
        return await self._call(self._stub.AcquireLease, request)

    async def renew_lease(self, request: store_pb2.RenewLeaseRequest) -> store_pb2.RenewLeaseResponse:
        return await self._call(self._stub.RenewLease, request)

    async def release_lease(self, request: store_pb2.ReleaseLeaseRequest) -> store_pb2.ReleaseLeaseResponse:
        return await self._call(self._stub.ReleaseLease, request)

    def export_session(self, request: store_pb2.ExportSessionRequest) -> AsyncIterator[store_pb2.ExportSessionResponse]:
        return self._stream(self._stub.ExportSession, request)

    async def import_session(
        self, requests: AsyncIterator[store_pb2.ImportSessionRequest]
    ) -> store_pb2.ImportSessionResponse:
        return await self._send(self._stub.ImportSession, requests, timeout_s=TRANSFER_TIMEOUT_S)

    async def put_blob(self, requests: AsyncIterator[store_pb2.PutBlobRequest]) -> store_pb2.PutBlobResponse:
        return await self._send(self._stub.PutBlob, requests, timeout_s=self._timeout_s)

    async def get_blob(self, request: store_pb2.GetBlobRequest) -> AsyncIterator[store_pb2.GetBlobResponse]:
        yielded = 0
        for pause_s in calls.pauses_s():
            try:
                # A blob never changes and its pieces have one size: after a break those that are known are passed over.
                known = yielded
                async with closing(self._stream(self._stub.GetBlob, request, timeout_s=TRANSFER_TIMEOUT_S)) as frames:
                    async for frame in frames:
                        if known:
                            known -= 1
                            continue
                        yielded += 1
                        yield frame
                return
            except UnavailableError as err:
                if self._is_closed or not calls.is_gone(err):
                    raise
            await asyncio.sleep(pause_s)

    async def create_token(self, request: store_pb2.CreateTokenRequest) -> store_pb2.CreateTokenResponse:
        return await self._call(self._stub.CreateToken, request, is_idempotent=False)

    async def list_tokens(self, request: store_pb2.ListTokensRequest) -> store_pb2.ListTokensResponse:
        return await self._call(self._stub.ListTokens, request)

    async def revoke_token(self, request: store_pb2.RevokeTokenRequest) -> store_pb2.RevokeTokenResponse:
        return await self._call(self._stub.RevokeToken, request)

    def watch_tokens(self, request: store_pb2.WatchTokensRequest) -> AsyncIterator[store_pb2.WatchTokensResponse]:
        return self._stream(self._stub.WatchTokens, request)

    async def _call(
        self, method: Callable[..., Awaitable[ResponseT]], request: object, *, is_idempotent: bool = True
    ) -> ResponseT:
        self._check_open()
        try:
            return await calls.unary(method, request, timeout_s=self._timeout_s, is_idempotent=is_idempotent)
        except UnavailableError:
            self._check_open()
            raise

    async def _stream(
        self, method: Callable[..., Any], request: object, *, timeout_s: float | None = None
    ) -> AsyncIterator[Any]:
        self._check_open()
        try:
            async with closing(calls.server_stream(method, request, timeout_s=timeout_s)) as responses:
                async for response in responses:
                    yield response
        except UnavailableError:
            self._check_open()
            raise

    async def _send(
        self, method: Callable[..., Awaitable[ResponseT]], requests: AsyncIterator[Any], *, timeout_s: float
    ) -> ResponseT:
        """Send a stream of requests that can be made only once, so that nothing is repeated."""
        self._check_open()
        source = calls.Source(requests)
        try:
            return await calls.unary(method, source.frames, timeout_s=timeout_s, is_idempotent=False)
        except HarnessError:
            self._check_open()
            if source.failure is not None:
                raise source.failure from None
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise _closed_error()


def _closed_error() -> UnavailableError:
    return UnavailableError("the session store is closed", reason="STORE_CLOSED", retry_after_s=1.0)
