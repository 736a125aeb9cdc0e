"""An operation manager elsewhere, behind the protocol of the local one. Only carries messages over a `Link`.

It keeps no operation state. A watch that breaks ends with UnavailableError: what was missed meanwhile only its user can
ask for, by adding again what is unsettled.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from clients._rpc.calls import CLIENT_CLOSED
from clients._rpc.status import CONNECTION_LOST, MESSAGE_TOO_LARGE
from clients.operation_manager import links
from clients.operation_manager.links import Link
from harness.errors import ResourceExhaustedError, UnavailableError
from harness.primitives.streams import closing
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

CALL_TIMEOUT_S = 15.0
"""For a call, its repetitions and waiting for the manager included."""

ADD_TIMEOUT_S = 30.0
"""An add may hold thousands of operations, and waits for the manager's disk."""

SILENCE_S = 60.0
"""A watch without four keepalives in a row has a manager that hangs, whatever the connection says."""

READ_PATIENCE_S = 30.0
"""A reading is given up after so long without a byte or a connection that holds."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class ProxyOperationManager:
    """Implements `OperationManager` over a link, which it closes."""

    def __init__(self, link: Link, *, silence_s: float = SILENCE_S) -> None:
        """Take over `link`. A watch that is silent for `silence_s` is taken for broken."""
        self._link = link
        self._silence_s = silence_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._link.aclose()

    async def get_server_info(self, request: manager_pb2.GetServerInfoRequest) -> manager_pb2.GetServerInfoResponse:
        return await self._link.call(links.GET_SERVER_INFO, request, timeout_s=CALL_TIMEOUT_S)

    async def add_operations(self, request: manager_pb2.AddOperationsRequest) -> manager_pb2.AddOperationsResponse:
        """Accept operations; in several calls where they, or their newest states, are too much for one message."""
        try:
            return await self._link.call(links.ADD_OPERATIONS, request, timeout_s=ADD_TIMEOUT_S)
        except ResourceExhaustedError as error:
            if error.reason != MESSAGE_TOO_LARGE or len(request.assignments) < 2:
                raise
        half = len(request.assignments) // 2
        first = await self.add_operations(_with_assignments(request, slice(None, half), request.instance_id))
        # The same instance, or none: an answer can't speak of two.
        second = await self.add_operations(_with_assignments(request, slice(half, None), first.instance_id))
        return manager_pb2.AddOperationsResponse(
            instance_id=first.instance_id,
            results=[*first.results, *second.results],
            # The earlier one: watching from there repeats what the second part told, and misses nothing.
            position=first.position,
        )

    async def cancel_operation(
        self, request: manager_pb2.CancelOperationRequest
    ) -> manager_pb2.CancelOperationResponse:
        return await self._link.call(links.CANCEL_OPERATION, request, timeout_s=CALL_TIMEOUT_S)

    async def get_operation(self, request: manager_pb2.GetOperationRequest) -> manager_pb2.GetOperationResponse:
        return await self._link.call(links.GET_OPERATION, request, timeout_s=CALL_TIMEOUT_S)

    async def list_operations(self, request: manager_pb2.ListOperationsRequest) -> manager_pb2.ListOperationsResponse:
        return await self._link.call(links.LIST_OPERATIONS, request, timeout_s=CALL_TIMEOUT_S)

    async def acknowledge_updates(
        self, request: manager_pb2.AcknowledgeUpdatesRequest
    ) -> manager_pb2.AcknowledgeUpdatesResponse:
        return await self._link.call(links.ACKNOWLEDGE_UPDATES, request, timeout_s=CALL_TIMEOUT_S)

    async def watch_operations(
        self, request: manager_pb2.WatchOperationsRequest
    ) -> AsyncIterator[manager_pb2.WatchOperationsResponse]:
        """Yield a hello, what is not acknowledged, then each new state, until the link or the manager breaks."""
        async with closing(self._link.stream(links.WATCH_OPERATIONS, request)) as responses:
            while True:
                try:
                    async with asyncio.timeout(self._silence_s) as limit:
                        response = await anext(responses, None)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise UnavailableError(
                        f"the operation manager was silent for {self._silence_s:g} s", reason="MANAGER_SILENT"
                    ) from None
                if response is None:
                    raise UnavailableError("the operation manager ended the watch", reason=CONNECTION_LOST)
                yield response

    async def read_output(
        self, request: manager_pb2.ReadOutputRequest
    ) -> AsyncIterator[manager_pb2.ReadOutputResponse]:
        """Yield an operation's output or attachment; after a break it goes on at the byte that was received last."""
        loop = asyncio.get_running_loop()
        rest = request
        pause_s = FIRST_PAUSE_S
        give_up_time = loop.time() + READ_PATIENCE_S
        while True:
            try:
                async with closing(self._link.stream(links.READ_OUTPUT, rest)) as pieces:
                    async for piece in pieces:
                        pause_s, give_up_time = FIRST_PAUSE_S, loop.time() + READ_PATIENCE_S
                        yield piece
                        if piece.is_end:
                            return
                        rest = _after(rest, piece)
                raise UnavailableError("the output ended without its end", reason=CONNECTION_LOST)
            except UnavailableError as error:
                if request.limit_bytes and not rest.limit_bytes:
                    # Only the word that it ends was lost; asked for nothing more, a manager would send all.
                    yield manager_pb2.ReadOutputResponse(offset=rest.offset, is_end=True)
                    return
                if error.reason == CLIENT_CLOSED or loop.time() + pause_s >= give_up_time:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def upload_workspace(
        self, requests: AsyncIterator[manager_pb2.UploadWorkspaceRequest]
    ) -> AsyncIterator[manager_pb2.UploadWorkspaceResponse]:
        """Put files into a workspace; after a break the caller repeats what was not confirmed."""
        return self._link.exchange(links.UPLOAD_WORKSPACE, requests)

    def download_workspace(
        self, request: manager_pb2.DownloadWorkspaceRequest
    ) -> AsyncIterator[manager_pb2.DownloadWorkspaceResponse]:
        """Yield the files of a workspace; after a break the caller asks again for what it lacks."""
        return self._link.stream(links.DOWNLOAD_WORKSPACE, request)


def _with_assignments(
    request: manager_pb2.AddOperationsRequest, part: slice, instance_id: str
) -> manager_pb2.AddOperationsRequest:
    return manager_pb2.AddOperationsRequest(
        instance_id=instance_id, owner=request.owner, fences=request.fences, assignments=request.assignments[part]
    )


def _after(
    request: manager_pb2.ReadOutputRequest, piece: manager_pb2.ReadOutputResponse
) -> manager_pb2.ReadOutputRequest:
    """Return the request for what follows a piece."""
    rest = manager_pb2.ReadOutputRequest()
    rest.CopyFrom(request)
    rest.offset = piece.offset + len(piece.data)
    rest.tail_bytes = 0
    rest.limit_bytes -= min(len(piece.data), rest.limit_bytes)
    return rest
