"""How the messages of OperationManagerService travel: its methods, and the link over a channel that was dialled.

A link only carries. It knows no operation, and repeats nothing that has begun to be answered: who knows what was
received resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from clients._rpc import calls
from clients._rpc.channel import open_channel
from clients._rpc.tls import ClientTls
from harness.primitives.streams import closing
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

SERVICE = manager_pb2.DESCRIPTOR.services_by_name["OperationManagerService"].full_name

CONNECT_PATIENCE_S = 10.0

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ResponseT]):
    """A method of the service."""

    name: str
    """As in the schema."""

    request_type: type[RequestT]
    response_type: type[ResponseT]

    @property
    def path(self) -> str:
        """Its path in HTTP/2."""
        return f"/{SERVICE}/{self.name}"


GET_SERVER_INFO = Method("GetServerInfo", manager_pb2.GetServerInfoRequest, manager_pb2.GetServerInfoResponse)
ADD_OPERATIONS = Method("AddOperations", manager_pb2.AddOperationsRequest, manager_pb2.AddOperationsResponse)
CANCEL_OPERATION = Method("CancelOperation", manager_pb2.CancelOperationRequest, manager_pb2.CancelOperationResponse)
GET_OPERATION = Method("GetOperation", manager_pb2.GetOperationRequest, manager_pb2.GetOperationResponse)
LIST_OPERATIONS = Method("ListOperations", manager_pb2.ListOperationsRequest, manager_pb2.ListOperationsResponse)
WATCH_OPERATIONS = Method("WatchOperations", manager_pb2.WatchOperationsRequest, manager_pb2.WatchOperationsResponse)
ACKNOWLEDGE_UPDATES = Method(
    "AcknowledgeUpdates", manager_pb2.AcknowledgeUpdatesRequest, manager_pb2.AcknowledgeUpdatesResponse
)
READ_OUTPUT = Method("ReadOutput", manager_pb2.ReadOutputRequest, manager_pb2.ReadOutputResponse)
UPLOAD_WORKSPACE = Method("UploadWorkspace", manager_pb2.UploadWorkspaceRequest, manager_pb2.UploadWorkspaceResponse)
DOWNLOAD_WORKSPACE = Method(
    "DownloadWorkspace", manager_pb2.DownloadWorkspaceRequest, manager_pb2.DownloadWorkspaceResponse
)


class Link(Protocol):
    """Carries calls to one operation manager.

    Methods raise `harness.errors` classes: those of the manager, and UnavailableError where it can't be reached or the
    link breaks. Closing an iterator, or cancelling its reader, ends the call.
    """

    async def call(self, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        """Return the answer of a method without streams. Every such method of the service may be sent again."""
        ...

    def stream(self, method: Method[RequestT, ResponseT], request: RequestT) -> AsyncIterator[ResponseT]:
        """Yield the answers to one request."""
        ...

    def exchange(
        self, method: Method[RequestT, ResponseT], requests: AsyncIterator[RequestT]
    ) -> AsyncIterator[ResponseT]:
        """Yield the answers to many requests. What `requests` raises is raised here, and the manager sees a cancel."""
        ...

    async def aclose(self) -> None:
        """End every call. May be called twice."""
        ...


class DialledLink:
    """A link over a channel of its own; made on the loop that uses it."""

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        tls: ClientTls | None = None,
        connect_patience_s: float = CONNECT_PATIENCE_S,
    ) -> None:
        """Connect with the first call, and again after each break.

        Args:
            address: As for `open_channel`, like `token` and `tls`.
            token: Empty: none.
            tls: None: plain text.
            connect_patience_s: What a stream waits for a connection before it fails with the reason.
        """
        self._channel = open_channel(address, token=token, tls=tls)
        self._connect_patience_s = connect_patience_s

    async def call(self, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        stub: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT] = self._channel.unary_unary(
            method.path,
            request_serializer=method.request_type.SerializeToString,
            response_deserializer=method.response_type.FromString,
        )
        return await calls.unary(stub, request, timeout_s=timeout_s, is_idempotent=True)

    async def stream(self, method: Method[RequestT, ResponseT], request: RequestT) -> AsyncIterator[ResponseT]:
        await self._wait_connected()
        stub: grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT] = self._channel.unary_stream(
            method.path,
            request_serializer=method.request_type.SerializeToString,
            response_deserializer=method.response_type.FromString,
        )
        async with closing(calls.server_stream(stub, request, wait_for_ready=False)) as responses:
            async for response in responses:
                yield response

    async def exchange(
        self, method: Method[RequestT, ResponseT], requests: AsyncIterator[RequestT]
    ) -> AsyncIterator[ResponseT]:
        await self._wait_connected()
        stub: grpc.aio.StreamStreamMultiCallable[RequestT, ResponseT] = self._channel.stream_stream(
            method.path,
            request_serializer=method.request_type.SerializeToString,
            response_deserializer=method.response_type.FromString,
        )
        begun: asyncio.Future[grpc.aio.StreamStreamCall[RequestT, ResponseT]]
        begun = asyncio.get_running_loop().create_future()

        def begin(_: None, **options: Any) -> grpc.aio.StreamStreamCall[RequestT, ResponseT]:
            call = stub(**options)
            begun.set_result(call)
            return call

        failures: list[Exception] = []
        ended_by: BaseException | None = None
        # gRPC would read `requests` in a task that may outlive the call, and swallow what they raise. This task never
        # raises: its group would cancel the reader's task wherever that is.
        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(_send(begun, requests, failures))
            try:
                async with closing(calls.server_stream(begin, None, wait_for_ready=False)) as responses:
                    async for response in responses:
                        yield response
            except (Exception, GeneratorExit) as error:
                ended_by = failures[0] if failures else error
            finally:
                sender.cancel()
        # Not within the group, which would wrap it.
        if ended_by is not None:
            raise ended_by

    async def aclose(self) -> None:
        await self._channel.close()

    async def _wait_connected(self) -> None:
        """Wait for a connection, but not for ever: a call without one fails at once, and says why there is none."""
        with contextlib.suppress(TimeoutError, grpc.aio.UsageError):
            async with asyncio.timeout(self._connect_patience_s):
                await self._channel.channel_ready()


async def _send(
    begun: asyncio.Future[grpc.aio.StreamStreamCall[RequestT, ResponseT]],
    requests: AsyncIterator[RequestT],
    failures: list[Exception],
) -> None:
    call = await begun
    try:
        async for request in requests:
            await call.write(request)
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # the call is over; its reader hears why
    # Whatever the caller's own iterator raises is the caller's to see.
    except Exception as error:
        failures.append(error)
        call.cancel()
