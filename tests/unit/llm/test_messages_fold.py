from __future__ import annotations

import json
from typing import Any

import pytest

from harness.llm import ReasoningDelta, TextDelta, ToolCallDelta
from harness.llm.anthropic_fold import MessagesFold
from harness.llm.dialect import Delta
from harness.llm.failures import AttemptError
from harness.llm.sse import SSEDecoder
from tests.support.llm import called, said, thought
from tests.support.provider_replies import (
    MESSAGE_STOP,
    block_delta,
    block_start,
    message_end,
    message_start,
    messages_stream,
    named_event,
)
from unreal_agent.llm.v1 import llm_pb2

FORMAT = "anthropic-messages"


def folded(*chunks: bytes) -> tuple[list[Delta], MessagesFold]:
    fold, decoder = MessagesFold(1), SSEDecoder()
    return [delta for chunk in chunks for event in decoder.feed(chunk) for delta in fold.feed(event)], fold


def block(index: int, start: dict[str, Any], *deltas: bytes) -> bytes:
    stop = named_event({"type": "content_block_stop", "index": index})
    return b"".join((block_start(index, start), *deltas, stop))


def tool_use(index: int, call_id: str, *pieces: str, **members: Any) -> bytes:
    start = {"type": "tool_use", "id": call_id, "name": "Bash", "input": {}, **members}
    return block(index, start, *(block_delta(index, "input_json_delta", "partial_json", piece) for piece in pieces))


def test_blocks_keep_their_order_and_thoughts_their_bytes() -> None:
    deltas, fold = folded(
        message_start(),
        block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            block_delta(0, "thinking_delta", "thinking", "Let me "),
            block_delta(0, "thinking_delta", "thinking", "see."),
            block_delta(0, "signature_delta", "signature", "c2ln+/=="),
        ),
        block(1, {"type": "redacted_thinking", "data": "3nCr\u00e9=="}),
        block(2, {"type": "text", "text": ""}, block_delta(2, "text_delta", "text", "Looking.")),
        tool_use(3, "toolu_1", '{"comm', 'and":"ls"}'),
        tool_use(4, "toolu_2", ""),
        message_end("tool_use"),
        MESSAGE_STOP,
    )
    thinking = thought('{"type":"thinking","thinking":"Let me see.","signature":"c2ln+/=="}', FORMAT)
    thinking.reasoning.summary = "Let me see."
    output = fold.output()
    assert list(output.items) == [
        thinking,
        thought('{"type": "redacted_thinking", "data": "3nCr\u00e9=="}', FORMAT),
        said("Looking."),
        called("toolu_1", "Bash", '{"command":"ls"}'),
        called("toolu_2", "Bash", ""),
    ]
    assert (output.stop_reason, output.response_id, output.model) == (llm_pb2.STOP_REASON_COMPLETE, "msg_1", "m-1")
    assert deltas == [
        ReasoningDelta(attempt=1, text="Let me "),
        ReasoningDelta(attempt=1, text="see."),
        TextDelta(attempt=1, text="Looking."),
        ToolCallDelta(attempt=1, index=0, name="Bash", arguments=""),
        ToolCallDelta(attempt=1, index=0, name="Bash", arguments='{"comm'),
        ToolCallDelta(attempt=1, index=0, name="Bash", arguments='and":"ls"}'),
        ToolCallDelta(attempt=1, index=1, name="Bash", arguments=""),
    ]


def test_a_thought_without_text_keeps_its_signature() -> None:
    _, fold = folded(
        message_start(),
        block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            block_delta(0, "signature_delta", "signature", "abc"),
        ),
        tool_use(1, "c1", "{}"),
        message_end("tool_use"),
    )
    assert fold.output().items[0] == thought('{"type":"thinking","thinking":"","signature":"abc"}', FORMAT)


def test_usage_counts_what_was_cached_as_input() -> None:
    _, fold = folded(messages_stream("ok"))
    usage = fold.usage()
    assert usage is not None
    assert (usage.input_tokens, usage.cached_input_tokens, usage.cache_write_tokens, usage.output_tokens) == (
        11,
        4,
        3,
        7,
    )
    assert json.loads(usage.raw_json)["output_tokens"] == 7


def test_later_counts_replace_earlier_ones_and_nulls_do_not() -> None:
    usage = {"input_tokens": 20, "cache_read_input_tokens": None, "output_tokens": 9}
    end = named_event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage})
    _, fold = folded(message_start(), end)
    counted = fold.usage()
    assert counted is not None
    assert (counted.input_tokens, counted.cached_input_tokens, counted.output_tokens) == (27, 4, 9)


def test_interleaved_blocks_are_told_apart() -> None:
    starts = [block_start(n, {"type": "tool_use", "id": f"c{n}", "name": "Bash", "input": {}}) for n in (0, 1)]
    pieces = [
        block_delta(n, "input_json_delta", "partial_json", piece)
        for n, piece in ((0, '{"a"'), (1, '{"b"'), (0, ":1}"), (1, ":2}"))
    ]
    _, fold = folded(message_start(), *starts, *pieces, message_end("tool_use"))
    assert list(fold.output().items) == [called("c0", "Bash", '{"a":1}'), called("c1", "Bash", '{"b":2}')]


def test_an_index_used_again_begins_another_block() -> None:
    _, fold = folded(message_start(), tool_use(0, "c1", '{"a":1}'), tool_use(0, "c2", "{}"), message_end("tool_use"))
    assert list(fold.output().items) == [called("c1", "Bash", '{"a":1}'), called("c2", "Bash", "{}")]


def test_pieces_without_an_index_belong_to_the_last_block() -> None:
    start = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {}}
    _, fold = folded(
        message_start(),
        named_event({"type": "content_block_start", "content_block": start}),
        named_event({"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": '{"a":1}'}}),
        message_end("tool_use"),
    )
    assert list(fold.output().items) == [called("c1", "Bash", '{"a":1}')]


def test_input_in_the_start_counts_where_no_pieces_come() -> None:
    _, fold = folded(message_start(), tool_use(0, "c1", input={"command": "ls"}), message_end("tool_use"))
    assert json.loads(fold.output().items[0].tool_call.arguments_json) == {"command": "ls"}


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", llm_pb2.STOP_REASON_COMPLETE),
        ("stop_sequence", llm_pb2.STOP_REASON_COMPLETE),
        ("max_tokens", llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS),
        ("refusal", llm_pb2.STOP_REASON_REFUSED),
    ],
)
def test_stop_reasons(reason: str, expected: llm_pb2.StopReason.ValueType) -> None:
    _, fold = folded(message_start(), tool_use(0, "c1", '{"command":"rm -rf /tmp/x'), message_end(reason))
    assert fold.output().stop_reason == expected
    assert fold.output().items[0].tool_call.arguments_json == '{"command":"rm -rf /tmp/x'


def test_unknown_events_blocks_and_deltas_are_ignored_and_counted() -> None:
    _, fold = folded(
        message_start(),
        named_event({"type": "weather"}),
        named_event({"type": "weather"}),
        block(0, {"type": "text", "text": "", "novel": 1}, block_delta(0, "citations_delta", "citation", "x")),
        block(1, {"type": "text", "text": "ok"}),
        message_end("end_turn"),
        named_event({"type": "weather"}),
    )
    assert dict(fold.ignored) == {"weather": 2, "delta citations_delta": 1}
    assert list(fold.output().items) == [said("ok")]


def test_what_a_providers_own_tool_did_goes_back_as_it_came() -> None:
    _, fold = folded(
        message_start(),
        block(
            0,
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
            block_delta(0, "input_json_delta", "partial_json", '{"query":"x"}'),
        ),
        block(1, {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"url": "u"}]}),
        message_end("end_turn"),
    )
    assert [json.loads(item.reasoning.raw_json) for item in fold.output().items] == [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"url": "u"}]},
    ]


def test_a_paused_answer_goes_on_with_the_next_stream() -> None:
    fold = folded(message_start(), block(0, {"type": "text", "text": "One"}), message_end("pause_turn"), MESSAGE_STOP)[
        1
    ]
    assert (fold.is_whole, fold.is_ended) == (True, True)
    assert list(fold.resume() or ()) == [said("One")]
    assert (fold.is_whole, fold.is_ended) == (False, False)
    decoder = SSEDecoder()
    for event in decoder.feed(message_start() + block(0, {"type": "text", "text": "Two"}) + message_end("end_turn")):
        fold.feed(event)
    assert fold.resume() is None
    output = fold.output()
    assert list(output.items) == [said("One"), said("Two")]
    assert (output.usage.input_tokens, output.usage.output_tokens) == (22, 14)


@pytest.mark.parametrize(
    ("sent", "error_class", "words"),
    [
        (message_end("novel"), "MALFORMED_RESPONSE", "unknown stop_reason 'novel' in event 2"),
        (MESSAGE_STOP, "CONNECTION", "without a stop_reason"),
        (b"data: {no\n\n", "MALFORMED_RESPONSE", "broken JSON in event 2"),
        (block_delta(3, "text_delta", "text", "x"), "MALFORMED_RESPONSE", "had not begun in event 2"),
        (b'event: error\ndata: {"error":{"type":"api_error","message":"oh"}}\n\n', "OVERLOAD", "oh"),
        (message_end("model_context_window_exceeded"), "CONTEXT_OVERFLOW", "window"),
    ],
)
def test_faults_name_the_place(sent: bytes, error_class: str, words: str) -> None:
    with pytest.raises(AttemptError) as caught:
        folded(message_start(), sent)
    assert llm_pb2.ErrorClass.Name(caught.value.error_class) == f"ERROR_CLASS_{error_class}"
    assert words in caught.value.detail
