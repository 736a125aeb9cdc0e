from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.llm import ReasoningDelta, TextDelta, ToolCallDelta
from harness.llm.dialect import Delta
from harness.llm.failures import AttemptError
from harness.llm.openai_responses import ResponsesFold
from harness.llm.sse import ServerSentEvent, SSEDecoder
from tests.support.llm import calls_of, text_of
from tests.support.provider_replies import (
    call_item,
    message_item,
    named_event,
    responses_stream,
    terminal,
    text_delta,
)
from unreal_agent.llm.v1 import llm_pb2


def fold(*stream: bytes) -> tuple[ResponsesFold, list[Delta]]:
    made = ResponsesFold(2)
    deltas: list[Delta] = []
    for event in SSEDecoder().feed(b"".join(stream)):
        deltas.extend(made.feed(event))
    return made, deltas


RAW_REASONING = (
    '{"type" : "reasoning",  "id":"rs_1","encrypted_content":"gAAA\\u00e9/+==", "summary":'
    '[{"type":"summary_text","text":"Thinking"},{"type":"summary_text","text":"more"}], "x": 1.0, "x": 1e2}'
)


def test_the_terminal_event_gives_the_response() -> None:
    call = json.dumps(call_item("c1", "Bash", '{"a": 1}'))
    text = json.dumps(message_item("Hi", phase="commentary"))
    made, _ = fold(
        f'data: {{"type":"response.completed","response":{{"id":"resp_1","status":"completed","model":"m-1","output":'
        f'[ {RAW_REASONING}, {text} ,{call}],"usage":{{"input_tokens":11,"input_tokens_details":{{"cached_tokens":4}},'
        f'"output_tokens":7,"output_tokens_details":{{"reasoning_tokens":3}}}}}}}}\n\n'.encode()
    )
    assert made.output() == llm_pb2.ModelOutput(
        response_id="resp_1",
        model="m-1",
        stop_reason=llm_pb2.STOP_REASON_COMPLETE,
        items=[
            llm_pb2.OutputItem(
                reasoning=llm_pb2.Reasoning(
                    summary="Thinking\n\nmore", raw_json=RAW_REASONING, wire_format="openai-responses"
                )
            ),
            llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text="Hi", phase="commentary")),
            llm_pb2.OutputItem(tool_call=llm_pb2.ToolCall(call_id="c1", name="Bash", arguments_json='{"a": 1}')),
        ],
        usage=llm_pb2.Usage(
            input_tokens=11,
            cached_input_tokens=4,
            output_tokens=7,
            reasoning_tokens=3,
            raw_json='{"input_tokens":11,"input_tokens_details":{"cached_tokens":4},"output_tokens":7,'
            '"output_tokens_details":{"reasoning_tokens":3}}',
        ),
    )


def test_deltas_carry_attempt_and_place() -> None:
    reasoning = {"type": "response.reasoning_summary_text.delta", "output_index": 0}
    _, deltas = fold(
        named_event({**reasoning, "summary_index": 0, "delta": "one"}),
        named_event({**reasoning, "summary_index": 1, "delta": "two"}),
        text_delta("Hi"),
        named_event({"type": "response.output_item.added", "output_index": 2, "item": call_item("c1", "Bash", "")}),
        named_event({"type": "response.output_item.added", "output_index": 3, "item": call_item("c2", "View", "")}),
        named_event({"type": "response.function_call_arguments.delta", "output_index": 3, "delta": "{2"}),
        named_event({"type": "response.function_call_arguments.delta", "output_index": 2, "delta": "{1"}),
    )
    assert deltas == [
        ReasoningDelta(attempt=2, text="one"),
        ReasoningDelta(attempt=2, text="\n\ntwo"),
        TextDelta(attempt=2, text="Hi"),
        ToolCallDelta(attempt=2, index=0, name="Bash", arguments=""),
        ToolCallDelta(attempt=2, index=1, name="View", arguments=""),
        ToolCallDelta(attempt=2, index=1, name="View", arguments="{2"),
        ToolCallDelta(attempt=2, index=0, name="Bash", arguments="{1"),
    ]


def test_finished_items_stand_in_for_a_terminal_event_without_output() -> None:
    made, _ = fold(
        named_event({"type": "response.output_item.done", "output_index": 1, "item": call_item("c1", "Bash", "{}")}),
        f'data: {{"type":"response.output_item.done","output_index":0,"item": {RAW_REASONING}}}\n\n'.encode(),
        terminal("completed", []),
    )
    first, second = made.output().items
    assert first.reasoning.raw_json == RAW_REASONING
    assert second.tool_call.call_id == "c1"


def test_after_the_terminal_event_everything_is_ignored() -> None:
    made, _ = fold(
        terminal("completed", [message_item("Hi")]),
        b"data: {broken\n\n",
        named_event({"type": "error", "code": "server_error", "message": "late"}),
        terminal("completed", [message_item("Other")]),
    )
    assert text_of(made.output()) == "Hi"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("max_output_tokens", llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS),
        ("content_filter", llm_pb2.STOP_REASON_REFUSED),
    ],
)
def test_an_incomplete_response_keeps_its_output(reason: str, expected: llm_pb2.StopReason.ValueType) -> None:
    cut = call_item("c1", "Bash", '{"command":"rm', status="incomplete")
    made, _ = fold(
        terminal("incomplete", [message_item("Half", status="incomplete"), cut], incomplete_details={"reason": reason})
    )
    output = made.output()
    assert (output.stop_reason, text_of(output), calls_of(output)) == (
        expected,
        "Half",
        [("c1", "Bash", '{"command":"rm')],
    )


def test_a_refusal_is_text_and_its_own_stop_reason() -> None:
    item = message_item("", content=[{"type": "refusal", "refusal": "I cannot."}])
    made, _ = fold(terminal("completed", [item]))
    assert (text_of(made.output()), made.output().stop_reason) == ("I cannot.", llm_pb2.STOP_REASON_REFUSED)


@pytest.mark.parametrize(
    ("arguments", "expected"), [({"a": "é"}, '{"a":"é"}'), (None, ""), ("", ""), ('{"a":', '{"a":')]
)
def test_arguments_are_kept_as_text(arguments: str, expected: str) -> None:
    made, _ = fold(terminal("completed", [call_item("c1", "Bash", arguments)]))
    assert calls_of(made.output()) == [("c1", "Bash", expected)]


@pytest.mark.parametrize(
    ("stream", "error_class", "words"),
    [
        (
            [terminal("failed", [], error={"code": "rate_limit_exceeded", "message": "slow"})],
            llm_pb2.ERROR_CLASS_RATE_LIMIT,
            "slow",
        ),
        (
            [terminal("failed", [], error={"code": "context_length_exceeded", "message": "long"})],
            llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW,
            "long",
        ),
        (
            [named_event({"type": "error", "code": "server_is_overloaded", "message": "busy"})],
            llm_pb2.ERROR_CLASS_OVERLOAD,
            "busy",
        ),
        (
            [named_event({"type": "error", "error": {"type": "invalid_request_error", "message": "no"}})],
            llm_pb2.ERROR_CLASS_INVALID_REQUEST,
            "no",
        ),
        (
            [terminal("incomplete", [], incomplete_details={"reason": "novel"})],
            llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE,
            "unknown reason 'novel'",
        ),
        (
            [terminal("incomplete", [], incomplete_details={"reason": "model_context_window_exceeded"})],
            llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW,
            "window",
        ),
        (
            [terminal("completed", [], status="cancelled")],
            llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE,
            "unknown status 'cancelled'",
        ),
        ([b'data: {"type":"response.completed"}\n\n'], llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, "no response object"),
        (
            [b'data: {"type":"response.completed","response":{"output":"x"}}\n\n'],
            llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE,
            "no array in event 1",
        ),
        ([b"data: {broken\n\n"], llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, "broken JSON in event 1"),
        ([b'data: {"error":{"message":"bare"}}\n\n'], llm_pb2.ERROR_CLASS_OVERLOAD, "bare"),
    ],
)
def test_what_ends_an_attempt(stream: Sequence[bytes], error_class: llm_pb2.ErrorClass.ValueType, words: str) -> None:
    with pytest.raises(AttemptError, match=words) as caught:
        fold(*stream)
    assert caught.value.error_class == error_class


def test_a_failed_response_keeps_what_it_cost() -> None:
    made = ResponsesFold(1)
    with pytest.raises(AttemptError):
        for event in SSEDecoder().feed(terminal("failed", [], error={"code": "server_error", "message": "x"})):
            made.feed(event)
    usage = made.usage()
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (11, 7)


def test_unknown_events_and_items_are_counted() -> None:
    made, _ = fold(
        named_event({"type": "response.novelty"}),
        terminal("completed", [{"type": "web_search_call", "id": "ws_1"}, message_item("Hi")]),
    )
    assert made.ignored == {"response.novelty": 1, "item web_search_call": 1}
    assert text_of(made.output()) == "Hi"


MEMBERS = [
    "type",
    "item",
    "delta",
    "output_index",
    "response",
    "output",
    "usage",
    "content",
    "text",
    "summary",
    "status",
]
KINDS = [
    "response.output_text.delta",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.reasoning_text.delta",
    "response.completed",
    "response.failed",
]
ITEM_KINDS = ["message", "function_call", "reasoning"]
HOSTILE = st.recursive(
    st.none() | st.integers(-2, 3) | st.sampled_from([*ITEM_KINDS, "", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=6),
    max_leaves=14,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(MEMBERS), HOSTILE, max_size=6)), max_size=4
    )
)
def test_hostile_events_end_in_an_output_or_a_known_error(values: list[tuple[str, dict[str, object]]]) -> None:
    made = ResponsesFold(1)
    end = {"type": "response.completed", "response": {"output": []}, "x": 1}
    try:
        for number, value in enumerate([*({**members, "type": kind} for kind, members in values), end], 1):
            made.feed(ServerSentEvent(number=number, name="", data=json.dumps(value)))
    except AttemptError:
        return
    made.output().SerializeToString()


def test_a_whole_answer_is_folded() -> None:
    made, deltas = fold(responses_stream("Hello there", [("c1", "Bash", '{"command":"ls"}')]))
    assert (text_of(made.output()), calls_of(made.output())) == ("Hello there", [("c1", "Bash", '{"command":"ls"}')])
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == "Hello there"
