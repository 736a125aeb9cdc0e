"""The one place where an adapter does I/O: connections, timeouts, retries, cancellation, and the wire format's events.

Owns everything between a request body and the stream of `LLMEvent`s; a `Dialect` translates, and knows no network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
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
from harness.llm.recording import Exchange, Recorder
from harness.llm.request_parts import load_blobs
from harness.llm.retry import RetryPolicy, Timeouts
from harness.llm.sse import MAX_EVENT_BYTES, ServerSentEvent, SSEDecoder, SSEError
from unreal_agent.llm.v1 import llm_pb2

logger = logging.getLogger(__name__)

MAX_ERROR_BODY_BYTES = 1024 * 1024
MAX_PAUSES = 20
"""Times that a provider may pause one answer (it does so to run tools of its own)."""

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

    key_header: str = "authorization"
    """Header that carries the key: `authorization` as a bearer token, any other as it is."""

    cache_key_header: str = ""
    """Header that carries the request's cache key; empty: none."""

    streams: bool = True
    """False: the server sends whole answers, whatever it calls them."""

    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers of every request."""

    secret_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Likewise, such as must be shown nowhere."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must be shown nowhere."""
        return (self.api_key, *self.secret_headers.values())


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """What is known of the attempt under way."""

    message: llm_pb2.Attempt
    fold: ResponseFold
    start_s: float
    exchanges: list[Exchange] = field(default_factory=list)


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
        recorder: Recorder | None = None,
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
            recorder: Keeps what was sent and answered; None: nothing is kept.
        """
        self._dialect = dialect
        self._endpoint = endpoint
        self._clock = clock
        self._timeouts = timeouts or Timeouts()
        self._retries = retries or RetryPolicy()
        self._random = random or Random()
        self._sleep = sleep
        self._recorder = recorder
        self._url = httpx.URL(dialect.url(endpoint.base_url))
        self._client = _client(endpoint.base_url, self._timeouts)

    async def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        """Ask the provider; see `LLMAdapter.respond`. Exceptions of `load_blob` pass through."""
        blobs = await load_blobs(request.entries, request.load_blob)
        headers = self._headers(request)
        done: list[llm_pb2.Attempt] = []
        exchanges: list[Exchange] = []
        while True:
            attempt = self._begin(len(done) + 1, exchanges)
            try:
                async with aclosing(self._attempt(attempt, request, blobs, headers)) as deltas:
                    async for delta in deltas:
                        yield delta
            except AttemptError as fault:
                try:
                    delay_s = self._fail(attempt, fault, done)
                except LLMError as error:
                    await self._record(request, exchanges, error.failure)
                    raise
            else:
                output = self._complete(attempt, done)
                await self._record(request, exchanges, output)
                yield Completed(output=output)
                return
            yield AttemptFailed(attempt=attempt.message, retry_delay_s=delay_s)
            await self._sleep(delay_s)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def _headers(self, request: LLMRequest) -> dict[str, str]:
        endpoint = self._endpoint
        headers = {"content-type": "application/json", "accept": "text/event-stream", "user-agent": "unreal-agent"}
        headers.update({**self._dialect.headers, **endpoint.headers, **endpoint.secret_headers})
        if endpoint.api_key:
            is_token = endpoint.key_header == "authorization"
            headers[endpoint.key_header] = f"Bearer {endpoint.api_key}" if is_token else endpoint.api_key
        if self._endpoint.cache_key_header and request.cache_key:
            headers[self._endpoint.cache_key_header] = request.cache_key
        return headers

    async def _record(
        self, request: LLMRequest, exchanges: Sequence[Exchange], outcome: llm_pb2.ModelOutput | llm_pb2.Failure
    ) -> None:
        if self._recorder is not None:
            await self._recorder.keep(request, exchanges, outcome, self._endpoint.secrets)

    def _begin(self, number: int, exchanges: list[Exchange]) -> _Attempt:
        message = llm_pb2.Attempt(number=number, start_time=timestamp(self._clock.now()))
        message.provider = self._endpoint.provider
        start_s = self._clock.monotonic_s()
        return _Attempt(message=message, fold=self._dialect.fold(number), start_s=start_s, exchanges=exchanges)

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
            secrets=self._endpoint.secrets,
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

    async def _attempt(
        self, attempt: _Attempt, request: LLMRequest, blobs: Mapping[str, bytes], headers: Mapping[str, str]
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one answer, asking on where the provider pauses; it begins anew with each attempt."""
        for _ in range(MAX_PAUSES + 1):
            body = self._dialect.body(request, blobs)
            async with aclosing(self._ask(attempt, body, headers)) as deltas:
                async for delta in deltas:
                    yield delta
            so_far = attempt.fold.resume()
            if so_far is None:
                return
            paused = llm_pb2.ContextEntry(assistant=llm_pb2.AssistantMessage(items=so_far))
            request = replace(request, entries=[*request.entries, paused])
        raise malformed(f"paused its answer more than {MAX_PAUSES} times")

    async def _ask(self, attempt: _Attempt, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[Delta, None]:
        """Send once, and yield deltas until the fold is whole and the stream has ended."""
        exchange = Exchange(url=str(self._url), headers=headers, body=body)
        if self._recorder is not None:
            attempt.exchanges.append(exchange)
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
            exchange.answered(response.status_code, response.headers)
            chunks = exchange.kept(response.aiter_bytes()) if self._recorder is not None else response.aiter_bytes()
            if response.status_code != HTTPStatus.OK:
                error_body = await self._read_body(chunks)
                raise error_of_response(response.status_code, response.headers, error_body, self._clock.now())
            media_type = response.headers.get("content-type", "").lower().partition(";")[0].strip()
            if media_type.endswith("html"):
                raise _not_an_answer(response.headers)
            if media_type.endswith("json") or not self._endpoint.streams:
                for delta in attempt.fold.feed_whole(await self._read_whole(chunks, first_byte_at)):
                    yield delta
                return
            async with aclosing(self._events(chunks, attempt.fold, first_byte_at)) as events:
                async for event in events:
                    for delta in attempt.fold.feed(event):
                        yield delta
        finally:
            await response.aclose()

    async def _events(
        self, chunks: AsyncIterator[bytes], fold: ResponseFold, first_byte_at: float
    ) -> AsyncGenerator[ServerSentEvent, None]:
        """Yield the stream's events until the fold has ended; once it is whole, nothing that breaks matters."""
        decoder = SSEDecoder()
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

    async def _read_whole(self, chunks: AsyncIterator[bytes], first_byte_at: float) -> str:
        """Return the text of a whole answer.

        Raises:
            AttemptError: It is too large, not UTF-8, or did not come in time.
        """
        content = bytearray()
        deadline, limit_s = first_byte_at, self._timeouts.first_byte_s
        while (chunk := await self._next_chunk(chunks, deadline, limit_s)) is not None:
            content += chunk
            if len(content) > MAX_EVENT_BYTES:
                raise malformed(f"sent an answer larger than {MAX_EVENT_BYTES} bytes")
            # A server that cannot stream may think between the headers and the body: the first limit holds until then.
            limit_s = self._timeouts.idle_s
            deadline = asyncio.get_running_loop().time() + limit_s
        try:
            return content.decode()
        except UnicodeDecodeError as err:
            raise malformed(f"sent an answer that is not UTF-8 at byte {err.start}") from None

    async def _read_body(self, chunks: AsyncIterator[bytes]) -> bytes:
        """Return the body of an error, as much of it as comes in time and fits the bound."""
        content = bytearray()
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                async for chunk in chunks:
                    content += chunk
                    if len(content) >= MAX_ERROR_BODY_BYTES:
                        break
        except (TimeoutError, httpx.HTTPError):
            pass
        return bytes(content[:MAX_ERROR_BODY_BYTES])

    def _request_id(self, headers: Mapping[str, str]) -> str:
        found = next((headers[name] for name in _REQUEST_ID_HEADERS if name in headers), "")
        return without_secrets(found, self._endpoint.secrets)[:200]

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


def _not_an_answer(headers: Mapping[str, str]) -> AttemptError:
    """Return the fault of a page at the wrong address."""
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
