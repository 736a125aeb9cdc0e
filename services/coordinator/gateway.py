"""`OperationManagerGatewayService`: lets managers attach that can't be dialled, each under its own name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, Final

import grpc

from clients.operation_manager.attached_link import AttachedLink, Attachment, lost_stream
from harness.errors import (
    FailedPreconditionError,
    HarnessError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
)
from services._server.identity import caller_var
from services._server.server import Service
from services._server.validation import MIB, MethodRules
from services.coordinator.tokens import TokenCaller
from unreal_agent.gateway.v1 import operation_manager_gateway_service_pb2 as gateway_pb2
from unreal_agent.gateway.v1 import operation_manager_gateway_service_pb2_grpc as gateway_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME: Final = gateway_pb2.DESCRIPTOR.services_by_name["OperationManagerGatewayService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]

# A list of operations, or the newest states of an add, may be as large as what a manager answers when it is dialled.
RULES: Final = MethodRules(max_request_bytes={"Attach": 48 * MIB}, conversations=frozenset({"Attach"}))

_HELLO_S: Final = 10.0


class GatewayServicer(gateway_grpc.OperationManagerGatewayServiceServicer):
    """Takes the streams of managers to the links of their names."""

    def __init__(self, links: Mapping[str, AttachedLink]) -> None:
        """Take the links, by the names of the managers that may attach."""
        self._links = links
        self._epoch = 0

    async def Attach(
        self, request_iterator: AsyncIterator[gateway_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[gateway_pb2.AttachResponse]:
        """Carry a manager's calls for as long as its stream lasts."""
        link = self._link_of(await _hello(request_iterator))
        attachment = Attachment()
        former = link.attachment
        link.attach(attachment)
        if former is not None:
            former.end(_replaced(link.manager_name))
        self._epoch += 1
        logger.info("manager attached", extra={"manager_name": link.manager_name, "is_replacing": former is not None})
        try:
            accepted = gateway_pb2.AttachAccepted(manager_name=link.manager_name, epoch=self._epoch)
            yield gateway_pb2.AttachResponse(accepted=accepted)
            async with asyncio.TaskGroup() as tasks, aclosing(attachment.outgoing()) as frames:
                reading = tasks.create_task(_read(request_iterator, attachment))
                try:
                    async for frame in frames:
                        yield frame
                finally:
                    reading.cancel()
        except* HarnessError as group:
            # One at most: the reading task raises nothing.
            raise group.exceptions[0] from None
        finally:
            link.detach(attachment)
            attachment.end(lost_stream())
            logger.info("manager detached", extra={"manager_name": link.manager_name})

    def _link_of(self, hello: gateway_pb2.AttachHello) -> AttachedLink:
        name = hello.info.name
        caller = caller_var.get()
        if isinstance(caller, TokenCaller) and caller.token.manager_name != name:
            raise PermissionDeniedError(
                f"the token is for manager {caller.token.manager_name!r}, and this one is called {name[:140]!r}:"
                " start it with --manager-name",
                reason="MANAGER_NOT_ALLOWED",
                metadata={"manager_name": caller.token.manager_name},
            )
        link = self._links.get(name)
        if link is None:
            raise NotFoundError(
                f"no manager called {name[:140]!r} is expected here: start the coordinator with --manager"
                f" {name[:140]}=attached",
                reason="MANAGER_NOT_EXPECTED",
                metadata={"manager_name": name[:140]},
            )
        return link


def gateway_service(links: Mapping[str, AttachedLink]) -> Service:
    """Return the service by which managers attach to links."""
    servicer = GatewayServicer(links)
    return Service(
        name=SERVICE_NAME,
        register=lambda server: gateway_grpc.add_OperationManagerGatewayServiceServicer_to_server(servicer, server),
        rules=RULES,
    )


async def _hello(requests: AsyncIterator[gateway_pb2.AttachRequest]) -> gateway_pb2.AttachHello:
    try:
        async with asyncio.timeout(_HELLO_S):
            first = await anext(aiter(requests), None)
    except TimeoutError:
        first = None
    if first is None or first.WhichOneof("frame") != "hello":
        raise InvalidArgumentError("the first frame must be the hello", reason="HELLO_MISSING")
    return first.hello


async def _read(requests: AsyncIterator[gateway_pb2.AttachRequest], attachment: Attachment) -> None:
    try:
        async for frame in requests:
            attachment.take(frame)
    except HarnessError as error:
        attachment.end(error)
    else:
        attachment.end(lost_stream())


def _replaced(manager_name: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"another manager attached as {manager_name!r}: one name is for one manager",
        reason="MANAGER_REPLACED",
        metadata={"manager_name": manager_name},
    )
