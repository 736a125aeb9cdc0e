"""How adapters over HTTP wait, try again, stop and keep secrets, against a real server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from harness.clock import SystemClock
from harness.llm import AttemptFailed, LLMError, TextDelta
from harness.llm.http_stream import HttpAdapter
from harness.llm.providers import ProviderConfig, open_adapter
from harness.llm.retry import RetryPolicy, Timeouts
from tests.support.llm import (
    API_KEY,
    START_TIME,
    WIRE_FORMATS,
    ManualClock,
    RecordedSleep,
    collect,
    http_adapter,
    request,
    text_of,
)
from tests.support.provider import (
    Hang,
    Pause,
    Reply,
    ScriptedProvider,
    error_reply,
    scripted_provider,
    silent_listener,
)
from tests.support.provider_replies import event, stream_reply, text_piece, whole_stream
from unreal_agent.llm.v1 import llm_pb2

all_formats = pytest.mark.parametrize("wire_format", WIRE_FORMATS)
ONCE = RetryPolicy(attempts=1)


@asynccontextmanager
async def opened(
    wire_format: str, replies: Sequence[Reply], **members: Any
) -> AsyncIterator[tuple[HttpAdapter, ScriptedProvider]]:
    """Yield an adapter and the server that it asks."""
    async with scripted_provider(replies) as provider:
        adapter = http_adapter(wire_format, provider.base_url, **members)
        try:
            yield adapter, provider
        finally:
            await adapter.aclose()


async def failure_of(adapter: HttpAdapter) -> LLMError:
    with pytest.raises(LLMError) as caught:
        await collect(adapter, request())
    return caught.value


@all_formats
@pytest.mark.parametrize(
    "replies",
    [
        [Reply(before_headers=[Hang()])],
        [Reply(steps=[Hang()])],
        [Reply(steps=[b": keep-alive\n\n", Hang()])],
    ],
    ids=["before the headers", "before the first byte", "in the stream"],
)
async def test_cancelling_closes_the_connection_at_once(wire_format: str, replies: list[Reply]) -> None:
    async with opened(wire_format, replies) as (adapter, provider):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(adapter, request()))
            await provider.request_arrived.wait()
            task.cancel()
        async with asyncio.timeout(2):
            await provider.client_left.wait()
    assert (task.cancelled(), provider.disconnects) == (True, 1)


@all_formats
async def test_closing_the_generator_closes_the_connection_at_once(wire_format: str) -> None:
    replies = [Reply(steps=[text_piece(wire_format, "Hello"), Hang()])]
    async with opened(wire_format, replies) as (adapter, provider):
        async with aclosing(adapter.respond(request())) as stream:
            assert await anext(stream) == TextDelta(attempt=1, text="Hello")
        async with asyncio.timeout(2):
            await provider.client_left.wait()


@all_formats
async def test_cancelling_while_connecting_ends_at_once(wire_format: str) -> None:
    with silent_listener() as base_url:
        adapter = http_adapter(wire_format, base_url)
        async with asyncio.timeout(2), asyncio.TaskGroup() as group:
            task = group.create_task(collect(adapter, request()))
            await asyncio.sleep(0.01)
            task.cancel()
        await adapter.aclose()
    assert task.cancelled()


@all_formats
async def test_cancelling_a_back_off_ends_at_once(wire_format: str) -> None:
    is_waiting = asyncio.Event()

    async def wait_for_ever(_: float) -> None:
        is_waiting.set()
        await asyncio.Event().wait()

    async with opened(wire_format, [error_reply(503, {})], sleep=wait_for_ever) as (adapter, provider):
        async with asyncio.timeout(2), asyncio.TaskGroup() as group:
            task = group.create_task(collect(adapter, request()))
            await is_waiting.wait()
            task.cancel()
        assert (task.cancelled(), len(provider.requests)) == (True, 1)


@all_formats
async def test_a_cancelled_adapter_serves_the_next_request(wire_format: str) -> None:
    replies = [Reply(steps=[Hang()]), stream_reply(whole_stream(wire_format, "ok"))]
    async with opened(wire_format, replies) as (adapter, provider):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(adapter, request()))
            await provider.request_arrived.wait()
            task.cancel()
        _, output = await collect(adapter, request())
    assert text_of(output) == "ok"


@all_formats
@pytest.mark.parametrize(
    ("steps", "timeouts", "words"),
    [
        ([Hang()], Timeouts(first_byte_s=0.05), "sent nothing for 0.05 s"),
        ([b": ping\n\n", Hang()], Timeouts(idle_s=0.05), "sent nothing for 0.05 s"),
    ],
)
async def test_silence_is_a_timeout(wire_format: str, steps: list[Any], timeouts: Timeouts, words: str) -> None:
    async with opened(wire_format, [Reply(steps=steps)], timeouts=timeouts, retries=ONCE) as (adapter, provider):
        error = await failure_of(adapter)
        async with asyncio.timeout(2):
            await provider.client_left.wait()
    assert (error.failure.error_class, words in error.failure.message) == (llm_pb2.ERROR_CLASS_TIMEOUT, True)


@all_formats
async def test_headers_that_never_come_are_a_timeout(wire_format: str) -> None:
    replies = [Reply(before_headers=[Hang()])]
    async with opened(wire_format, replies, timeouts=Timeouts(first_byte_s=0.05), retries=ONCE) as (adapter, _):
        error = await failure_of(adapter)
    assert error.failure == llm_pb2.Failure(
        error_class=llm_pb2.ERROR_CLASS_TIMEOUT, message="acme sent nothing for 0.05 s"
    )


@all_formats
async def test_keep_alive_comments_hold_the_connection(wire_format: str) -> None:
    steps = [step for _ in range(6) for step in (b": ping\n\n", Pause(0.04))]
    replies = [Reply(steps=[*steps, whole_stream(wire_format, "ok")])]
    async with opened(wire_format, replies, timeouts=Timeouts(idle_s=0.15), retries=ONCE) as (adapter, _):
        _, output = await collect(adapter, request())
    assert text_of(output) == "ok"


@all_formats
async def test_a_server_that_does_not_accept_is_a_timeout(wire_format: str) -> None:
    with silent_listener() as base_url:
        adapter = http_adapter(wire_format, base_url, timeouts=Timeouts(connect_s=0.05), retries=ONCE)
        error = await failure_of(adapter)
        await adapter.aclose()
    assert error.failure.message == "acme could not be reached within 0.05 s (ConnectTimeout)"
    assert error.failure.error_class == llm_pb2.ERROR_CLASS_TIMEOUT


@all_formats
async def test_a_refused_connection_names_the_address(wire_format: str) -> None:
    async with scripted_provider([]) as provider:
        base_url = provider.base_url
    adapter = http_adapter(wire_format, base_url, retries=ONCE)
    error = await failure_of(adapter)
    await adapter.aclose()
    assert error.failure.error_class == llm_pb2.ERROR_CLASS_CONNECTION
    assert f"cannot be reached at {base_url}" in error.failure.message


@all_formats
@pytest.mark.parametrize(
    ("headers", "waited_s"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after-ms": "5500"}, 5.5),
        ({"retry-after": "Sun, 01 Mar 2026 12:00:20 GMT"}, 20.0),
    ],
)
async def test_the_providers_wait_is_kept(wire_format: str, headers: dict[str, str], waited_s: float) -> None:
    clock = ManualClock()
    sleep = RecordedSleep(clock)
    replies = [error_reply(429, {}, headers), stream_reply(whole_stream(wire_format, "ok"))]
    async with opened(wire_format, replies, clock=clock, sleep=sleep) as (adapter, _):
        events, output = await collect(adapter, request())
    assert (text_of(output), sleep.slept_s) == ("ok", [waited_s])
    (failed,) = [event for event in events if isinstance(event, AttemptFailed)]
    assert failed.retry_delay_s == waited_s
    start_times = [attempt.start_time.ToDatetime(START_TIME.tzinfo) for attempt in output.attempts]
    assert start_times == [START_TIME, START_TIME + timedelta(seconds=waited_s)]


@all_formats
async def test_a_long_wait_is_left_to_the_session(wire_format: str) -> None:
    clock = ManualClock()
    sleep = RecordedSleep(clock)
    async with opened(wire_format, [error_reply(429, {}, {"retry-after": "90"})], clock=clock, sleep=sleep) as (
        adapter,
        provider,
    ):
        error = await failure_of(adapter)
    assert (sleep.slept_s, len(provider.requests)) == ([], 1)
    assert error.failure.error_class == llm_pb2.ERROR_CLASS_RATE_LIMIT
    assert error.failure.retry_time.ToDatetime(START_TIME.tzinfo) == START_TIME + timedelta(seconds=90)


@all_formats
async def test_all_kinds_of_failure_share_one_limit(wire_format: str) -> None:
    replies = [
        error_reply(500, {}),
        stream_reply(text_piece(wire_format, "half")),
        Reply(before_headers=[Hang()]),
        stream_reply(event({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}})),
        error_reply(429, {}),
        stream_reply(whole_stream(wire_format, "too late")),
    ]
    async with opened(wire_format, replies, timeouts=Timeouts(first_byte_s=0.05)) as (adapter, provider):
        error = await failure_of(adapter)
    classes = [attempt.failure.error_class for attempt in error.attempts]
    assert classes == [
        llm_pb2.ERROR_CLASS_OVERLOAD,
        llm_pb2.ERROR_CLASS_CONNECTION,
        llm_pb2.ERROR_CLASS_TIMEOUT,
        llm_pb2.ERROR_CLASS_OVERLOAD,
        llm_pb2.ERROR_CLASS_RATE_LIMIT,
    ]
    assert len(provider.requests) == 5
    assert error.failure == error.attempts[-1].failure


LEAKS = [
    error_reply(401, {"error": {"message": f"Incorrect API key provided: {API_KEY}", "code": API_KEY}}),
    Reply(status=500, headers={"content-type": "text/html"}, steps=[f"<p>Bearer {API_KEY}</p>".encode()]),
    stream_reply(event({"type": "error", "error": {"message": f"key {API_KEY}", "type": API_KEY}})),
    stream_reply(f"data: {{{API_KEY}\n\n".encode()),
    Reply(status=400, headers={"x-request-id": API_KEY, "content-type": API_KEY}, steps=[API_KEY.encode()]),
    Reply(headers={"content-type": f"text/html; {API_KEY}"}),
]


@all_formats
@pytest.mark.parametrize("reply", LEAKS)
async def test_the_key_is_in_no_error_attempt_or_log(
    wire_format: str, reply: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with opened(wire_format, [reply], retries=ONCE) as (adapter, provider):
        error = await failure_of(adapter)
    assert provider.requests[0].headers["authorization"] == f"Bearer {API_KEY}"
    chain = [error, error.__cause__, error.__context__ if not error.__suppress_context__ else None]
    shown = [repr(link) for link in chain] + [str(error.failure), *(str(attempt) for attempt in error.attempts)]
    # What a server puts into its own headers, httpcore shows at DEBUG: not ours to redact.
    records = [record for record in caplog.records if not record.name.startswith("httpcore")]
    logged = [f"{record.getMessage()} {record.__dict__}" for record in records]
    assert any(record.name.startswith("harness") for record in records)
    assert API_KEY not in " ".join((*shown, *logged, repr(adapter), repr(vars(adapter))))


async def test_an_opened_provider_answers_over_http() -> None:
    """From configuration to answer, with real time."""
    async with scripted_provider(lambda _: stream_reply(whole_stream("openai-chat", "ok"))) as provider:
        for name, header in (("fireworks", "x-session-affinity"), ("openrouter", "x-session-id"), ("ollama", "")):
            config = ProviderConfig(provider=name, base_url=provider.base_url + "/", api_key="key-1")
            adapter = open_adapter(config, clock=SystemClock())
            _, output = await collect(adapter, request())
            await adapter.aclose()
            assert (text_of(output), output.provider) == ("ok", name)
            headers = provider.requests[-1].headers
            assert (headers.get(header) == "cache-1") is bool(header)
            assert "x-session-id" not in headers or name == "openrouter"
