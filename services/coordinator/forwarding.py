"""Passes a call on to the coordinator that owns the session: once, as its caller made it. Keeps a channel per owner."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from clients._rpc.channel import check_address, open_channel
from clients._rpc.status import CONNECTION_LOST, from_rpc_error
from clients._rpc.tls import ClientTls
from harness.errors import HarnessError, UnavailableError
from unreal_agent.coordinator.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

FORWARDED_KEY: Final = "x-unreal-agent-forwarded"
"""Metadata of a call that was passed on: whoever gets it and doesn't own the session either says so."""

MAX_OWNERS: Final = 64
"""Channels that are kept; the owner asked longest ago goes first."""

# What a connection adds by itself.
_TRANSPORT_KEYS: Final = ("grpc-", ":", "user-agent", "content-type", "te")


class Forwarder:
    """Reaches other coordinators."""

    def __init__(self, own_address: str, tls: ClientTls | None = None) -> None:
        """Begin without a channel.

        Args:
            own_address: Where others reach this coordinator; empty: nowhere.
            tls: How others' TCP addresses are dialled; None: in plain text.
        """
        self._own_address = own_address
        self._tls = tls
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    async def aclose(self) -> None:
        """Close the channels; may be called twice."""
        while self._channels:
            await self._channels.popitem()[1].close()

    def owner(self, error: UnavailableError, context: Context) -> str | None:
        """Return the address of the owner that an error names; None where the call is not to be passed on."""
        address = error.metadata.get("owner_address", "")
        if error.reason != "NOT_OWNER" or address in ("", self._own_address):
            return None
        if any(key == FORWARDED_KEY for key, _ in context.invocation_metadata() or ()):
            return None
        try:
            check_address(address)
        except HarnessError:
            return None
        return address

    async def call(self, owner: str, name: str, request: Any, context: Context, not_owner: UnavailableError) -> Any:
        """Return the owner's answer; where it can't be reached, raise `not_owner`, which says when to try again."""
        method = getattr(await self._stub(owner), name)
        try:
            return await method(
                request, metadata=_metadata(context), timeout=context.time_remaining(), wait_for_ready=False
            )
        except grpc.aio.AioRpcError as err:
            raise _told(err, owner, not_owner) from err

    async def stream(
        self, owner: str, name: str, request: Any, context: Context, not_owner: UnavailableError
    ) -> AsyncIterator[Any]:
        """Yield the owner's answers; as `call` where it can't be reached."""
        method = getattr(await self._stub(owner), name)
        call = method(request, metadata=_metadata(context), timeout=context.time_remaining(), wait_for_ready=False)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as err:
            raise _told(err, owner, not_owner) from err
        finally:
            call.cancel()

    async def _stub(self, address: str) -> CoordinatorServiceStub:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, tls=self._tls)
        self._channels.move_to_end(address)
        if len(self._channels) > MAX_OWNERS:
            await self._channels.popitem(last=False)[1].close()
        return CoordinatorServiceStub(channel)


def _metadata(context: Context) -> tuple[tuple[str, str | bytes], ...]:
    """Return the caller's own metadata, its credentials among them, and that the call was passed on."""
    own = tuple((key, value) for key, value in context.invocation_metadata() or () if not _is_transport(key))
    return (*own, (FORWARDED_KEY, "1"))


def _is_transport(key: str) -> bool:
    return key.startswith(_TRANSPORT_KEYS[:2]) or key in _TRANSPORT_KEYS[2:]


def _told(err: grpc.aio.AioRpcError, owner: str, not_owner: UnavailableError) -> HarnessError:
    error = from_rpc_error(err)
    if isinstance(error, UnavailableError) and error.reason == CONNECTION_LOST:
        logger.warning("owner of a session was not reached", extra={"owner_address": owner})
        return not_owner
    return error
