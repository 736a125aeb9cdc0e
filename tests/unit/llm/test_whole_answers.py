"""Answers that come whole, from servers that cannot stream: the same response as in pieces."""

from __future__ import annotations

import json

import pytest

from harness.llm import ReasoningDelta, TextDelta, ToolCallDelta
from harness.llm.dialect import ResponseFold
from harness.llm.failures import AttemptError
from harness.llm.providers import dialect_of
from harness.llm.request_parts import Quirks
from tests.support.llm import WIRE_FORMATS, called, request, said
from tests.support.whole_answers import ARGUMENTS, WHOLE
from unreal_agent.llm.v1 import llm_pb2

all_formats = pytest.mark.parametrize("wire_format", WIRE_FORMATS)


def fold_of(wire_format: str) -> ResponseFold:
    return dialect_of(wire_format, Quirks()).fold(1)


@all_formats
def test_a_whole_answer_is_taken(wire_format: str) -> None:
    fold = fold_of(wire_format)
    deltas = list(fold.feed_whole(json.dumps(WHOLE[wire_format], separators=(",", ":"))))
    output = fold.output()
    assert list(output.items) == [said("Looking."), called("c1", "Bash", ARGUMENTS), called("c2", "Bash", ARGUMENTS)]
    assert (output.stop_reason, output.model, output.response_id) == (llm_pb2.STOP_REASON_COMPLETE, "m-1", "r1")
    assert (output.usage.input_tokens, output.usage.output_tokens) == (11, 7)
    assert (fold.is_whole, fold.is_ended, fold.resume()) == (True, True, None)
    assert deltas == [
        TextDelta(attempt=1, text="Looking."),
        ToolCallDelta(attempt=1, index=0, name="Bash", arguments=ARGUMENTS),
        ToolCallDelta(attempt=1, index=1, name="Bash", arguments=ARGUMENTS),
    ]


def test_thoughts_of_a_whole_message_are_kept_byte_for_byte() -> None:
    raw = '{"type":"thinking",  "thinking":"h\\u006d","signature":"a+/=="}'
    fold = fold_of("anthropic-messages")
    deltas = fold.feed_whole(f'{{"content": [{raw}, {{"type":"text","text":"ok"}}], "stop_reason": "end_turn"}}')
    assert fold.output().items[0].reasoning == llm_pb2.Reasoning(
        summary="hm", raw_json=raw, wire_format="anthropic-messages"
    )
    assert list(deltas) == [ReasoningDelta(attempt=1, text="hm"), TextDelta(attempt=1, text="ok")]


@all_formats
@pytest.mark.parametrize(
    ("text", "error_class", "words"),
    [
        ('{"id": "x"}', llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, "check the base URL"),
        ("[]", llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, "no JSON object"),
        ('{"output": [', llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, "at character"),
        ('{"error": {"type": "overloaded_error", "message": "busy"}}', llm_pb2.ERROR_CLASS_OVERLOAD, "busy"),
        ('{"error": {"code": "rate_limit_exceeded"}}', llm_pb2.ERROR_CLASS_RATE_LIMIT, "rate_limit_exceeded"),
    ],
)
def test_what_is_no_answer_is_classified(
    wire_format: str, text: str, error_class: llm_pb2.ErrorClass.ValueType, words: str
) -> None:
    with pytest.raises(AttemptError) as caught:
        fold_of(wire_format).feed_whole(text)
    assert (caught.value.error_class, words in caught.value.detail) == (error_class, True)


@all_formats
def test_requests_ask_for_whole_answers_where_a_server_cannot_stream(wire_format: str) -> None:
    body = json.loads(dialect_of(wire_format, Quirks(streams=False)).body(request(), {}))
    assert (body["stream"], "stream_options" in body) == (False, False)
