"""A server of a release to come: it relays every call to a present one and changes what comes back.

By default every message of an answer gets a new field, and every stream of events begins with an event of a new kind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import Message

from clients._rpc.channel import KEEPALIVE, SIZE_OPTIONS, open_channel
from tests.support.newer_schemas import NEW_FIELD, NewerSchemas, messages_in

Change = Callable[[Message], None]
"""Changes an answer, which is a message of `NewerSchemas`, in place."""

_EVENTS = frozenset(
    {
        "unreal_agent.coordinator.v1.WatchSessionResponse",
        "unreal_agent.operationmanager.v1.WatchOperationsResponse",
    }
)
"""Types of which each message is one of several kinds."""


def adorn(message: Message, *, but: Iterable[str] = ()) -> None:
    """Set the new field of each message in an answer, all but those of some types and below."""
    for part in messages_in(message, but):
        setattr(part, NEW_FIELD, "new")


class _Relay(grpc.GenericRpcHandler):
    """Relays bytes. On the wire a call with one message is a stream like any other."""

    def __init__(self, channel: grpc.aio.Channel, change: Change) -> None:
        self._channel = channel
        self._schemas = NewerSchemas()
        self._change = change

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method
        response_type = self._response_type(method)

        async def relay(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[bytes]:
            # The types come from (de)serialisers, which there are none of: these are bytes.
            call: Any = self._channel.stream_stream(method)(requests)  # type: ignore[arg-type]
            is_first = True
            try:
                async for response in call:
                    if is_first and response_type is not None and response_type.DESCRIPTOR.full_name in _EVENTS:
                        yield response_type(**{NEW_FIELD: "an event of a new kind"}).SerializeToString()
                    is_first = False
                    yield response if response_type is None else self._changed(response_type, response)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "", error.trailing_metadata())
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(relay)

    def _response_type(self, method: str) -> type[Message] | None:
        """Return the newer type of a method's answers; None for a service that is none of ours."""
        name = method.removeprefix("/").replace("/", ".")
        if not name.startswith("unreal_agent."):
            return None
        return self._schemas.type(descriptor_pool.Default().FindMethodByName(name).output_type.full_name)

    def _changed(self, response_type: type[Message], response: bytes) -> bytes:
        message = response_type.FromString(response)
        self._change(message)
        return message.SerializeToString()


@asynccontextmanager
async def newer_server(address: str, change: Change = adorn) -> AsyncIterator[str]:
    """Serve in front of the server at `address`; yield where.

    Args:
        address: Of a server of the present release.
        change: What makes an answer one of the newer release.
    """
    options = (*SIZE_OPTIONS, *KEEPALIVE.server_options(), ("grpc.so_reuseport", 0))
    async with open_channel(address) as channel:
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((_Relay(channel, change),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)
