"""A coordinator behind an address, as the same protocol that a coordinator in this process implements.

Holds a channel and nothing else: what it is told is durable at the other end. It reconnects by itself; calls that are
harmless to repeat are repeated, and streams go on where they were broken off.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from clients._rpc.calls import CLIENT_CLOSED, Source, is_gone, pauses_s, server_stream, unary
from clients._rpc.channel import open_channel
from clients._rpc.tls import ClientTls
from clients.coordinator.cursors import BlobCursor, Cursor, OutputCursor, WatchCursor
from harness import faults
from harness.errors import HarnessError, PermissionDeniedError, ResourceExhaustedError, UnavailableError
from harness.primitives.streams import closing
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.coordinator.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
NamedT = TypeVar("NamedT", coordinator_pb2.CreateSessionRequest, coordinator_pb2.ForkSessionRequest)

BEFORE_CALL = faults.declare("client.call.before", "a call is wanted, nothing is sent")
AFTER_CALL = faults.declare("client.call.after", "a call is answered, its caller does not know")
BEFORE_EVENT = faults.declare("client.event.before", "a message of a stream came, its reader does not have it")
AFTER_EVENT = faults.declare("client.event.after", "a message of a stream was handed over")

FELL_BEHIND = "FELL_BEHIND"
"""Reason where a server ended a watch that did not read; nothing of it is lost."""

PATIENCE_S = 60.0
"""How long a coordinator that can't be reached is waited for by default."""

LONG_CALL_S = 600.0
"""Bound of calls that take as long as what they carry: a blob, an import, a deletion that first stops a session."""


class CoordinatorClient:
    """Talks to a coordinator. Use it as `async with`; safe for any number of tasks of one loop.

    Every method that changes something may be repeated after an error with the same IDs. A watch goes on through
    restarts, takeovers and moves to another release: each durable change comes once; deltas of a break are lost.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        tls: ClientTls | None = None,
        patience_s: float = PATIENCE_S,
        on_connection: Callable[[bool], None] | None = None,
    ) -> None:
        """Prepare; nothing is sent before the first call.

        Args:
            address: `host:port` or `unix:/path`.
            token: Bearer token that goes with every call; empty: none.
            tls: For a TCP address; None: plain text.
            patience_s: How long one call, or one break of a stream, waits for a coordinator that can't be reached or
                whose session's owner is dead, before it fails with UnavailableError.
            on_connection: Called with False when a stream breaks and with True when it goes on, to be shown.

        Raises:
            InvalidArgumentError: INVALID_ADDRESS.
            FailedPreconditionError: TLS_FILE_UNREADABLE, TOKEN_IN_CLEAR_TEXT.
        """
        self._channel = open_channel(address, token=token, tls=tls)
        self._stub = CoordinatorServiceStub(self._channel)
        self._patience_s = patience_s
        self._on_connection = on_connection or (lambda is_there: None)

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the channel."""
        await self.aclose()

    async def aclose(self) -> None:
        """End what is under way and close the channel; may be called twice. Sessions run on."""
        await self._channel.close()

    async def get_server_info(
        self, request: coordinator_pb2.GetServerInfoRequest, *, patience_s: float | None = None
    ) -> coordinator_pb2.GetServerInfoResponse:
        """Say who answers; `patience_s` for this call in place of the client's own."""
        return await self._call(self._stub.GetServerInfo, request, patience_s=patience_s)

    async def create_session(
        self, request: coordinator_pb2.CreateSessionRequest
    ) -> coordinator_pb2.CreateSessionResponse:
        """Make a session; one without an ID gets a random one, so that the call may be repeated."""
        return await self._call_named(self._stub.CreateSession, request)

    async def _call_named(self, method: Callable[..., Awaitable[ResponseT]], request: NamedT) -> ResponseT:
        """Call a method that makes a session, under an ID that the client chooses where the caller did not."""
        if request.session_id:
            return await self._call(method, request)
        named = type(request)()
        named.CopyFrom(request)
        named.session_id = uuid.uuid4().hex
        try:
            return await self._call(method, named)
        except PermissionDeniedError as error:
            prefix = error.metadata.get("session_prefix", "")
            if error.reason != "SESSION_NOT_ALLOWED" or not prefix:
                raise
            named.session_id = f"{prefix}{named.session_id}"
            return await self._call(method, named)

    async def submit_input(self, request: coordinator_pb2.SubmitInputRequest) -> coordinator_pb2.SubmitInputResponse:
        """Accept an EXTERNAL input; returns once it is durable; idempotent by input ID."""
        return await self._call(self._stub.SubmitInput, request)

    async def watch_session(
        self, request: coordinator_pb2.WatchSessionRequest
    ) -> AsyncGenerator[coordinator_pb2.WatchSessionResponse, None]:
        """Yield every change after a revision, then new ones; with `until_idle` it ends at rest."""
        async with closing(self._resumed(self._stub.WatchSession, WatchCursor(request))) as responses:
            async for response in responses:
                yield response

    async def get_session(self, request: coordinator_pb2.GetSessionRequest) -> coordinator_pb2.GetSessionResponse:
        """Return a session, its settings and what it has used."""
        return await self._call(self._stub.GetSession, request)

    async def list_sessions(self, request: coordinator_pb2.ListSessionsRequest) -> coordinator_pb2.ListSessionsResponse:
        """Return a page of sessions."""
        return await self._call(self._stub.ListSessions, request)

    async def delete_session(
        self, request: coordinator_pb2.DeleteSessionRequest
    ) -> coordinator_pb2.DeleteSessionResponse:
        """Delete a session; idempotent."""
        return await self._call(self._stub.DeleteSession, request, patience_s=max(self._patience_s, LONG_CALL_S))

    async def fork_session(self, request: coordinator_pb2.ForkSessionRequest) -> coordinator_pb2.ForkSessionResponse:
        """Make a fork; one without an ID gets a random one, so that the call may be repeated."""
        return await self._call_named(self._stub.ForkSession, request)

    async def stop_session(self, request: coordinator_pb2.StopSessionRequest) -> coordinator_pb2.StopSessionResponse:
        """Record a stop; its end is watched."""
        return await self._call(self._stub.StopSession, request)

    async def cancel_operation(
        self, request: coordinator_pb2.CancelOperationRequest
    ) -> coordinator_pb2.CancelOperationResponse:
        """Record the cancellation or abandonment of one operation; its end is watched."""
        return await self._call(self._stub.CancelOperation, request)

    async def update_settings(
        self, request: coordinator_pb2.UpdateSettingsRequest
    ) -> coordinator_pb2.UpdateSettingsResponse:
        """Record a change of settings."""
        return await self._call(self._stub.UpdateSettings, request)

    async def retry_turn(self, request: coordinator_pb2.RetryTurnRequest) -> coordinator_pb2.RetryTurnResponse:
        """Try the failed turn again."""
        return await self._call(self._stub.RetryTurn, request)

    async def build_context(self, request: coordinator_pb2.BuildContextRequest) -> coordinator_pb2.BuildContextResponse:
        """Return what the model would be sent now, with the report."""
        return await self._call(self._stub.BuildContext, request)

    async def list_items(self, request: coordinator_pb2.ListItemsRequest) -> coordinator_pb2.ListItemsResponse:
        """Return a page of items."""
        return await self._call(self._stub.ListItems, request)

    async def list_operations(
        self, request: coordinator_pb2.ListOperationsRequest
    ) -> coordinator_pb2.ListOperationsResponse:
        """Return a page of operations in their newest recorded state."""
        return await self._call(self._stub.ListOperations, request)

    async def read_output(
        self, request: coordinator_pb2.ReadOutputRequest
    ) -> AsyncGenerator[coordinator_pb2.ReadOutputResponse, None]:
        """Yield an operation's output in pieces."""
        async with closing(self._resumed(self._stub.ReadOutput, OutputCursor(request))) as responses:
            async for response in responses:
                yield response

    async def put_blob(
        self, requests: AsyncIterator[coordinator_pb2.PutBlobRequest]
    ) -> coordinator_pb2.PutBlobResponse:
        """Store a blob for a session; idempotent by content."""
        return await self._send(self._stub.PutBlob, requests)

    async def get_blob(
        self, request: coordinator_pb2.GetBlobRequest
    ) -> AsyncGenerator[coordinator_pb2.GetBlobResponse, None]:
        """Yield a blob in pieces."""
        async with closing(self._resumed(self._stub.GetBlob, BlobCursor(request))) as responses:
            async for response in responses:
                yield response

    async def export_session(
        self, request: coordinator_pb2.ExportSessionRequest
    ) -> AsyncGenerator[coordinator_pb2.ExportSessionResponse, None]:
        """Yield one consistent revision of a session; a break can't be made up for, another try may hold more."""
        async with closing(server_stream(self._stub.ExportSession, request, wait_for_ready=False)) as responses:
            async for response in responses:
                yield response

    async def import_session(
        self, requests: AsyncIterator[coordinator_pb2.ImportSessionRequest]
    ) -> coordinator_pb2.ImportSessionResponse:
        """Make a session from an export."""
        return await self._send(self._stub.ImportSession, requests)

    async def upload_workspace(
        self, requests: AsyncIterator[coordinator_pb2.UploadWorkspaceRequest]
    ) -> AsyncGenerator[coordinator_pb2.UploadWorkspaceResponse, None]:
        """Put files into a session's workspace."""
        source = Source(requests)
        stream = server_stream(self._stub.UploadWorkspace, source.frames, wait_for_ready=False)
        async with closing(stream) as responses:
            try:
                async for response in responses:
                    yield response
            except HarnessError as error:
                raise source.failure or error from None

    async def download_workspace(
        self, request: coordinator_pb2.DownloadWorkspaceRequest
    ) -> AsyncGenerator[coordinator_pb2.DownloadWorkspaceResponse, None]:
        """Yield the files of a session's workspace."""
        async with closing(server_stream(self._stub.DownloadWorkspace, request, wait_for_ready=False)) as responses:
            async for response in responses:
                yield response

    async def _call(
        self,
        method: Callable[..., Awaitable[ResponseT]],
        request: object,
        *,
        patience_s: float | None = None,
    ) -> ResponseT:
        """Call a method that may be repeated, until it is answered or the patience is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._patience_s if patience_s is None else patience_s)
        faults.reach(BEFORE_CALL)
        for pause_s in pauses_s():
            try:
                timeout_s = max(deadline - loop.time(), 0.001)
                answer = await unary(method, request, timeout_s=timeout_s, is_idempotent=True)
                faults.reach(AFTER_CALL)
                return answer
            except UnavailableError as error:
                # The owner of the session is dead and its lease not over, say; a lost connection was waited for.
                pause_s = max(pause_s, error.retry_after_s or 0.0)
                if error.retry_after_s is None or is_gone(error) or loop.time() + pause_s >= deadline:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError("pauses never end")

    async def _send(self, method: Callable[..., Awaitable[ResponseT]], requests: AsyncIterator[Any]) -> ResponseT:
        """Call a method that takes a stream, which can be read once only."""
        source = Source(requests)
        try:
            return await unary(method, source.frames, timeout_s=LONG_CALL_S, is_idempotent=False)
        except HarnessError as error:
            raise source.failure or error from None

    async def _resumed(
        self, method: Callable[[RequestT], Any], cursor: Cursor[RequestT, ResponseT]
    ) -> AsyncGenerator[ResponseT, None]:
        """Yield a stream, going on where it was broken off, until it ends or the patience is over."""
        loop = asyncio.get_running_loop()
        breaks = _Breaks(self._patience_s, loop.time(), self._on_connection)
        while True:
            try:
                async with closing(server_stream(method, cursor.request, wait_for_ready=False)) as responses:
                    async for response in responses:
                        breaks.note_answer()
                        fresh = cursor.take(response)
                        if fresh is not None:
                            faults.reach(BEFORE_EVENT)
                            yield fresh
                            faults.reach(AFTER_EVENT)
                if cursor.is_end or not cursor.has_last_message:
                    return
                error: HarnessError = UnavailableError("the stream ended in the middle", reason="STREAM_ENDED")
            except (UnavailableError, ResourceExhaustedError) as err:
                is_full = isinstance(err, ResourceExhaustedError) and err.retry_after_s is None
                if err.reason == CLIENT_CLOSED or (is_full and err.reason != FELL_BEHIND):
                    raise
                error = err
            if cursor.is_end:
                return
            await asyncio.sleep(breaks.pause_s(error, loop.time()))


class _Breaks:
    """How long to wait after each break of a stream, and when to give up."""

    def __init__(self, patience_s: float, now_s: float, on_connection: Callable[[bool], None]) -> None:
        self._patience_s = patience_s
        self._on_connection = on_connection
        self._begin_s: float | None = now_s
        self._pauses = pauses_s()

    def note_answer(self) -> None:
        if self._begin_s is not None:
            self._begin_s = None
            self._on_connection(True)

    def pause_s(self, error: HarnessError, now_s: float) -> float:
        """Return the pause; raise `error` where the patience is over."""
        if self._begin_s is None:
            self._begin_s, self._pauses = now_s, pauses_s()
            self._on_connection(False)
        pause_s = max(next(self._pauses), error.retry_after_s or 0.0)
        if now_s + pause_s > self._begin_s + self._patience_s:
            raise error
        return pause_s
