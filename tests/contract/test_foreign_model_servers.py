"""The adapters against model servers that others wrote, over real HTTP, in every wire format, streaming and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from llm_mock_api import MockServer, MockServerOptions
from llm_mock_api.types.reply import ReplyObject
from llm_mock_api.types.reply import ToolCall as MockedCall
from llmock.pytest_plugin import LLMock

from harness.clock import SystemClock
from harness.llm import AttemptFailed, Completed, LLMError
from harness.llm.http_stream import HttpAdapter
from harness.llm.request_parts import Quirks
from harness.llm.retry import RetryPolicy
from tests.support.llm import (
    WIRE_FORMATS,
    assistant,
    calls_of,
    collect,
    http_adapter,
    image_part,
    request,
    result,
    text_of,
    user,
)
from unreal_agent.llm.v1 import llm_pb2

all_formats = pytest.mark.parametrize("wire_format", WIRE_FORMATS)
both_ways = pytest.mark.parametrize("streams", [True, False], ids=["streaming", "whole"])
QUICK = RetryPolicy(attempts=4, first_delay_s=0.05, max_delay_s=2.0)


def adapter_for(wire_format: str, base_url: str, *, streams: bool = True, retries: RetryPolicy = QUICK) -> HttpAdapter:
    """Return an adapter that waits in real time, as a real server expects."""
    return http_adapter(
        wire_format,
        base_url,
        clock=SystemClock(),
        sleep=asyncio.sleep,
        retries=retries,
        quirks=Quirks(
            streams=streams, key_header="x-api-key" if wire_format == "anthropic-messages" else "authorization"
        ),
    )


def llmock_url(server: LLMock, wire_format: str) -> str:
    return server.base_url("anthropic" if wire_format == "anthropic-messages" else "openai")


async def asked(adapter: HttpAdapter, *entries: llm_pb2.ContextEntry) -> tuple[list[Any], llm_pb2.ModelOutput]:
    try:
        return await collect(adapter, request(*entries, model="gpt-4o"))
    finally:
        await adapter.aclose()


@pytest.fixture
async def mock_server() -> AsyncIterator[MockServer]:
    async with MockServer(MockServerOptions(default_latency=0, default_chunk_size=9, log_level="none")) as server:
        yield server


@both_ways
@all_formats
async def test_one_server_answers_in_text(mock_server: MockServer, wire_format: str, streams: bool) -> None:
    mock_server.when("hello").reply("Crème 世界 👩‍👩‍👧, at your service")
    events, output = await asked(adapter_for(wire_format, f"{mock_server.url}/v1", streams=streams))
    assert text_of(output) == "Crème 世界 👩‍👩‍👧, at your service"
    assert output.stop_reason == llm_pb2.STOP_REASON_COMPLETE
    assert output.usage.input_tokens > 0
    assert isinstance(events[-1], Completed)


@both_ways
@all_formats
async def test_one_server_takes_the_results_of_parallel_calls(
    mock_server: MockServer, wire_format: str, streams: bool
) -> None:
    calls = [MockedCall(name="Bash", args={"command": "ls -a"}), MockedCall(name="Bash", args={"command": "pwd 世"})]
    mock_server.when("go").reply(ReplyObject(text="Looking.", tools=calls))
    base_url = f"{mock_server.url}/v1"
    _, first = await asked(adapter_for(wire_format, base_url, streams=streams), user("go"))
    made = calls_of(first)
    assert text_of(first) == "Looking."
    assert [(name, json.loads(arguments)["command"]) for _, name, arguments in made] == [
        ("Bash", "ls -a"),
        ("Bash", "pwd 世"),
    ]
    results = [result(call_id, "done", image_part()) for call_id, _, _ in made]
    mock_server.reset()
    mock_server.fallback("All done.")
    second = await asked(
        adapter_for(wire_format, base_url, streams=streams), user("go"), assistant(*first.items), *results, user("now?")
    )
    assert text_of(second[1]) == "All done."


@all_formats
async def test_one_server_thinks_aloud(mock_server: MockServer, wire_format: str) -> None:
    mock_server.when("hello").reply(ReplyObject(text="Hi.", reasoning="A greeting."))
    _, output = await asked(adapter_for(wire_format, f"{mock_server.url}/v1"))
    assert text_of(output) == "Hi."
    if wire_format != "openai-chat":
        assert [item.reasoning.summary for item in output.items if item.HasField("reasoning")] == ["A greeting."]


@all_formats
async def test_one_server_fails_once(mock_server: MockServer, wire_format: str) -> None:
    mock_server.next_error(529, "overloaded")
    mock_server.when("hello").reply("ok")
    _, output = await asked(adapter_for(wire_format, f"{mock_server.url}/v1"))
    assert [attempt.failure.error_class for attempt in output.attempts] == [llm_pb2.ERROR_CLASS_OVERLOAD, 0]
    assert text_of(output) == "ok"


@both_ways
@all_formats
async def test_another_server_answers_and_calls(llmock: LLMock, wire_format: str, streams: bool) -> None:
    llmock.reply("It is sunny.").call_tool("Bash", {"command": "date"}, text="Looking.")
    base_url = llmock_url(llmock, wire_format)
    _, said = await asked(adapter_for(wire_format, base_url, streams=streams))
    _, called = await asked(adapter_for(wire_format, base_url, streams=streams), user("and now?"))
    assert (text_of(said), said.stop_reason) == ("It is sunny.", llm_pb2.STOP_REASON_COMPLETE)
    assert [(name, arguments.replace(" ", "")) for _, name, arguments in calls_of(called)] == [
        ("Bash", '{"command":"date"}')
    ]
    assert min(said.usage.input_tokens, said.usage.output_tokens) > 0
    llmock.assert_resilient()


@all_formats
async def test_another_server_finds_that_failures_are_survived(llmock: LLMock, wire_format: str) -> None:
    """It judges by its own record: waits, repetitions, broken streams."""
    llmock.rate_limit(times=1, retry_after=0.2).fail(503).disconnect(after_chunks=1)
    _, output = await asked(adapter_for(wire_format, llmock_url(llmock, wire_format)))
    classes = [llm_pb2.ErrorClass.Name(attempt.failure.error_class) for attempt in output.attempts]
    assert classes == [
        "ERROR_CLASS_RATE_LIMIT",
        "ERROR_CLASS_OVERLOAD",
        "ERROR_CLASS_CONNECTION",
        "ERROR_CLASS_UNSPECIFIED",
    ]
    llmock.assert_resilient()


@all_formats
async def test_another_servers_truncated_stream_is_no_answer(llmock: LLMock, wire_format: str) -> None:
    llmock.truncate(after_chunks=2)
    events, output = await asked(adapter_for(wire_format, llmock_url(llmock, wire_format)))
    (failed,) = [event for event in events if isinstance(event, AttemptFailed)]
    assert failed.attempt.failure.error_class == llm_pb2.ERROR_CLASS_CONNECTION
    assert len(output.attempts) == 2
    llmock.assert_resilient()


@all_formats
@pytest.mark.parametrize(
    ("status", "code", "error_class"),
    [
        (401, None, llm_pb2.ERROR_CLASS_AUTHENTICATION),
        (403, None, llm_pb2.ERROR_CLASS_PERMISSION),
        (404, None, llm_pb2.ERROR_CLASS_INVALID_REQUEST),
        (400, "context_length_exceeded", llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW),
    ],
)
async def test_another_servers_refusals_are_final(
    llmock: LLMock, wire_format: str, status: int, code: str | None, error_class: llm_pb2.ErrorClass.ValueType
) -> None:
    if code is None:
        llmock.fail(status)
    else:
        llmock.context_overflow()
    with pytest.raises(LLMError) as caught:
        await asked(adapter_for(wire_format, llmock_url(llmock, wire_format)))
    assert caught.value.failure.error_class == error_class
    assert len(caught.value.attempts) == 1
    llmock.assert_resilient()
