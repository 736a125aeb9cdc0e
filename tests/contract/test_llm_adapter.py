"""What every adapter over HTTP keeps, in every wire format, against a real server: answers, ends, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from harness.llm import AttemptFailed, Completed, LLMError, TextDelta
from harness.llm.request_parts import Quirks
from harness.llm.retry import RetryPolicy, Timeouts
from tests.support.llm import (
    API_KEY,
    WIRE_FORMATS,
    ManualClock,
    RecordedSleep,
    assistant,
    called,
    calls_of,
    collect,
    http_adapter,
    image_part,
    request,
    result,
    text_of,
    thought,
    user,
)
from tests.support.provider import (
    CloseUnfinished,
    Hang,
    Pause,
    Reply,
    Reset,
    Step,
    error_reply,
    gzipped,
    scripted_provider,
)
from tests.support.provider_replies import (
    DONE,
    MESSAGE_STOP,
    block_start,
    call_item,
    chat_chunk,
    event,
    message_end,
    message_item,
    message_start,
    named_event,
    stream_reply,
    terminal,
    text_piece,
    whole_stream,
)
from tests.support.request_rules import assert_legal
from tests.support.whole_answers import WHOLE
from unreal_agent.llm.v1 import llm_pb2

all_formats = pytest.mark.parametrize("wire_format", WIRE_FORMATS)
TEXT = "Crème 世界 👩‍👩‍👧 ok"
CALL = ("c1", "Bash", '{"command":"ls"}')


async def ask(
    wire_format: str, *replies: Reply, retries: RetryPolicy | None = None
) -> tuple[list[Any], llm_pb2.ModelOutput]:
    """Return the events and the response of one request to a server with these replies."""
    async with scripted_provider(replies) as provider:
        adapter = http_adapter(wire_format, provider.base_url, retries=retries)
        try:
            return await collect(adapter, request())
        finally:
            await adapter.aclose()
            assert len(provider.requests) == len(replies)
            assert len({recorded.body for recorded in provider.requests}) == 1


async def ask_in_vain(wire_format: str, *replies: Reply, retries: RetryPolicy | None = None) -> LLMError:
    with pytest.raises(LLMError) as caught:
        await ask(wire_format, *replies, retries=retries)
    return caught.value


ONCE = RetryPolicy(attempts=1)
PATHS = {
    "openai-responses": "/v1/responses",
    "openai-chat": "/v1/chat/completions",
    "anthropic-messages": "/v1/messages",
}


@all_formats
async def test_an_answer_arrives_whole_with_its_attempt(wire_format: str) -> None:
    reply = Reply(
        headers={"content-type": "text/event-stream; charset=utf-8", "x-request-id": "req-1"},
        steps=[whole_stream(wire_format, TEXT, [CALL])],
    )
    events, output = await ask(wire_format, reply)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == TEXT
    assert (text_of(output), calls_of(output), output.provider, output.model) == (TEXT, [CALL], "acme", "m-1")
    (attempt,) = output.attempts
    assert (attempt.number, attempt.http_status, attempt.provider, attempt.provider_request_id) == (
        1,
        200,
        "acme",
        "req-1",
    )
    assert (attempt.usage.input_tokens, attempt.HasField("failure")) == (11, False)
    assert [isinstance(event, Completed) for event in events] == [False] * (len(events) - 1) + [True]


@all_formats
async def test_the_request_is_sent_as_the_format_demands(wire_format: str) -> None:
    async with scripted_provider([stream_reply(whole_stream(wire_format, "ok"))]) as provider:
        adapter = http_adapter(wire_format, provider.base_url)
        await collect(adapter, request())
        await adapter.aclose()
    (recorded,) = provider.requests
    assert (recorded.method, recorded.path) == ("POST", PATHS[wire_format])
    assert recorded.headers["authorization"] == f"Bearer {API_KEY}"
    assert recorded.headers["content-type"] == "application/json"
    assert_legal(recorded.body)


@all_formats
async def test_one_byte_per_chunk_and_compression_change_nothing(wire_format: str) -> None:
    stream = whole_stream(wire_format, TEXT, [CALL])
    whole = (await ask(wire_format, stream_reply(stream)))[1]
    bytewise = (await ask(wire_format, stream_reply(*(stream[at : at + 1] for at in range(len(stream))))))[1]
    packed = (await ask(wire_format, gzipped(stream)))[1]
    assert whole == bytewise == packed


@all_formats
@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "before the answer was complete"),
        (["text"], "before the answer was complete"),
        (["call"], "before the answer was complete"),
        (["text", b'data: {"half'], "inside an event"),
        (["text", b'data: {"half": "caf\xc3'], "inside a character"),
        (["text", CloseUnfinished()], "closed the connection"),
        (["text", Reset()], "closed the connection"),
    ],
)
async def test_a_stream_that_breaks_off_is_a_connection_failure(
    wire_format: str, steps: Sequence[Step | str], words: str
) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "Bash", "arguments": "{}"}}
    pieces: dict[str, Step] = {
        "text": text_piece(wire_format, "some"),
        "call": {
            "openai-responses": named_event(
                {"type": "response.output_item.done", "output_index": 0, "item": call_item("c1", "B", "{}")}
            ),
            "openai-chat": chat_chunk({"tool_calls": [call]}),
            "anthropic-messages": block_start(0, {"type": "tool_use", "id": "c1", "name": "B", "input": {}})
            + named_event({"type": "content_block_stop", "index": 0}),
        }[wire_format],
    }
    broken = Reply(steps=[pieces[step] if isinstance(step, str) else step for step in steps])
    error = await ask_in_vain(wire_format, broken, retries=ONCE)
    assert error.failure.error_class == llm_pb2.ERROR_CLASS_CONNECTION
    assert words in error.failure.message
    events, output = await ask(wire_format, broken, stream_reply(whole_stream(wire_format, "fresh")))
    assert text_of(output) == "fresh"
    assert [attempt.HasField("failure") for attempt in output.attempts] == [True, False]
    assert [event.attempt.number for event in events if isinstance(event, AttemptFailed)] == [1]


@pytest.mark.parametrize(
    ("wire_format", "steps"),
    [
        ("openai-chat", [chat_chunk({"content": "ok"}, "stop")]),
        ("openai-chat", [chat_chunk({"content": "ok"}, "stop"), CloseUnfinished()]),
        ("openai-chat", [chat_chunk({"content": "ok"}, "stop").rstrip()]),
        ("openai-chat", [chat_chunk({"content": "ok"}, "stop"), b"data: {broken\n\ndata: \xff\n\n"]),
        ("openai-chat", [chat_chunk({"content": "ok"}, "stop"), DONE, b"garbage", CloseUnfinished()]),
        ("anthropic-messages", [text_piece("anthropic-messages", "ok"), message_end("end_turn")]),
        ("anthropic-messages", [text_piece("anthropic-messages", "ok"), message_end("end_turn"), CloseUnfinished()]),
        ("anthropic-messages", [text_piece("anthropic-messages", "ok"), message_end("end_turn"), b"data: {no\n\n"]),
        ("anthropic-messages", [text_piece("anthropic-messages", "ok"), message_end("end_turn").rstrip()]),
        ("anthropic-messages", [text_piece("anthropic-messages", "ok"), message_end("end_turn"), MESSAGE_STOP, Hang()]),
        ("openai-responses", [terminal("completed", [message_item("ok")]), b"garbage \xff", Reset()]),
        ("openai-responses", [terminal("completed", [message_item("ok")]).rstrip()]),
        ("openai-responses", [terminal("completed", [message_item("ok")]), Hang()]),
    ],
)
async def test_a_whole_answer_stands_whatever_follows(wire_format: str, steps: Sequence[Step]) -> None:
    _, output = await ask(wire_format, Reply(steps=steps))
    assert (text_of(output), output.stop_reason) == ("ok", llm_pb2.STOP_REASON_COMPLETE)


async def test_a_whole_chat_answer_does_not_wait_for_usage_for_ever() -> None:
    async with scripted_provider([Reply(steps=[chat_chunk({"content": "ok"}, "stop"), Hang()])]) as provider:
        adapter = http_adapter("openai-chat", provider.base_url, timeouts=Timeouts(trailer_s=0.05))
        _, output = await collect(adapter, request())
        await adapter.aclose()
    assert text_of(output) == "ok"


async def test_an_incomplete_response_is_length_limited() -> None:
    reply = stream_reply(
        terminal("incomplete", [message_item("ok")], incomplete_details={"reason": "max_output_tokens"})
    )
    _, output = await ask("openai-responses", reply)
    assert (text_of(output), output.stop_reason) == ("ok", llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS)


IN_STREAM_ERRORS = [
    ("openai-responses", named_event({"type": "error", "code": "server_is_overloaded", "message": "busy"}), "OVERLOAD"),
    (
        "openai-responses",
        terminal("failed", [], error={"code": "rate_limit_exceeded", "message": "slow down"}),
        "RATE_LIMIT",
    ),
    ("openai-chat", event({"error": {"message": "busy", "type": "overloaded_error"}}), "OVERLOAD"),
    (
        "anthropic-messages",
        named_event({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
        "OVERLOAD",
    ),
    (
        "anthropic-messages",
        named_event({"type": "error", "error": {"type": "rate_limit_error", "message": "slower"}}),
        "RATE_LIMIT",
    ),
    ("openai-chat", event({"error": {"message": "Overloaded", "code": 529}, "choices": []}), "OVERLOAD"),
]


@pytest.mark.parametrize("has_text", [False, True])
@pytest.mark.parametrize(("wire_format", "sent", "error_class"), IN_STREAM_ERRORS)
async def test_a_transient_error_inside_a_stream_is_retried(
    wire_format: str, sent: bytes, error_class: str, has_text: bool
) -> None:
    broken = stream_reply(*([text_piece(wire_format, "half an ans")] if has_text else []), sent)
    events, output = await ask(wire_format, broken, stream_reply(whole_stream(wire_format, "whole")))
    assert text_of(output) == "whole"
    first = [event.text for event in events if isinstance(event, TextDelta) and event.attempt == 1]
    second = [event.text for event in events if isinstance(event, TextDelta) and event.attempt == 2]
    assert ("".join(first), "".join(second)) == ("half an ans" if has_text else "", "whole")
    (failed,) = [event for event in events if isinstance(event, AttemptFailed)]
    assert llm_pb2.ErrorClass.Name(failed.attempt.failure.error_class) == f"ERROR_CLASS_{error_class}"
    assert failed.attempt == output.attempts[0]


@all_formats
@pytest.mark.parametrize(
    ("status", "error_class"),
    [(529, "OVERLOAD"), (503, "OVERLOAD"), (500, "OVERLOAD"), (408, "TIMEOUT"), (429, "RATE_LIMIT")],
)
async def test_a_transient_status_is_retried(wire_format: str, status: int, error_class: str) -> None:
    replies = [error_reply(status, {"error": {"message": "later"}}), stream_reply(whole_stream(wire_format, "ok"))]
    _, output = await ask(wire_format, *replies)
    assert text_of(output) == "ok"
    failure = output.attempts[0].failure
    assert (llm_pb2.ErrorClass.Name(failure.error_class), failure.http_status) == (f"ERROR_CLASS_{error_class}", status)


@all_formats
@pytest.mark.parametrize(
    ("status", "error", "error_class"),
    [
        (401, {"code": "invalid_api_key", "message": "Bad key."}, "AUTHENTICATION"),
        (400, {"type": "invalid_request_error", "message": "Bad effort."}, "INVALID_REQUEST"),
        (402, {"message": "No credit."}, "QUOTA"),
        (429, {"code": "insufficient_quota", "message": "No quota."}, "QUOTA"),
        (403, {"message": "Not you."}, "PERMISSION"),
    ],
)
async def test_a_permanent_error_fails_at_once_with_the_providers_words(
    wire_format: str, status: int, error: dict[str, str], error_class: str
) -> None:
    raised = await ask_in_vain(wire_format, error_reply(status, {"error": error}))
    assert llm_pb2.ErrorClass.Name(raised.failure.error_class) == f"ERROR_CLASS_{error_class}"
    assert error["message"] in raised.failure.message
    assert raised.failure.HasField("retry_time") is False
    assert [attempt.failure for attempt in raised.attempts] == [raised.failure]


OVERFLOWS = [
    error_reply(400, {"error": {"code": "context_length_exceeded", "message": "too long"}}),
    error_reply(
        400, {"error": {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"}}
    ),
    Reply(status=413, headers={"content-type": "text/html"}, steps=[b"<h1>413 Request Entity Too Large</h1>"]),
    error_reply(400, {"error": {"code": "bad_request", "message": "exceeds the model's maximum context length"}}),
    error_reply(
        429, {"error": {"code": "rate_limit_exceeded", "message": "Request too large: Limit 10, Requested 99."}}
    ),
]


@all_formats
@pytest.mark.parametrize("reply", OVERFLOWS)
async def test_an_overflow_is_never_resent(wire_format: str, reply: Reply) -> None:
    error = await ask_in_vain(wire_format, reply)
    assert error.failure.error_class == llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW


@pytest.mark.parametrize(
    ("wire_format", "sent"),
    [
        ("openai-responses", terminal("failed", [], error={"code": "context_length_exceeded", "message": "long"})),
        ("openai-responses", named_event({"type": "error", "code": "context_length_exceeded", "message": "long"})),
        ("openai-chat", event({"error": {"code": "context_length_exceeded", "message": "long"}})),
        ("openai-chat", chat_chunk({}, "model_context_window_exceeded")),
        ("anthropic-messages", message_start() + message_end("model_context_window_exceeded")),
    ],
)
async def test_an_overflow_inside_a_stream_is_never_resent(wire_format: str, sent: bytes) -> None:
    error = await ask_in_vain(wire_format, stream_reply(sent))
    assert error.failure.error_class == llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW


@all_formats
@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (stream_reply(b"data: {broken\n\n"), "broken JSON in event 1"),
        (stream_reply(b": hi\n\ndata: \xff\n\n"), "event 1 is not UTF-8"),
        (Reply(headers={"content-type": "text/html"}, steps=[b"<html>login</html>"]), "check the base URL"),
        (Reply(headers={"content-type": "application/json"}, steps=[b'{"id": "x"}']), "check the base URL"),
        (
            Reply(headers={"content-type": "text/event-stream", "content-encoding": "gzip"}, steps=[b"no gzip at all"]),
            "content encoding",
        ),
    ],
)
async def test_an_answer_that_cannot_be_decoded_is_not_retried(wire_format: str, reply: Reply, words: str) -> None:
    error = await ask_in_vain(wire_format, reply)
    assert error.failure.error_class == llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE
    assert words in error.failure.message


@all_formats
async def test_an_error_object_in_a_plain_200_answer_is_classified(wire_format: str) -> None:
    replies = [error_reply(200, {"error": {"type": "overloaded_error", "message": "busy"}})]
    _, output = await ask(wire_format, *replies, stream_reply(whole_stream(wire_format, "ok")))
    assert output.attempts[0].failure.error_class == llm_pb2.ERROR_CLASS_OVERLOAD


@all_formats
async def test_an_endless_event_is_refused_at_its_bound(wire_format: str) -> None:
    endless = Reply(steps=[b"data: ", *([b"x" * 2**20] * 17), Hang()])
    error = await ask_in_vain(wire_format, endless)
    assert "event 1 is larger than 16777216 bytes" in error.failure.message


@all_formats
async def test_a_redirect_is_not_followed(wire_format: str) -> None:
    redirect = Reply(status=307, headers={"location": "http://127.0.0.1:1/v1", "content-type": "text/plain"})
    error = await ask_in_vain(wire_format, redirect)
    assert (error.failure.error_class, error.failure.http_status) == (llm_pb2.ERROR_CLASS_INVALID_REQUEST, 307)


@all_formats
async def test_a_tool_turn_goes_back_legally(wire_format: str) -> None:
    """What a response holds is sent back with its results, reasoning byte for byte."""
    raw = '{"type":"reasoning", "id":"rs_1","encrypted_content":"g\\u00e9==","summary":[]}'
    if wire_format == "openai-responses":
        calls = ",".join(json.dumps(call_item(f"c{n}", "Bash", "{}")) for n in (1, 2))
        output = f"[{raw},{calls}]"
        stream = (
            f'data: {{"type":"response.completed","response":{{"status":"completed","output":{output}}}}}\n\n'.encode()
        )
    else:
        stream = whole_stream(wire_format, "hm", [("c1", "Bash", "{}"), ("c2", "Bash", '{"cut')])
    replies = [stream_reply(stream), stream_reply(whole_stream(wire_format, "done"))]
    async with scripted_provider(replies) as provider:
        adapter = http_adapter(wire_format, provider.base_url)
        _, first = await collect(adapter, request(user("go")))
        results = [result("c1", "x", image_part()), result("c2", "y")]
        await collect(adapter, request(user("go"), assistant(*first.items), *results))
        await adapter.aclose()
    second = provider.requests[1].body
    assert_legal(second)
    if wire_format == "openai-responses":
        assert raw.encode() in second
        assert list(first.items)[:1] == [thought(raw, wire_format)]
    assert called("c1", "Bash", "{}") in list(first.items)


async def test_a_paused_answer_is_asked_on_and_is_one_answer() -> None:
    """A pause is no retry: the attempt goes on, and so do its deltas; the part of a failed one is not mixed in."""
    replies = [
        stream_reply(text_piece("anthropic-messages", "One, "), message_end("pause_turn"), MESSAGE_STOP),
        error_reply(529, {"error": {"type": "overloaded_error"}}),
        stream_reply(text_piece("anthropic-messages", "One, "), message_end("pause_turn"), MESSAGE_STOP),
        stream_reply(whole_stream("anthropic-messages", "two.")),
    ]
    async with scripted_provider(replies) as provider:
        adapter = http_adapter("anthropic-messages", provider.base_url)
        events, output = await collect(adapter, request())
        await adapter.aclose()
    assert text_of(output) == "One, two."
    assert [(attempt.number, attempt.HasField("failure")) for attempt in output.attempts] == [(1, True), (2, False)]
    assert output.usage.output_tokens == 14
    texts = [(event.attempt, event.text) for event in events if isinstance(event, TextDelta)]
    assert texts == [(1, "One, "), (2, "One, "), (2, "two.")]
    last = [recorded.json["messages"][-1] for recorded in provider.requests]
    paused = {"role": "assistant", "content": [{"type": "text", "text": "One, "}]}
    assert [message == paused for message in last] == [False, True, False, True]


async def test_a_provider_that_pauses_for_ever_is_malformed() -> None:
    def pausing(_: Any) -> Reply:
        return stream_reply(text_piece("anthropic-messages", "."), message_end("pause_turn"), MESSAGE_STOP)

    async with scripted_provider(pausing) as provider:
        adapter = http_adapter("anthropic-messages", provider.base_url)
        with pytest.raises(LLMError, match="paused its answer more than 20 times"):
            await collect(adapter, request())
        await adapter.aclose()


@all_formats
async def test_a_server_that_cannot_stream_is_asked_for_whole_answers(wire_format: str) -> None:
    replies = [
        error_reply(200, WHOLE[wire_format]),
        error_reply(200, WHOLE[wire_format], {"content-type": "text/plain"}),
    ]
    async with scripted_provider(replies) as provider:
        adapter = http_adapter(wire_format, provider.base_url, quirks=Quirks(streams=False))
        outputs = [(await collect(adapter, request()))[1] for _ in replies]
        await adapter.aclose()
    assert [recorded.json["stream"] for recorded in provider.requests] == [False, False]
    assert [text_of(output) for output in outputs] == ["Looking.", "Looking."]


@all_formats
async def test_a_whole_answer_where_a_stream_was_asked_for_counts(wire_format: str) -> None:
    events, output = await ask(wire_format, error_reply(200, WHOLE[wire_format]))
    assert text_of(output) == "".join(event.text for event in events if isinstance(event, TextDelta)) == "Looking."
    assert [call[0] for call in calls_of(output)] == ["c1", "c2"]


@all_formats
async def test_many_requests_at_once_do_not_mix(wire_format: str) -> None:
    def answer(recorded: Any) -> Reply:
        text = recorded.json["model"]
        stream = whole_stream(wire_format, f"{text} {TEXT}")
        return Reply(steps=[stream[:100], Pause(0.001), stream[100:]])

    async with scripted_provider(answer) as provider:
        adapter = http_adapter(wire_format, provider.base_url)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(adapter, request(model=f"m-{number}"))) for number in range(30)]
        await adapter.aclose()
    assert [text_of(task.result()[1]) for task in tasks] == [f"m-{number} {TEXT}" for number in range(30)]


@all_formats
async def test_a_connection_is_used_again(wire_format: str) -> None:
    async with scripted_provider(lambda _: stream_reply(whole_stream(wire_format, "ok"))) as provider:
        adapter = http_adapter(wire_format, provider.base_url)
        for _ in range(4):
            await collect(adapter, request())
        assert provider.connections == 1
        provider.close_connections()
        await collect(adapter, request())
        await adapter.aclose()
        await adapter.aclose()
    assert provider.connections == 2


@all_formats
async def test_attempts_run_out_with_the_time_to_go_on(wire_format: str) -> None:
    clock = ManualClock()
    sleep = RecordedSleep(clock)
    async with scripted_provider([error_reply(503, {})] * 3) as provider:
        adapter = http_adapter(
            wire_format, provider.base_url, clock=clock, sleep=sleep, retries=RetryPolicy(attempts=3, jitter=0.0)
        )
        with pytest.raises(LLMError) as caught:
            await collect(adapter, request())
        await adapter.aclose()
    assert sleep.slept_s == [2.0, 4.0]
    assert [attempt.number for attempt in caught.value.attempts] == [1, 2, 3]
    assert caught.value.failure.retry_time.ToDatetime(clock.now().tzinfo) == clock.now().replace(second=14)
