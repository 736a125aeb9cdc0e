"""Attaches the manager to coordinators that can't dial it: it opens a stream and answers the calls that come by it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import grpc

from clients._rpc.calls import pauses_s
from clients._rpc.channel import open_channel
from clients._rpc.status import from_rpc_error, to_status
from clients._rpc.tls import ClientTls
from clients.operation_manager.frames import BULK, METHODS, Allowance, Inbox, Outbox, weight
from harness.errors import HarnessError
from services._server.validation import check_fields_known
from services.operation_manager.servicer import RULES, OperationManagerServicer
from unreal_agent.gateway.v1 import operation_manager_gateway_service_pb2 as gateway_pb2
from unreal_agent.gateway.v1 import operation_manager_gateway_service_pb2_grpc as gateway_grpc
from unreal_agent.server.v1 import server_pb2

logger = logging.getLogger(__name__)

_REPLACED: Final = "MANAGER_REPLACED"

_REPLACED_PAUSE_S: Final = 30.0
"""Between attempts of a manager in whose place another one attached: they must not push each other out for ever."""

_STREAMS_REQUESTS: Final = "upload_workspace"
_STREAMS_ANSWERS: Final = frozenset({"watch_operations", "read_output", "upload_workspace", "download_workspace"})


class AttachedServer:
    """Answers the calls of one stream."""

    def __init__(self, servicer: OperationManagerServicer) -> None:
        self._servicer = servicer
        self._outbox: Outbox[gateway_pb2.AttachRequest] = Outbox()
        self._calls: dict[int, _Call] = {}
        self._last_call_id = 0

    async def outgoing(self, hello: gateway_pb2.AttachHello) -> AsyncGenerator[gateway_pb2.AttachRequest, None]:
        """Yield the frames to write to the coordinator: the hello, then answers, for ever."""
        yield gateway_pb2.AttachRequest(hello=hello)
        async with aclosing(self._outbox.frames()) as frames:
            async for frame in frames:
                yield frame

    async def run(self, frames: AsyncIterator[gateway_pb2.AttachResponse]) -> None:
        """Answer calls until the stream ends; then every call in hand is cancelled. No operation is.

        Raises:
            AioRpcError: The stream broke, or the coordinator ended it.
            ResourceExhaustedError: CREDIT_EXCEEDED; the coordinator sends more than it may.
        """
        broken: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                async for frame in frames:
                    self._take(frame, tasks)
            except (grpc.aio.AioRpcError, HarnessError) as error:
                broken = error  # the group would wrap it
            finally:
                for call in self._calls.values():
                    call.task.cancel()
        if broken is not None:
            raise broken

    def _take(self, frame: gateway_pb2.AttachResponse, tasks: asyncio.TaskGroup) -> None:
        kind = str(frame.WhichOneof("frame"))
        call = self._calls.get(frame.call_id)
        if kind in METHODS:
            # A request for a call that is over came too late; IDs grow, so that it is not taken for a new one.
            if call is None and frame.call_id > self._last_call_id:
                call = self._begun(frame.call_id, kind, tasks)
            if call is not None and kind == call.field:
                call.inbox.put(getattr(frame, kind))
        elif call is not None:
            if kind == "credit":
                call.allowance.grant(frame.credit.bytes)
            elif kind == "end":
                call.inbox.end()
            elif kind == "cancel":
                call.task.cancel()

    def _begun(self, call_id: int, field: str, tasks: asyncio.TaskGroup) -> _Call:
        self._last_call_id = call_id
        call = self._calls[call_id] = _Call(call_id, field)
        call.task = tasks.create_task(self._answer(call))
        # Not in the task: one that is cancelled before it began runs none of its lines.
        call.task.add_done_callback(lambda _: self._calls.pop(call_id, None))
        return call

    async def _answer(self, call: _Call) -> None:
        end = gateway_pb2.CallEnd()
        try:
            await self._serve(call)
        # As the interceptor of a server does: what is none of ours is a bug and goes to the log whole.
        except Exception as error:
            if not isinstance(error, HarnessError):
                logger.error("call failed by a fault", exc_info=error, extra={"method": call.field})
            end.error_status = to_status(error).SerializeToString()
        self._outbox.put(gateway_pb2.AttachRequest(call_id=call.call_id, end=end), is_bulk=call.field in BULK)

    async def _serve(self, call: _Call) -> None:
        method = METHODS[call.field]
        behaviour: Any = getattr(self._servicer, method.name)
        requests = self._requests(call, is_strict=method.name in RULES.strict)
        async with aclosing(requests):
            if call.field == _STREAMS_REQUESTS:
                request: Any = requests
            else:
                request = await anext(requests)
            if call.field not in _STREAMS_ANSWERS:
                self._send(call, await behaviour(request, None))
                return
            async with aclosing(behaviour(request, None)) as answers:
                async for answer in answers:
                    await call.allowance.spend(weight(answer))
                    self._send(call, answer)

    async def _requests(self, call: _Call, *, is_strict: bool) -> AsyncGenerator[Any, None]:
        async for request in call.inbox.messages():
            if is_strict:
                check_fields_known(request)
            credit = gateway_pb2.Credit(bytes=weight(request))
            self._outbox.put(gateway_pb2.AttachRequest(call_id=call.call_id, credit=credit))
            yield request

    def _send(self, call: _Call, answer: Any) -> None:
        frame = gateway_pb2.AttachRequest(call_id=call.call_id)
        getattr(frame, call.field).CopyFrom(answer)
        # A message without fields is still there.
        getattr(frame, call.field).SetInParent()
        self._outbox.put(frame, is_bulk=call.field in BULK)


class _Call:
    task: asyncio.Task[None]

    def __init__(self, call_id: int, field: str) -> None:
        self.call_id = call_id
        self.field = field
        self.inbox: Inbox[Any] = Inbox()
        self.allowance = Allowance()


async def stay_attached(
    address: str,
    servicer: OperationManagerServicer,
    info: server_pb2.ServerInfo,
    *,
    token: str = "",
    tls: ClientTls | None = None,
) -> None:
    """Attach to the coordinator at an address, and again after each break, until cancelled.

    Raises:
        InvalidArgumentError: INVALID_ADDRESS.
        FailedPreconditionError: TLS_FILE_UNREADABLE, TOKEN_IN_CLEAR_TEXT.
    """
    async with open_channel(address, token=token, tls=tls) as channel:
        stub = gateway_grpc.OperationManagerGatewayServiceStub(channel)
        pauses = pauses_s()
        while True:
            server = AttachedServer(servicer)
            outgoing = server.outgoing(gateway_pb2.AttachHello(info=info))
            call: Any = stub.Attach(outgoing, wait_for_ready=True)
            pause_s = next(pauses)
            try:
                frames = aiter(call)
                accepted = await anext(frames, None)
                if accepted is not None:
                    logger.info("attached", extra={"address": address, "manager_name": accepted.accepted.manager_name})
                    pauses = pauses_s()
                    await server.run(frames)
                logger.warning("attachment ended", extra={"address": address})
            except (grpc.aio.AioRpcError, HarnessError) as err:
                error = from_rpc_error(err) if isinstance(err, grpc.aio.AioRpcError) else err
                logger.warning(
                    "attachment ended", extra={"address": address, "reason": error.reason, "error": error.message}
                )
                pause_s = _REPLACED_PAUSE_S if error.reason == _REPLACED else pause_s
            finally:
                call.cancel()
            await asyncio.sleep(pause_s)
