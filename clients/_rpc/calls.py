"""Calls of our servers: errors as the library's own, repeated where that is harmless, cancelled when closed."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Final, Generic, TypeVar

import grpc

from clients._rpc.status import CONNECTION_LOST, DRAINING, SERVER_BUSY, from_rpc_error
from harness.errors import DeadlineExceededError, HarnessError, ResourceExhaustedError, UnavailableError

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

REQUEST_ID_KEY: Final = "x-request-id"
"""Metadata by which a call is found in the logs of both sides."""

CLIENT_CLOSED: Final = "CLIENT_CLOSED"
"""Reason where this side closed the channel during a call."""

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
# A service that is started again is there within half a second: doubling would often sleep as long once more.
_GROWTH: Final = 1.5

# The server is gone or going and another, or the same again, may come. Every other UNAVAILABLE is an answer that the
# caller must know of, for example that a session is owned elsewhere.
_GONE_REASONS: Final = frozenset({CONNECTION_LOST, DRAINING, "STORE_CLOSED", "MANAGER_CLOSED"})


def is_gone(error: BaseException) -> bool:
    """Return whether nobody answered, or a server that stops did: the same request may be sent again later."""
    return isinstance(error, UnavailableError) and error.reason in _GONE_REASONS


def pauses_s() -> Iterator[float]:
    """Yield endless pauses between attempts: growing up to 2 s, with jitter."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(pause_s * _GROWTH, _LONGEST_PAUSE_S)


class Source(Generic[RequestT]):
    """What a caller sends. gRPC would swallow an error of it: it is kept, to be raised in the place of gRPC's own."""

    def __init__(self, requests: AsyncIterator[RequestT]) -> None:
        self._requests = requests
        self.failure: Exception | None = None

    async def frames(self) -> AsyncIterator[RequestT]:
        """Yield the requests; made once."""
        try:
            async for request in self._requests:
                yield request
        except Exception as error:
            self.failure = error
            raise


async def unary(
    method: Callable[..., Awaitable[ResponseT]],
    request: Any,
    *,
    timeout_s: float,
    is_idempotent: bool,
    wait_for_ready: bool = True,
) -> ResponseT:
    """Call a method with one answer.

    Args:
        method: A stub's method.
        request: A message; for a method that takes a stream, a function that makes its async iterator afresh.
        timeout_s: For the whole, repetitions and waiting for the server included.
        is_idempotent: True where sending the request again is harmless: it reads, or carries an ID of the caller's.
            Then a lost connection is made up for until the time is over.
        wait_for_ready: False fails at once where the server is not there.

    Raises:
        HarnessError: What the server answered. UnavailableError/CONNECTION_LOST where it was lost on the way,
            DeadlineExceededError where it was not reached or did not answer in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    lost: HarnessError | None = None
    for pause_s in pauses_s():
        try:
            return await _attempt(method, request, max(deadline - loop.time(), 0.001), wait_for_ready)
        except DeadlineExceededError:
            if lost is not None:
                # The server went away first: that is what the caller needs to know.
                raise lost from None
            raise
        except (UnavailableError, ResourceExhaustedError) as error:
            # A busy server did nothing, so that repeating is harmless whatever the request is.
            is_busy = error.reason == SERVER_BUSY
            if not is_busy and not (is_idempotent and wait_for_ready and is_gone(error)):
                raise
            pause_s = max(pause_s, error.retry_after_s or 0) if is_busy else pause_s
            if loop.time() + pause_s >= deadline:
                raise
            lost = error
        await asyncio.sleep(pause_s)
    raise AssertionError("pauses never end")


async def server_stream(
    method: Callable[..., Any],
    request: Any,
    *,
    timeout_s: float | None = None,
    wait_for_ready: bool = True,
) -> AsyncIterator[Any]:
    """Call a method with many answers and yield them; closing the generator cancels the call.

    Nothing is repeated: only the caller knows where to resume.

    Args:
        method: A stub's method.
        request: As for `unary`.
        timeout_s: For the whole stream, waiting for the server included; None: for ever.
        wait_for_ready: False fails at once where the server is not there.

    Raises:
        HarnessError: As `unary` does.
    """
    call = None
    try:
        call = method(
            request() if callable(request) else request,
            timeout=timeout_s,
            metadata=((REQUEST_ID_KEY, uuid.uuid4().hex),),
            wait_for_ready=wait_for_ready,
        )
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as err:
        raise from_rpc_error(err) from err
    except grpc.aio.UsageError as err:
        raise _closed_error() from err
    except asyncio.CancelledError:
        if _is_cancelled_from_outside():
            raise
        raise _closed_error() from None
    finally:
        if call is not None:
            call.cancel()


async def _attempt(
    method: Callable[..., Awaitable[ResponseT]], request: Any, timeout_s: float, wait_for_ready: bool
) -> ResponseT:
    try:
        return await method(
            request() if callable(request) else request,
            timeout=timeout_s,
            metadata=((REQUEST_ID_KEY, uuid.uuid4().hex),),
            wait_for_ready=wait_for_ready,
        )
    except grpc.aio.AioRpcError as err:
        raise from_rpc_error(err) from err
    except grpc.aio.UsageError as err:
        raise _closed_error() from err
    except asyncio.CancelledError:
        if _is_cancelled_from_outside():
            raise
        raise _closed_error() from None


def _is_cancelled_from_outside() -> bool:
    """Return whether the caller is cancelled; else gRPC raised CancelledError because the channel was closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _closed_error() -> UnavailableError:
    return UnavailableError("the client was closed during the call", reason=CLIENT_CLOSED)
