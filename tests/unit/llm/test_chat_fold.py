from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.llm import ReasoningDelta, TextDelta, ToolCallDelta
from harness.llm.dialect import Delta
from harness.llm.failures import AttemptError
from harness.llm.openai_chat import ChatFold
from harness.llm.sse import ServerSentEvent, SSEDecoder
from tests.support.llm import calls_of, text_of
from tests.support.provider_replies import DONE, chat_chunk, chat_stream, chat_usage
from unreal_agent.llm.v1 import llm_pb2


def fold(*stream: bytes) -> tuple[ChatFold, list[Delta]]:
    made = ChatFold(1)
    deltas: list[Delta] = []
    for event in SSEDecoder().feed(b"".join(stream)):
        deltas.extend(made.feed(event))
    return made, deltas


def fold_calls(*pieces: dict[str, Any]) -> list[tuple[str, str, str]]:
    stream = [chat_chunk({"tool_calls": [piece]}) for piece in pieces]
    made, deltas = fold(*stream, chat_chunk({}, "tool_calls"), DONE)
    calls = calls_of(made.output())
    shown = [
        [delta for delta in deltas if isinstance(delta, ToolCallDelta) and delta.index == place] for place in range(9)
    ]
    assert ["".join(delta.arguments for delta in one) for one in shown if one] == [call[2] for call in calls]
    return calls


def piece(index: int | None, call_id: str | None, name: str | None, arguments: object) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    members = {key: value for key, value in (("index", index), ("id", call_id)) if value is not None}
    return {**members, "type": "function", "function": function}


def test_two_whole_calls_at_the_same_index_are_two_calls() -> None:
    assert fold_calls(piece(0, "c1", "Bash", '{"a":1}'), piece(0, "c2", "Bash", '{"b":2}')) == [
        ("c1", "Bash", '{"a":1}'),
        ("c2", "Bash", '{"b":2}'),
    ]


def test_interleaved_fragments_are_joined_by_index() -> None:
    assert fold_calls(
        piece(0, "c1", "One", '{"a'),
        piece(1, "c2", "Two", '{"b'),
        piece(1, None, None, '":2}'),
        piece(0, None, None, '":1}'),
    ) == [("c1", "One", '{"a":1}'), ("c2", "Two", '{"b":2}')]


def test_fragments_without_an_index_belong_to_the_latest_call() -> None:
    assert fold_calls(
        piece(None, "c1", "One", '{"a'),
        piece(None, None, None, '":1}'),
        piece(None, "c2", "Two", '{"b'),
        piece(None, None, None, '":2}'),
    ) == [("c1", "One", '{"a":1}'), ("c2", "Two", '{"b":2}')]


def test_arguments_may_be_an_object() -> None:
    assert fold_calls(piece(0, "c1", "Bash", {"command": "é ls"})) == [("c1", "Bash", '{"command":"é ls"}')]


def test_a_name_on_every_fragment_is_not_doubled() -> None:
    assert fold_calls(piece(0, "c1", "Bash", ""), piece(0, "c1", "Bash", '{"a"'), piece(0, "c1", "Bash", ":1}")) == [
        ("c1", "Bash", '{"a":1}')
    ]


def test_a_name_in_fragments_is_joined() -> None:
    assert fold_calls(piece(0, "c1", "View", ""), piece(0, None, "Image", ""), piece(0, None, None, "{}")) == [
        ("c1", "ViewImage", "{}")
    ]


def test_interleaved_ids_at_one_index_are_joined_by_id() -> None:
    assert fold_calls(
        piece(0, "c1", "One", '{"a'),
        piece(0, "c2", "Two", '{"b'),
        piece(0, "c1", None, '":1}'),
        piece(0, "c2", None, '":2}'),
    ) == [("c1", "One", '{"a":1}'), ("c2", "Two", '{"b":2}')]


def test_whole_calls_without_ids_and_indices_are_told_apart() -> None:
    assert fold_calls(piece(None, None, "One", '{"a":1}'), piece(None, None, "One", '{"a":2}')) == [
        ("", "One", '{"a":1}'),
        ("", "One", '{"a":2}'),
    ]


def test_duplicate_ids_are_left_to_the_coordinator() -> None:
    assert fold_calls(piece(0, "c1", "One", "{}"), piece(1, "c1", "Two", "{}")) == [
        ("c1", "One", "{}"),
        ("c1", "Two", "{}"),
    ]


@pytest.mark.parametrize(
    "arguments", ["", "  ", "[]", '"x"', '{"a":', '{"a":1}{"b":2}', '{"a":1,"a":2}', "x" * 5_000_000]
)
def test_the_models_argument_text_is_kept_exactly(arguments: str) -> None:
    assert fold_calls(piece(0, "c1", "Bash", arguments)) == [("c1", "Bash", arguments)]


@given(
    st.lists(st.tuples(st.text(st.characters(codec="utf-8"), max_size=12), st.integers(1, 4)), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_any_interleaving_of_indexed_fragments_gives_the_same_calls(calls: list[tuple[str, int]], random: Any) -> None:
    fragments: list[list[dict[str, Any]]] = []
    for index, (text, size) in enumerate(calls):
        arguments = json.dumps({"value": text})
        own = [piece(index, f"c{index}", "Bash", "")]
        own += [piece(index, None, None, arguments[at : at + size]) for at in range(0, len(arguments), size)]
        fragments.append(own)
    # Heads in order, the rest in any order that keeps each call's own.
    sent = [own.pop(0) for own in fragments]
    while any(fragments):
        sent.append(random.choice([own for own in fragments if own]).pop(0))
    assert fold_calls(*sent) == [
        (f"c{index}", "Bash", json.dumps({"value": text})) for index, (text, _) in enumerate(calls)
    ]


def test_text_reasoning_and_usage_are_folded() -> None:
    made, deltas = fold(
        chat_chunk({"role": "assistant", "reasoning_content": "hm", "reasoning": "hm"}),
        chat_chunk({"reasoning_content": "m", "reasoning": "m"}),
        chat_chunk({"content": "Hé"}),
        chat_chunk({"content": [{"type": "text", "text": "llo"}, {"type": "other", "text": "no"}]}),
        chat_chunk({}, "stop"),
        chat_usage(11, 7),
        DONE,
    )
    assert deltas == [
        ReasoningDelta(attempt=1, text="hm"),
        ReasoningDelta(attempt=1, text="m"),
        TextDelta(attempt=1, text="Hé"),
        TextDelta(attempt=1, text="llo"),
    ]
    assert made.output() == llm_pb2.ModelOutput(
        response_id="chat-1",
        model="m-1",
        stop_reason=llm_pb2.STOP_REASON_COMPLETE,
        items=[
            llm_pb2.OutputItem(
                reasoning=llm_pb2.Reasoning(
                    summary="hmm", raw_json='{"reasoning_content":"hmm"}', wire_format="openai-chat"
                )
            ),
            llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text="Héllo")),
        ],
        usage=llm_pb2.Usage(input_tokens=11, output_tokens=7, raw_json='{"prompt_tokens": 11, "completion_tokens": 7}'),
    )


def test_reasoning_details_are_joined_and_kept_whole() -> None:
    made, deltas = fold(
        chat_chunk({"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "a", "id": "r1"}]}),
        chat_chunk({"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": "b", "signature": "sig"}]}),
        chat_chunk({"reasoning_details": [{"type": "reasoning.encrypted", "index": 1, "data": "xyz"}]}),
        chat_chunk({"content": "done"}, "stop"),
    )
    details = [
        {"type": "reasoning.text", "index": 0, "text": "ab", "id": "r1", "signature": "sig"},
        {"type": "reasoning.encrypted", "index": 1, "data": "xyz"},
    ]
    reasoning = made.output().items[0].reasoning
    assert (reasoning.summary, json.loads(reasoning.raw_json)) == ("ab", {"reasoning_details": details})
    assert deltas[:2] == [ReasoningDelta(attempt=1, text="a"), ReasoningDelta(attempt=1, text="b")]


def test_a_surrogate_pair_cut_by_the_provider_is_joined() -> None:
    made, deltas = fold(
        b'data: {"choices":[{"delta":{"content":"x\\ud83d"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\ude00y"}}]}\n\n',
        chat_chunk({}, "stop"),
    )
    assert text_of(made.output()) == "x😀y"
    assert deltas == [TextDelta(attempt=1, text="x"), TextDelta(attempt=1, text="😀y")]


@pytest.mark.parametrize(
    ("finish_reason", "expected"),
    [
        ("stop", llm_pb2.STOP_REASON_COMPLETE),
        ("tool_calls", llm_pb2.STOP_REASON_COMPLETE),
        ("length", llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS),
        ("content_filter", llm_pb2.STOP_REASON_REFUSED),
    ],
)
def test_finish_reasons(finish_reason: str, expected: llm_pb2.StopReason.ValueType) -> None:
    made, _ = fold(chat_chunk({"content": "x"}), chat_chunk({}, finish_reason))
    assert made.output().stop_reason == expected


def test_a_cut_call_is_labelled_as_the_provider_labels_it() -> None:
    cut = '{"command":"rm -rf /tmp/x'
    for finish_reason, expected in (
        ("length", llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS),
        ("tool_calls", llm_pb2.STOP_REASON_COMPLETE),
    ):
        made, _ = fold(chat_chunk({"tool_calls": [piece(0, "c1", "Bash", cut)]}), chat_chunk({}, finish_reason))
        assert (made.output().stop_reason, calls_of(made.output())) == (expected, [("c1", "Bash", cut)])


def test_a_refusal_is_text_and_its_own_stop_reason() -> None:
    made, _ = fold(chat_chunk({"refusal": "I can"}), chat_chunk({"refusal": "not."}), chat_chunk({}, "stop"))
    output = made.output()
    assert (text_of(output), output.stop_reason) == ("I cannot.", llm_pb2.STOP_REASON_REFUSED)


@pytest.mark.parametrize(
    ("stream", "error_class", "words"),
    [
        ([chat_chunk({}, "error")], llm_pb2.ERROR_CLASS_OVERLOAD, "finish_reason error"),
        ([chat_chunk({}, "model_context_window_exceeded")], llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW, "window"),
        ([chat_chunk({}, "weird")], llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, "'weird' in event 1"),
        ([chat_chunk({"content": "x"}), DONE], llm_pb2.ERROR_CLASS_CONNECTION, "without a finish_reason"),
        ([b"data: {broken\n\n"], llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, "broken JSON in event 1"),
        ([b"data: [1]\n\n"], llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, "no JSON object in event 1"),
        ([b'data: {"choices": {}}\n\n'], llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, "choices"),
        ([b'data: {"error": {"message": "x"}}\n\n'], llm_pb2.ERROR_CLASS_OVERLOAD, "x"),
        ([b'event: error\ndata: {"message": "x"}\n\n'], llm_pb2.ERROR_CLASS_OVERLOAD, "x"),
    ],
)
def test_what_ends_an_attempt(stream: Sequence[bytes], error_class: llm_pb2.ErrorClass.ValueType, words: str) -> None:
    with pytest.raises(AttemptError, match=words) as caught:
        fold(*stream)
    assert caught.value.error_class == error_class


def test_after_the_finish_reason_only_usage_matters() -> None:
    made, deltas = fold(
        chat_chunk({"content": "x"}, "stop"),
        b"data: {broken\n\n",
        b'data: {"error": {"message": "late"}}\n\n',
        chat_chunk({"content": "more"}),
        chat_usage(5, 6),
    )
    assert deltas == [TextDelta(attempt=1, text="x")]
    assert (made.is_whole, made.output().usage.input_tokens, text_of(made.output())) == (True, 5, "x")


def test_unknown_members_and_choices_are_counted() -> None:
    made, _ = fold(chat_chunk({"content": "x"}, "stop", novelty=1, choices_=2))
    assert made.ignored == {"novelty": 1, "choices_": 1}


MEMBERS = ["id", "index", "delta", "content", "tool_calls", "function", "name", "arguments", "usage", "type", "text"]
HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["", "{", "}", '{"a":1}', "text"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=4),
    max_leaves=14,
)
DELTA_MEMBERS = ["content", "refusal", "reasoning", "reasoning_content", "reasoning_details", "tool_calls"]


@given(st.lists(st.dictionaries(st.sampled_from(DELTA_MEMBERS), HOSTILE | st.lists(HOSTILE, max_size=3)), max_size=5))
def test_hostile_chunks_end_in_an_output_or_a_known_error(values: list[dict[str, object]]) -> None:
    made = ChatFold(1)
    try:
        for number, value in enumerate(values, 1):
            chunk = {"choices": [{"index": 0, "delta": value}]}
            made.feed(ServerSentEvent(number=number, name="", data=json.dumps(chunk)))
        made.feed(ServerSentEvent(number=99, name="", data=json.dumps({"choices": [{"finish_reason": "stop"}]})))
    except AttemptError:
        return
    made.output().SerializeToString()


def test_a_whole_answer_is_folded() -> None:
    made, _ = fold(chat_stream("Hello there", [("c1", "Bash", '{"command":"ls"}')]))
    assert (text_of(made.output()), calls_of(made.output())) == ("Hello there", [("c1", "Bash", '{"command":"ls"}')])
    assert (made.is_whole, made.is_ended) == (True, True)
