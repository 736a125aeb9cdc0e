"""What happens around every call: errors become statuses, and calls are bounded, counted, logged and drained.

One interceptor does it all: each costs every call its own wrapping. It is a security boundary: without it the text of
any exception would reach the caller.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from clients._rpc.calls import REQUEST_ID_KEY
from clients._rpc.status import grpc_code, to_status, trailers_of
from harness.errors import DeadlineExceededError, HarnessError
from services._server.identity import CallFacts, IdentityHook, caller_var
from services._server.inflight import Call, CallsInHand, draining_error
from services._server.validation import (
    DEFAULT_REQUEST_BYTES,
    MethodRules,
    check_fields_known,
    check_size,
    undecodable,
)

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""ID of the call that the current task serves; log lines carry it."""

_MAX_REQUEST_ID_CHARS: Final = 64

MAX_CALL_S: Final = 120.0
"""What a call with one request and one answer may take where its caller sets no deadline, or a later one."""

MAX_UPLOAD_S: Final = 1800.0
"""The same for a call whose request is a stream."""

READ_ON_S: Final = 2.0
"""How long a stream of requests is read on after its call ended, so that its caller hears why."""


class _Undecodable:
    """Stands for a request that could not be decoded: gRPC would answer with the text of the exception."""

    def __init__(self, error: HarnessError) -> None:
        self.error = error


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of a server."""

    def __init__(
        self,
        calls: CallsInHand,
        rules_of_service: Mapping[str, MethodRules],
        identify: IdentityHook | None,
        open_services: frozenset[str] = frozenset(),
    ) -> None:
        self._calls = calls
        self._rules = rules_of_service
        self._identify = identify
        self._open_services = open_services
        """Services that anybody may call, whatever the identity hook says."""
        self._wrapped: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the wrapped handler of a method; None for one that is not here."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            service, _, name = method.lstrip("/").partition("/")
            rules = self._rules.get(service, MethodRules())
            identify = None if service in self._open_services else self._identify
            wrapped = _Handler(self._calls, method, name, rules, identify).wrap(handler)
            self._wrapped[method] = wrapped
        return wrapped


class _Handler:
    """One method's handler, wrapped."""

    def __init__(
        self, calls: CallsInHand, method: str, name: str, rules: MethodRules, identify: IdentityHook | None
    ) -> None:
        self._calls = calls
        self._method = method
        self._name = name
        self._max_bytes = rules.max_request_bytes.get(name, DEFAULT_REQUEST_BYTES)
        self._is_strict = name in rules.strict
        self._is_endless = name in rules.endless
        self._is_conversation = name in rules.conversations
        self._identify = identify

    def wrap(self, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler of the same kind."""
        deserialize, serialize = self._checked(handler.request_deserializer), handler.response_serializer
        if handler.request_streaming and handler.response_streaming:
            stream = self._streaming(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(stream, deserialize, serialize)
        if handler.response_streaming:
            stream = self._streaming(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(stream, deserialize, serialize)
        if handler.request_streaming:
            unary = self._answering(handler.stream_unary, MAX_UPLOAD_S)
            return grpc.stream_unary_rpc_method_handler(unary, deserialize, serialize)
        unary = self._answering(handler.unary_unary, MAX_CALL_S)
        return grpc.unary_unary_rpc_method_handler(unary, deserialize, serialize)

    def _checked(self, deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def checked(data: bytes) -> Any:
            try:
                check_size(len(data), self._max_bytes, self._method)
                return deserialize(data)
            except HarnessError as error:
                return _Undecodable(error)
            except (DecodeError, ValueError):
                return _Undecodable(undecodable(self._method))

        return checked

    def _answering(
        self, behaviour: Callable[..., Awaitable[Any]], max_s: float
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            with self._calls.enter(is_ended_by_drain=False) as call:
                outcome = _Outcome(self._calls, self._method, context)
                limit = asyncio.timeout(max_s)
                with outcome.logged():
                    try:
                        async with limit, self._incoming(request, call) as incoming:
                            await self._admit(context)
                            if incoming is not None:
                                return await behaviour(incoming, context)
                            with self._held(request):
                                return await behaviour(request, context)
                    except Exception as error:
                        if isinstance(error, TimeoutError) and limit.expired():
                            error = DeadlineExceededError(
                                f"the call took more than {max_s:.0f} s", reason="DEADLINE_EXCEEDED"
                            )
                        await outcome.abort(error)

        return answer

    def _streaming(self, behaviour: Callable[..., AsyncIterator[Any]]) -> Callable[[Any, Context], Awaitable[None]]:
        async def stream(request: Any, context: Context) -> None:
            with self._calls.enter(is_ended_by_drain=self._is_endless or self._is_conversation) as call:
                outcome = _Outcome(self._calls, self._method, context)
                with outcome.logged():
                    try:
                        async with self._incoming(request, call) as incoming:
                            await self._admit(context)
                            if incoming is None:
                                # Not for as long as the answers last: a watch may last for ever.
                                with self._held(request):
                                    incoming = request
                            with _until_caller_is_gone(call):
                                await self._send(behaviour(incoming, context), call, context)
                        if self._is_conversation and self._calls.is_draining:
                            raise draining_error()
                    except Exception as error:
                        await outcome.abort(error)

        return stream

    async def _send(self, responses: Any, call: Call, context: Context) -> None:
        # A write returns when the caller has taken enough: a slow reader holds one message, and no queue grows.
        async with aclosing(responses):
            while True:
                try:
                    waiting = anext(responses)
                    # Of a conversation it is the requests that end: the handler answers what it has and returns.
                    response = await (waiting if self._is_conversation else call.unless_ended(waiting))
                except StopAsyncIteration:
                    return
                await context.write(response)

    @asynccontextmanager
    async def _incoming(self, request: Any, call: Call) -> AsyncIterator[AsyncIterator[Any] | None]:
        """Provide the requests of a stream, None for a single one; read what is still sent before it is answered.

        Where a write meets an answer that came early, gRPC shows the caller a broken connection in place of the answer.
        """
        if isinstance(request, (Message, _Undecodable)):
            yield None
            return
        failure: Exception | None = None
        try:
            async with aclosing(self._requests(request, call)) as requests:
                yield requests
        except Exception as error:
            failure = error
        if not self._calls.is_draining:
            with suppress(TimeoutError):
                async with asyncio.timeout(READ_ON_S):
                    async for _ in request:
                        pass
        if failure is not None:
            raise failure

    async def _requests(self, requests: AsyncIterator[Any], call: Call) -> AsyncGenerator[Any, None]:
        incoming = call.requests_until_drain(aiter(requests)) if self._is_conversation else requests
        async for request in incoming:
            # The bytes are in hand until the handler asks for more.
            with self._held(request):
                yield request

    @contextmanager
    def _held(self, request: Any) -> Iterator[None]:
        if isinstance(request, _Undecodable):
            raise request.error
        if self._is_strict:
            check_fields_known(request)
        caller = caller_var.get()
        if caller is not None:
            caller.check(self._name, request)
        with self._calls.hold(request.ByteSize()):
            yield

    async def _admit(self, context: Context) -> None:
        """Name the call and its caller; refuse it where the server stops."""
        metadata = dict(context.invocation_metadata() or ())
        request_id = str(metadata.get(REQUEST_ID_KEY, ""))
        if not (0 < len(request_id) <= _MAX_REQUEST_ID_CHARS and request_id.isascii() and request_id.isprintable()):
            request_id = uuid.uuid4().hex
        request_id_var.set(request_id)
        logger.debug("call began", extra={"method": self._method, "peer": context.peer()})
        if self._calls.is_draining:
            raise draining_error()
        if self._identify is not None:
            facts = CallFacts(
                method=self._method, metadata=metadata, peer=context.peer(), peer_names=_peer_names(context)
            )
            caller_var.set(await self._identify(facts))


def _until_caller_is_gone(call: Call) -> AbstractContextManager[None]:
    caller = caller_var.get()
    return nullcontext() if caller is None else caller.until_gone(call.end)


class _Outcome:
    """How one call ended: told to the caller, counted and logged once."""

    def __init__(self, calls: CallsInHand, method: str, context: Context) -> None:
        self._calls = calls
        self._method = method
        self._context = context
        self._begin_s = time.monotonic()
        self._code = "OK"
        self._reason = ""

    @contextmanager
    def logged(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            self._code = "CANCELLED"
            raise
        finally:
            self._calls.finished[self._method, self._code] += 1
            fields = {"method": self._method, "code": self._code, "elapsed_s": self._elapsed_s()}
            if self._reason:
                fields["reason"] = self._reason
            logger.info("call ended", extra=fields)

    async def abort(self, error: Exception) -> None:
        """End the call with an error; what is none of ours is a bug and goes to the log whole."""
        request_id = request_id_var.get()
        if not isinstance(error, (HarnessError, TimeoutError)):
            logger.error("call failed by a fault", exc_info=error, extra={"method": self._method})
        status = to_status(error, request_id=request_id)
        code = grpc_code(status)
        self._code = code.name
        self._reason = error.reason if isinstance(error, HarnessError) else ""
        await self._context.abort(code, status.message, trailers_of(status))

    def _elapsed_s(self) -> float:
        return round(time.monotonic() - self._begin_s, 6)


def _peer_names(context: Context) -> tuple[str, ...]:
    return tuple(name.decode(errors="replace") for name in context.peer_identities() or ())
