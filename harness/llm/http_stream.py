"""The one place where an adapter does I/O: connections, timeouts, retries, cancellation, and the wire format's events.

Owns everything between a request body and the stream of `LLMEvent`s; a `Dialect` translates, and knows no network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import timedelta
from http import HTTPStatus
from ipaddress import ip_address
from random import Random
from urllib.parse import urlsplit

import httpx
from google.protobuf.duration_pb2 import Duration

from harness.clock import Clock, timestamp
from harness.llm import json_text
from harness.llm.dialect import Delta, Dialect, ResponseFold
from harness.llm.failures import (
    RETRIED,
    WAITED_FOR,
    AttemptError,
    ended_early,
    error_in_stream,
    error_of_response,
    failure_of,
    malformed,
    without_secrets,
)
from harness.llm.llm import (
    AttemptFailed,
    Completed,
    LLMError,
    LLMEvent,
    LLMRequest,
)
from harness.llm.request_parts import load_blobs
from harness.llm.retry import RetryPolicy, Timeouts
from harness.llm.sse import ServerSentEvent, SSEDecoder, SSEError
from unreal_agent.llm.v1 import llm_pb2

logger = logging.getLogger(__name__)

MAX_ERROR_BODY_BYTES = 1024 * 1024
DRAIN_S = 0.05
"""Wait for the end of a body whose answer is whole: a connection read to its end is used again."""

_REQUEST_ID_HEADERS = ("x-request-id", "request-id", "x-generation-id", "cf-ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Who is asked, and as whom. Its repr shows no credential."""

    provider: str
    base_url: str
    """Absolute, without query, user and trailing slash."""

    api_key: str = field(default="", repr=False)
    key_variable: str = ""
    """Environment variable that a person sets; only for messages."""

    cache_key_header: str = ""
    """Header that carries the request's cache key; empty: none."""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """What is known of the attempt under way."""

    message: llm_pb2.Attempt
    fold: ResponseFold
    start_s: float


class HttpAdapter:
    """An `LLMAdapter` over HTTP/1.1 with one connection pool, which the adapter owns."""

    def __init__(
        self,
        *,
        dialect: Dialect,
        endpoint: Endpoint,
        clock: Clock,
        timeouts: Timeouts | None = None,
        retries: RetryPolicy | None = None,
        random: Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Make the connection pool; nothing is sent.

        Args:
            dialect: The wire format.
            endpoint: Who is asked.
            clock: Start times, and Retry-After dates.
            timeouts: Bounds of an attempt.
            retries: How often to try.
            random: Jitter of the back-off.
            sleep: Waits between attempts; cancellation must reach it.
        """
        self._dialect = dialect
        self._endpoint = endpoint
        self._clock = clock
        self._timeouts = timeouts or Timeouts()
        self._retries = retries or RetryPolicy()
        self._random = random or Random()
        self._sleep = sleep
        self._url = httpx.URL(endpoint.base_url + dialect.path)
        self._client = _client(endpoint.base_url, self._timeouts)

    async def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        """Ask the provider; see `LLMAdapter.respond`. Exceptions of `load_blob` pass through."""
        body = self._dialect.body(request, await load_blobs(request.entries, request.load_blob))
        headers = self._headers(request)
        done: list[llm_pb2.Attempt] = []
        while True:
            attempt = self._begin(len(done) + 1)
            try:
                async with aclosing(self._attempt(attempt, body, headers)) as deltas:
                    async for delta in deltas:
                        yield delta
            except AttemptError as fault:
                delay_s = self._fail(attempt, fault, done)
            else:
                yield Completed(output=self._complete(attempt, done))
                return
            yield AttemptFailed(attempt=attempt.message, retry_delay_s=delay_s)
            await self._sleep(delay_s)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def _headers(self, request: LLMRequest) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept": "text/event-stream", "user-agent": "unreal-agent"}
        if self._endpoint.api_key:
            headers["authorization"] = f"Bearer {self._endpoint.api_key}"
        if self._endpoint.cache_key_header and request.cache_key:
            headers[self._endpoint.cache_key_header] = request.cache_key
        return headers

    def _begin(self, number: int) -> _Attempt:
        message = llm_pb2.Attempt(number=number, start_time=timestamp(self._clock.now()))
        message.provider = self._endpoint.provider
        return _Attempt(message=message, fold=self._dialect.fold(number), start_s=self._clock.monotonic_s())

    def _end(self, attempt: _Attempt) -> None:
        elapsed = Duration()
        elapsed.FromTimedelta(timedelta(seconds=self._clock.monotonic_s() - attempt.start_s))
        attempt.message.elapsed.CopyFrom(elapsed)
        usage = attempt.fold.usage()
        if usage is not None:
            attempt.message.usage.CopyFrom(usage)
        if attempt.fold.ignored:
            logger.debug("parts of a response were ignored", extra={"ignored": dict(attempt.fold.ignored)})

    def _complete(self, attempt: _Attempt, done: Sequence[llm_pb2.Attempt]) -> llm_pb2.ModelOutput:
        output = attempt.fold.output()
        self._end(attempt)
        output.attempts.extend((*done, attempt.message))
        output.provider = self._endpoint.provider
        return output

    def _fail(self, attempt: _Attempt, fault: AttemptError, done: list[llm_pb2.Attempt]) -> float:
        """Record a failed attempt and return the seconds until the next one.

        Raises:
            LLMError: No further attempt will be made.
        """
        failure = failure_of(
            fault,
            provider=self._endpoint.provider,
            key_variable=self._endpoint.key_variable,
            secrets=(self._endpoint.api_key,),
        )
        delay_s = None
        if fault.error_class in RETRIED:
            delay_s = self._retries.delay_s(attempt.message.number, fault.retry_after_s, self._random)
        wait_s = fault.retry_after_s
        if fault.error_class in WAITED_FOR:
            wait_s = self._retries.durable_wait_s(attempt.message.number, fault.retry_after_s)
        if fault.error_class in RETRIED and wait_s is not None:
            failure.retry_time.CopyFrom(timestamp(self._clock.now() + timedelta(seconds=wait_s)))
        self._end(attempt)
        attempt.message.failure.CopyFrom(failure)
        done.append(attempt.message)
        logger.warning(
            "model request attempt failed",
            extra={
                "provider": self._endpoint.provider,
                "attempt": attempt.message.number,
                "error_class": llm_pb2.ErrorClass.Name(fault.error_class),
                "http_status": failure.http_status,
                "retry_delay_s": delay_s,
            },
        )
        if delay_s is None:
            raise LLMError(failure, done) from None
        return delay_s

    async def _attempt(self, attempt: _Attempt, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[Delta, None]:
        """Send once, and yield deltas until the fold is whole and the stream has ended."""
        loop = asyncio.get_running_loop()
        first_byte_at = loop.time() + self._timeouts.first_byte_s
        request = self._client.build_request("POST", self._url, content=body, headers=headers)
        try:
            async with asyncio.timeout_at(first_byte_at):
                response = await self._client.send(request, stream=True)
        except TimeoutError:
            raise _silent(self._timeouts.first_byte_s) from None
        except httpx.HTTPError as err:
            raise self._transport_error(err) from None
        try:
            attempt.message.http_status = response.status_code
            attempt.message.provider_request_id = self._request_id(response.headers)
            if response.status_code != HTTPStatus.OK:
                raise error_of_response(
                    response.status_code, response.headers, await self._read_body(response), self._clock.now()
                )
            if response.headers.get("content-type", "").lower().partition(";")[0].strip().endswith(("json", "html")):
                raise _not_a_stream(response.headers, await self._read_body(response))
            async with aclosing(self._events(response, attempt.fold, first_byte_at)) as events:
                async for event in events:
                    for delta in attempt.fold.feed(event):
                        yield delta
        finally:
            await response.aclose()

    async def _events(
        self, response: httpx.Response, fold: ResponseFold, first_byte_at: float
    ) -> AsyncGenerator[ServerSentEvent, None]:
        """Yield the stream's events until the fold has ended; once it is whole, nothing that breaks matters."""
        decoder = SSEDecoder()
        chunks = response.aiter_bytes()
        loop = asyncio.get_running_loop()
        deadline, limit_s = first_byte_at, self._timeouts.first_byte_s
        try:
            while (chunk := await self._next_chunk(chunks, deadline, limit_s)) is not None:
                for event in decoder.feed(chunk):
                    yield event
                    if fold.is_ended:
                        await _drain(chunks)
                        return
                limit_s = self._timeouts.trailer_s if fold.is_whole else self._timeouts.idle_s
                deadline = loop.time() + limit_s
            leftover = decoder.finish()
            if leftover.event is not None and _is_complete_data(leftover.event.data):
                yield leftover.event
        except SSEError as err:
            if not fold.is_whole:
                raise malformed(f"sent a stream that cannot be decoded: {err}") from None
            return
        except AttemptError:
            if not fold.is_whole:
                raise
            return
        if not fold.is_whole:
            place = "inside a character" if leftover.is_inside_character else "before the answer was complete"
            if leftover.event is not None and not _is_complete_data(leftover.event.data):
                place = "inside an event"
            raise ended_early(f"ended the stream {place}")

    async def _next_chunk(self, chunks: AsyncIterator[bytes], deadline: float, limit_s: float) -> bytes | None:
        """Return the next chunk, or None at the end of the body.

        Raises:
            AttemptError: Nothing came in time, or the connection broke.
        """
        try:
            async with asyncio.timeout_at(deadline):
                return await anext(chunks, None)
        except TimeoutError:
            raise _silent(limit_s) from None
        except httpx.HTTPError as err:
            raise self._transport_error(err) from None

    async def _read_body(self, response: httpx.Response) -> bytes:
        """Return the body of an error, as much of it as comes in time and fits the bound."""
        content = bytearray()
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) >= MAX_ERROR_BODY_BYTES:
                        break
        except (TimeoutError, httpx.HTTPError):
            pass
        return bytes(content[:MAX_ERROR_BODY_BYTES])

    def _request_id(self, headers: Mapping[str, str]) -> str:
        found = next((headers[name] for name in _REQUEST_ID_HEADERS if name in headers), "")
        return without_secrets(found, (self._endpoint.api_key,))[:200]

    def _transport_error(self, err: httpx.HTTPError) -> AttemptError:
        kind = type(err).__name__
        text = f"{kind}: {err}" if str(err) else kind
        if isinstance(err, httpx.DecodingError):
            return malformed("sent a body whose content encoding is broken")
        if isinstance(err, httpx.TimeoutException):
            return AttemptError(
                llm_pb2.ERROR_CLASS_TIMEOUT, f"could not be reached within {self._timeouts.connect_s:g} s ({kind})"
            )
        if isinstance(err, httpx.ConnectError | httpx.ProxyError):
            return AttemptError(
                llm_pb2.ERROR_CLASS_CONNECTION, f"cannot be reached at {self._endpoint.base_url} ({text})"
            )
        if isinstance(err, httpx.LocalProtocolError | httpx.UnsupportedProtocol):
            return AttemptError(llm_pb2.ERROR_CLASS_INTERNAL, f"could not be sent the request ({kind})")
        return ended_early(f"closed the connection ({text})")


def _silent(seconds: float) -> AttemptError:
    return AttemptError(llm_pb2.ERROR_CLASS_TIMEOUT, f"sent nothing for {seconds:g} s")


def _not_a_stream(headers: Mapping[str, str], body: bytes) -> AttemptError:
    """Return the fault of a 200 answer that is no event stream: an error object, or the wrong address."""
    value = json_text.read_object(body.decode(errors="replace"))
    if value is not None and value.get("error"):
        return error_in_stream(value)
    kind = headers.get("content-type", "")
    return malformed(f"answered with {kind} where an event stream was asked for; check the base URL")


def _is_complete_data(data: str) -> bool:
    return data.strip() == "[DONE]" or json_text.read_object(data) is not None


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    try:
        async with asyncio.timeout(DRAIN_S):
            while await anext(chunks, None) is not None:
                pass
    except (TimeoutError, httpx.HTTPError):
        pass


def _client(base_url: str, timeouts: Timeouts) -> httpx.AsyncClient:
    address = urlsplit(base_url)
    return httpx.AsyncClient(
        # The environment names proxies and CA files; a server on this machine is never asked through a proxy.
        trust_env=not _is_loopback(address.hostname or ""),
        # Without TLS there is nothing to verify, and loading the CA certificates costs 30 ms.
        verify=address.scheme == "https",
        http1=True,
        follow_redirects=False,
        timeout=httpx.Timeout(None, connect=timeouts.connect_s, write=timeouts.idle_s),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=60.0),
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
