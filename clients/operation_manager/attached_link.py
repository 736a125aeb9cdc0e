"""Links to managers that can't be dialled: each carries calls over the stream that its manager opened.

A manager attaches, goes, and attaches again; a call waits a moment for it, as it would for a connection. When a stream
ends, every call on it fails as UNAVAILABLE, and no operation is concerned.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from itertools import count
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from clients._rpc.calls import CLIENT_CLOSED
from clients._rpc.status import CONNECTION_LOST, from_status
from clients.operation_manager.frames import BULK, FIELDS, Allowance, Inbox, Outbox, weight
from clients.operation_manager.links import Method
from harness.errors import DeadlineExceededError, HarnessError, UnavailableError
from harness.primitives.streams import closing
from unreal_agent.gateway.v1 import operation_manager_gateway_service_pb2 as gateway_pb2

ATTACH_PATIENCE_S: Final = 30.0
"""How long a stream waits for its manager to attach."""

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


class Attachment:
    """One stream of an attached manager, on the side of the coordinator."""

    def __init__(self) -> None:
        self._outbox: Outbox[gateway_pb2.AttachResponse] = Outbox()
        self._calls: dict[int, _Call] = {}
        self._call_ids = count(1)
        self._is_ended = False

    def outgoing(self) -> AsyncGenerator[gateway_pb2.AttachResponse, None]:
        """Yield the frames to write to the manager until `end`; then raise its error."""
        return self._outbox.frames()

    def take(self, frame: gateway_pb2.AttachRequest) -> None:
        """Take in a frame of the manager; one of a call that is over is dropped.

        Raises:
            ResourceExhaustedError: CREDIT_EXCEEDED; the stream is to end.
        """
        call = self._calls.get(frame.call_id)
        if call is None:
            return
        kind = frame.WhichOneof("frame")
        if kind == "credit":
            call.allowance.grant(frame.credit.bytes)
        elif kind == "end":
            call.inbox.end(_error_of(frame.end))
        elif kind == call.field:
            call.inbox.put(getattr(frame, kind))

    def end(self, error: HarnessError) -> None:
        """End the stream, telling its writer why; every call in hand and to come fails as UNAVAILABLE."""
        self._is_ended = True
        self._outbox.end(error)
        for call in self._calls.values():
            call.inbox.end(lost_stream())

    async def call(self, method: Method[RequestT, ResponseT], request: RequestT) -> ResponseT:
        """Return the one answer of a method."""
        async with closing(self.stream(method, request)) as answers:
            async for answer in answers:
                return answer
        raise UnavailableError(f"the operation manager ended {method.name} without an answer", reason=CONNECTION_LOST)

    async def stream(self, method: Method[RequestT, ResponseT], request: RequestT) -> AsyncIterator[ResponseT]:
        """Yield the answers to one request."""
        with self._begun(method) as call:
            self._send(call, request)
            async with closing(self._answers(call)) as answers:
                async for answer in answers:
                    yield answer

    async def exchange(
        self, method: Method[RequestT, ResponseT], requests: AsyncIterator[RequestT]
    ) -> AsyncIterator[ResponseT]:
        """Yield the answers to many requests; what `requests` raises is raised here."""
        ended_by: BaseException | None = None
        with self._begun(method) as call:
            # This task never raises: its group would cancel the reader's task wherever that is.
            async with asyncio.TaskGroup() as tasks:
                sender = tasks.create_task(self._send_all(call, requests))
                try:
                    async with closing(self._answers(call)) as answers:
                        async for answer in answers:
                            yield answer
                except (Exception, GeneratorExit) as error:
                    ended_by = error
                finally:
                    sender.cancel()
        # Not within the group, which would wrap it.
        if ended_by is not None:
            raise ended_by

    @contextlib.contextmanager
    def _begun(self, method: Method[Any, Any]) -> Iterator[_Call]:
        if self._is_ended:
            raise lost_stream()
        call_id = next(self._call_ids)
        call = self._calls[call_id] = _Call(call_id, FIELDS[method.name])
        try:
            yield call
        finally:
            del self._calls[call_id]
            if not call.inbox.is_ended:
                self._outbox.put(gateway_pb2.AttachResponse(call_id=call_id, cancel=gateway_pb2.CallCancel()))

    async def _answers(self, call: _Call) -> AsyncIterator[Any]:
        async with closing(call.inbox.messages()) as messages:
            async for message in messages:
                credit = gateway_pb2.Credit(bytes=weight(message))
                self._outbox.put(gateway_pb2.AttachResponse(call_id=call.call_id, credit=credit))
                yield message

    async def _send_all(self, call: _Call, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                await call.allowance.spend(weight(request))
                self._send(call, request)
        # Whatever the caller's own iterator raises is the caller's to see.
        except Exception as error:
            call.inbox.end(error)
            self._outbox.put(gateway_pb2.AttachResponse(call_id=call.call_id, cancel=gateway_pb2.CallCancel()))
            return
        self._outbox.put(gateway_pb2.AttachResponse(call_id=call.call_id, end=gateway_pb2.CallEnd()))

    def _send(self, call: _Call, request: Message) -> None:
        frame = gateway_pb2.AttachResponse(call_id=call.call_id)
        getattr(frame, call.field).CopyFrom(request)
        # A message without fields is still there.
        getattr(frame, call.field).SetInParent()
        self._outbox.put(frame, is_bulk=call.field in BULK)


class _Call:
    def __init__(self, call_id: int, field: str) -> None:
        self.call_id = call_id
        self.field = field
        self.inbox: Inbox[Any] = Inbox()
        self.allowance = Allowance()


class AttachedLink:
    """The link to a manager of one name, over whichever stream it has attached by last."""

    def __init__(self, manager_name: str, *, attach_patience_s: float = ATTACH_PATIENCE_S) -> None:
        """Wait for the manager to attach.

        Args:
            manager_name: For errors.
            attach_patience_s: What a stream waits for the manager before it fails.
        """
        self.manager_name = manager_name
        self._attach_patience_s = attach_patience_s
        self._attachment: Attachment | None = None
        self._attached = asyncio.Event()
        self._is_closed = False

    @property
    def attachment(self) -> Attachment | None:
        """The stream by which the manager is reached; None where it is not attached."""
        return self._attachment

    def attach(self, attachment: Attachment) -> None:
        """Reach the manager by this stream from now on."""
        self._attachment = attachment
        self._attached.set()

    def detach(self, attachment: Attachment) -> None:
        """Take in that a stream is over; one that was replaced changes nothing."""
        if self._attachment is attachment:
            self._attachment = None
            self._attached.clear()

    async def call(self, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                while True:
                    attachment = await self._current()
                    try:
                        return await attachment.call(method, request)
                    except UnavailableError as error:
                        # Every such method may be sent again; what the manager itself refused stays refused.
                        if error.reason != CONNECTION_LOST or self._is_closed:
                            raise
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceededError(
                f"operation manager {self.manager_name!r} did not answer {method.name} within {timeout_s:g} s",
                reason="DEADLINE_EXCEEDED",
            ) from None

    async def stream(self, method: Method[RequestT, ResponseT], request: RequestT) -> AsyncIterator[ResponseT]:
        attachment = await self._current_soon()
        async with closing(attachment.stream(method, request)) as answers:
            async for answer in answers:
                yield answer

    async def exchange(
        self, method: Method[RequestT, ResponseT], requests: AsyncIterator[RequestT]
    ) -> AsyncIterator[ResponseT]:
        attachment = await self._current_soon()
        async with closing(attachment.exchange(method, requests)) as answers:
            async for answer in answers:
                yield answer

    async def aclose(self) -> None:
        self._is_closed = True
        self._attached.set()
        if self._attachment is not None:
            self._attachment.end(_closed())

    async def _current_soon(self) -> Attachment:
        try:
            async with asyncio.timeout(self._attach_patience_s):
                return await self._current()
        except TimeoutError:
            raise UnavailableError(
                f"operation manager {self.manager_name!r} is not attached", reason="MANAGER_NOT_ATTACHED"
            ) from None

    async def _current(self) -> Attachment:
        while self._attachment is None:
            if self._is_closed:
                raise _closed()
            await self._attached.wait()
        if self._is_closed:
            raise _closed()
        return self._attachment


def lost_stream() -> UnavailableError:
    """Return what ends the calls of a stream that broke."""
    return UnavailableError("the operation manager's stream ended", reason=CONNECTION_LOST)


def _closed() -> UnavailableError:
    return UnavailableError("the client was closed during the call", reason=CLIENT_CLOSED)


def _error_of(end: gateway_pb2.CallEnd) -> HarnessError | None:
    if not end.error_status:
        return None
    try:
        return from_status(status_pb2.Status.FromString(end.error_status))
    except DecodeError:
        return UnavailableError("the operation manager ended a call by a status that is none", reason=CONNECTION_LOST)
