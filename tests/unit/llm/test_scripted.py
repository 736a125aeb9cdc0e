from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from harness.clock import timestamp
from harness.errors import FailedPreconditionError, InvalidArgumentError
from harness.llm import Completed, LLMError, LLMRequest, ReasoningDelta, TextDelta, ToolCallDelta
from harness.llm.json_text import write
from harness.llm.script_file import ERROR_CLASSES, load_script, parse_script
from harness.llm.scripted import END_TEXT, SUMMARY_TEXT, ScriptedAdapter
from tests.support.llm import (
    START_TIME,
    ManualClock,
    RecordedSleep,
    assistant,
    called,
    collect,
    request,
    result,
    said,
    text_of,
    user,
)
from unreal_agent.llm.v1 import llm_pb2


def adapter(*responses: dict[str, Any], clock: ManualClock | None = None) -> ScriptedAdapter:
    clock = clock or ManualClock()
    script = parse_script(write({"responses": list(responses)}))
    return ScriptedAdapter(script, clock=clock, sleep=RecordedSleep(clock))


async def failure_of(made: ScriptedAdapter, asked: LLMRequest) -> LLMError:
    with pytest.raises(LLMError) as caught:
        await collect(made, asked)
    return caught.value


async def test_an_entry_is_played_whole() -> None:
    made = adapter(
        {
            "text": "Looking at the files of this directory.",
            "reasoning": "hm",
            "tool_calls": [
                {"name": "Bash", "arguments": {"command": "ls é"}, "call_id": "c1"},
                {"name": "Bash", "arguments": '{"broken'},
                {"name": "Ls"},
            ],
            "stop": "max_output_tokens",
            "delay_seconds": 1.5,
            "usage": {"input_tokens": 12, "output_tokens": 3},
        }
    )
    events, output = await collect(made, request())
    assert events[:-1] == [
        ReasoningDelta(attempt=1, text="hm"),
        TextDelta(attempt=1, text="Looking at the files of "),
        TextDelta(attempt=1, text="this directory."),
        ToolCallDelta(attempt=1, index=0, name="Bash", arguments='{"command":"ls é"}'),
        ToolCallDelta(attempt=1, index=1, name="Bash", arguments='{"broken'),
        ToolCallDelta(attempt=1, index=2, name="Ls", arguments="{}"),
    ]
    usage = llm_pb2.Usage(input_tokens=12, output_tokens=3)
    attempt = llm_pb2.Attempt(number=1, start_time=timestamp(START_TIME), provider="scripted", usage=usage)
    attempt.elapsed.FromMilliseconds(1500)
    assert output == llm_pb2.ModelOutput(
        stop_reason=llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS,
        items=[
            llm_pb2.OutputItem(
                reasoning=llm_pb2.Reasoning(summary="hm", raw_json='{"reasoning":"hm"}', wire_format="scripted")
            ),
            said("Looking at the files of this directory."),
            called("c1", "Bash", '{"command":"ls é"}'),
            called("", "Bash", '{"broken'),
            called("", "Ls", "{}"),
        ],
        usage=usage,
        attempts=[attempt],
        model="m-1",
        provider="scripted",
    )


async def test_the_place_is_the_number_of_recorded_outcomes() -> None:
    made = adapter({"text": "one"}, {"for": "compaction", "text": "sum"}, {"text": "two"})
    texts = [text_of((await collect(made, request(recorded_outcomes=place)))[1]) for place in (1, 0, 1, 2, 9)]
    assert texts == ["two", "one", "two", END_TEXT, END_TEXT]


async def test_a_compaction_has_its_own_entries_and_a_fixed_summary() -> None:
    made = adapter({"text": "one"}, {"for": "compaction", "text": "sum"})
    asked = [request(is_compaction=True, recorded_outcomes=5, recorded_compactions=place) for place in (0, 1)]
    assert [text_of((await collect(made, one))[1]) for one in asked] == ["sum", SUMMARY_TEXT]


async def test_after_the_last_entry_there_are_no_calls() -> None:
    _, output = await collect(adapter(), request())
    assert (output.stop_reason, list(output.items)) == (llm_pb2.STOP_REASON_COMPLETE, [said(END_TEXT)])


@pytest.mark.parametrize("name", sorted(ERROR_CLASSES))
async def test_an_error_entry_fails_with_its_class(name: str) -> None:
    error = await failure_of(adapter({"error": {"class": name}}), request())
    assert error.failure.error_class == ERROR_CLASSES[name]
    assert error.failure.HasField("retry_time") is False
    assert [attempt.failure for attempt in error.attempts] == [error.failure]


async def test_an_error_entry_names_the_time_to_wait_for() -> None:
    clock = ManualClock()
    made = adapter({"error": {"class": "RATE_LIMIT", "retry_after_seconds": 2.5}, "delay_seconds": 1}, clock=clock)
    error = await failure_of(made, request())
    expected = Timestamp()
    expected.FromMilliseconds(int(START_TIME.timestamp() * 1000) + 3500)
    assert error.failure.retry_time == expected


async def test_expect_is_searched_in_what_was_said_last() -> None:
    made = adapter({"expect": "^two$", "text": "ok"})
    called_twice = assistant(called("c1"), called("c2"))
    for entries in (
        [user("one"), called_twice, result("c1", "one"), result("c2", "two")],
        [user("one"), called_twice, result("c1", "one"), result("c2", "x"), user("two")],
        [user("two")],
    ):
        assert text_of((await collect(made, request(*entries)))[1]) == "ok"


async def test_an_unmet_expectation_shows_both_sides() -> None:
    made = adapter({"expect": "deploy(ed)?", "text": "ok"})
    error = await failure_of(made, request(user("deployed"), assistant(said("x")), user("something\nelse"), user("y")))
    assert error.failure.error_class == llm_pb2.ERROR_CLASS_SCRIPT
    assert error.failure.message == (
        "scripted: responses[0] expects 'deploy(ed)?', but what was said last is: something else | y"
    )


async def test_a_script_plays_the_same_to_every_session_at_once() -> None:
    made = adapter({"text": "a" * 100})
    async with aclosing(made.respond(request())) as first, aclosing(made.respond(request())) as second:
        one = [await anext(first), await anext(second), await anext(first)]
    assert len(one) == 3
    events, _ = await collect(made, request())
    assert isinstance(events[-1], Completed)
    await made.aclose()
    await made.aclose()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the script must be an object"),
        ("[]", "the script must be an object"),
        ("{}", "responses must be a list"),
        ('{"responses": {}}', "responses must be a list"),
        ('{"responses": [], "name": 1}', "the script has the unknown field 'name'"),
        ('{"responses": [{}, {"txt": 1}]}', "responses[1] has the unknown field 'txt'"),
        ('{"responses": ["x"]}', "responses[0] must be an object"),
        ('{"responses": [{"text": 1}]}', "responses[0].text must be a text"),
        ('{"responses": [{"stop": "end"}]}', "responses[0].stop must be one of complete, max_output_tokens, refused"),
        ('{"responses": [{"delay_seconds": -1}]}', "responses[0].delay_seconds must be"),
        ('{"responses": [{"delay_seconds": true}]}', "responses[0].delay_seconds must be"),
        ('{"responses": [{"tool_calls": {}}]}', "responses[0].tool_calls must be a list"),
        ('{"responses": [{"tool_calls": [{"arguments": {}}]}]}', "responses[0].tool_calls[0].name is missing"),
        ('{"responses": [{"tool_calls": [{"name": "B", "arguments": 1}]}]}', "tool_calls[0].arguments must be"),
        ('{"responses": [{"tool_calls": [{"name": "B", "args": 1}]}]}', "tool_calls[0] has the unknown field 'args'"),
        ('{"responses": [{"usage": {"input_tokens": "x"}}]}', "responses[0].usage.input_tokens must be"),
        ('{"responses": [{"error": {"class": "bad"}}]}', "responses[0].error.class must be one of authentication"),
        ('{"responses": [{"error": {"class": "cancelled"}}]}', "responses[0].error.class must be one of"),
        ('{"responses": [{"error": {"class": "timeout"}, "text": "x"}]}', "responses[0] has both error and text"),
        ('{"responses": [{"expect": "("}]}', "responses[0].expect is no regular expression"),
        ('{"responses": [{"for": "fun"}]}', "responses[0].for must be 'compaction'"),
        ('{"responses": [', "is neither JSON nor YAML at line"),
        ("responses:\n  - text: x\n   bad: y\n", "is neither JSON nor YAML at line"),
        ("responses:\n  - tool_calls: [{name: B, arguments: {at: 2026-01-01}}]\n", "that JSON does not have"),
    ],
)
def test_a_wrong_script_is_refused_with_entry_and_field(text: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_script(text, name="demo.json")
    assert words in caught.value.message
    assert "demo.json" in caught.value.message
    assert "\n" not in caught.value.message


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    json_path, yaml_path = tmp_path / "a.json", tmp_path / "a.yaml"
    json_path.write_text(
        '\ufeff{"responses": [{"text": "Hé", "tool_calls": [{"name": "B", "arguments": {"a": [1]}}]}]}'
    )
    yaml_path.write_text("responses:\n  - text: Hé\n    tool_calls:\n      - name: B\n        arguments: {a: [1]}\n")
    assert load_script(json_path) == load_script(yaml_path)


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match=r"nowhere\.json' cannot be read \(No such file"):
        load_script(tmp_path / "nowhere.json")
    with pytest.raises(FailedPreconditionError, match="holds none"):
        load_script(tmp_path)
