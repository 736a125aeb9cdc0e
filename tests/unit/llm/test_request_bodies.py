from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from harness.llm import LLMRequest
from harness.llm.dialect import Dialect
from harness.llm.providers import dialect_of
from harness.llm.request_parts import Quirks, load_blobs, replayable_arguments
from tests.support.llm import (
    PNG,
    WIRE_FORMATS,
    assistant,
    blob_ref,
    called,
    image_part,
    request,
    result,
    said,
    thought,
    user,
)
from tests.support.request_rules import assert_legal
from unreal_agent.llm.v1 import llm_pb2

GOLDEN = Path(__file__).parents[2] / "golden" / "llm"
REASONING_1 = '{"id":"rs_1", "type":"reasoning","encrypted_content":"gAé\\u00e9==","summary":[],"n":1.0}'
REASONING_2 = '{"type":"reasoning","id":"rs_2","summary":[],  "encrypted_content":"x"}'
CHAT_REASONING = '{"reasoning_content":"hm"}'


def dialect(wire_format: str, **quirks: Any) -> Dialect:
    return dialect_of(wire_format, Quirks(**quirks))


async def body_of(wire_format: str, asked: LLMRequest, **quirks: Any) -> bytes:
    blobs = await load_blobs(asked.entries, asked.load_blob)
    return dialect(wire_format, **quirks).body(asked, blobs)


def conversation() -> list[llm_pb2.ContextEntry]:
    """Return everything that a context may hold, in the one order that there is."""
    placeholder = result("c2", "Still running.", name="Bash")
    placeholder.tool_result.is_placeholder = True
    long_text = llm_pb2.ContentPart(text=llm_pb2.TextPart(blob=blob_ref(b"long t\xc3\xa9xt", "text/plain")))
    return [
        user("Look at this:", image_part()),
        user("And be quick."),
        assistant(
            thought(REASONING_1, "openai-responses"),
            thought(CHAT_REASONING, "openai-chat"),
            said("Looking.", "commentary"),
            called("c1", "ViewImage", '{"path":"a.png"}'),
            thought(REASONING_2, "openai-responses"),
            called("c2"),
            called("c3", "Bash", '{"command":"rm -rf /tmp/x'),
            called("c4", "no such.tool", ""),
        ),
        result("c1", "1x1 pixels", image_part(), name="ViewImage"),
        placeholder,
        result("c3", "The arguments are no JSON."),
        result("c4"),
        user('<late_result tool="Bash" call_id="c2">done</late_result>'),
        user(long_text),
        assistant(said("All done.")),
        user("Thanks."),
    ]


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
async def test_a_full_conversation_is_legal_and_as_recorded(wire_format: str) -> None:
    asked = request(*conversation(), blobs=(PNG, b"long t\xc3\xa9xt"), max_output_tokens=1000)
    body = await body_of(wire_format, asked, sends_cache_key=True)
    assert_legal(body)
    golden = GOLDEN / f"{wire_format}.request.json"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_bytes(body)
    assert body == golden.read_bytes()


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
async def test_the_same_request_gives_the_same_bytes_and_changes_nothing(wire_format: str) -> None:
    entries = conversation()
    before = [copy_of(entry) for entry in entries]
    first = await body_of(wire_format, request(*entries, blobs=(PNG, b"long t\xc3\xa9xt")))
    second = await body_of(wire_format, request(*conversation(), blobs=(PNG, b"long t\xc3\xa9xt")))
    assert first == second
    assert entries == before


def copy_of(entry: llm_pb2.ContextEntry) -> Message:
    made = llm_pb2.ContextEntry()
    made.CopyFrom(entry)
    return made


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
async def test_a_longer_conversation_begins_with_the_same_bytes(wire_format: str) -> None:
    entries = conversation()
    shorter = await body_of(wire_format, request(*entries[:-2], blobs=(PNG, b"long t\xc3\xa9xt")))
    longer = await body_of(wire_format, request(*entries, blobs=(PNG, b"long t\xc3\xa9xt")))
    marker = b',"cache_control":{"type":"ephemeral"}'
    shorter, longer = shorter.replace(marker, b""), longer.replace(marker, b"")
    assert longer.startswith(shorter.removesuffix(b"]}]}").removesuffix(b"]}"))


async def test_reasoning_goes_back_byte_for_byte_in_its_place() -> None:
    body = (await body_of("openai-responses", request(*conversation(), blobs=(PNG, b"long t\xc3\xa9xt")))).decode()
    kinds = [item.get("role") or item["type"] for item in json.loads(body)["input"]]
    assert kinds[2:8] == ["reasoning", "assistant", "function_call", "reasoning", "function_call", "function_call"]
    assert f",{REASONING_1},{{" in body
    assert f",{REASONING_2},{{" in body
    assert "reasoning_content" not in body


THINKING = '{"type":"thinking", "thinking":"h\\u006d","signature":"c2ln+/=="}'
SILENT_THINKING = '{"type":"thinking","thinking":"","signature":"b=="}'
REDACTED = '{"data":"3nCr==","type":"redacted_thinking"}'


async def test_thoughts_go_back_byte_for_byte_in_their_place() -> None:
    response = assistant(
        *(thought(raw, "anthropic-messages") for raw in (THINKING, REDACTED)),
        said("Looking."),
        thought(SILENT_THINKING, "anthropic-messages"),
        called("c1"),
        thought(THINKING, "anthropic-messages"),
    )
    body = await body_of("anthropic-messages", request(user("a"), response, result("c1", "x")))
    assert_legal(body)
    blocks = (
        f'"content":[{THINKING},{REDACTED},{{"type":"text","text":"Looking."}},{SILENT_THINKING},{{"type":"tool_use"'
    )
    assert blocks.encode() in body
    assert body.count(b'"thinking"') == 4  # what was thought last led to nothing: no message may end with it


async def test_roles_are_merged_with_results_first() -> None:
    entries = [
        user("a"),
        user("b", image_part()),
        assistant(called("c1"), called("c2")),
        result("c1", "x", image_part()),
        result("c2"),
        user("late"),
        user("input"),
        assistant(said(" ")),
        user("more"),
    ]
    body = await body_of("anthropic-messages", request(*entries))
    assert_legal(body)
    messages = json.loads(body)["messages"]
    kinds = [(message["role"], [block["type"] for block in message["content"]]) for message in messages]
    assert kinds == [
        ("user", ["text", "text", "image"]),
        ("assistant", ["tool_use", "tool_use"]),
        ("user", ["tool_result", "tool_result", "text", "text", "text"]),
    ]
    assert [part["type"] for part in messages[2]["content"][0]["content"]] == ["text", "image"]


async def test_cache_markers_end_the_prompt_and_the_newest_messages() -> None:
    entries: list[llm_pb2.ContextEntry] = []
    for number in range(4):
        entries += [user(f"u{number}"), assistant(said(f"a{number}"))]
        body = json.loads(await body_of("anthropic-messages", request(*entries[:-1])))
        marked = [
            block["text"]
            for block in [*body["system"], *(one for message in body["messages"] for one in message["content"])]
            if "cache_control" in block
        ]
        assert marked == ["You are careful.", *[f"u{place}" for place in (number - 1, number) if place >= 0]]


async def test_without_a_system_text_the_tools_end_with_the_marker() -> None:
    prompt = llm_pb2.Prompt(tools=request().prompt.tools)
    body = json.loads(await body_of("anthropic-messages", request(prompt=prompt)))
    assert ("system" in body, body["tools"][-1]["cache_control"]) == (False, {"type": "ephemeral"})


@pytest.mark.parametrize(
    ("model", "effort", "expected"),
    [
        ("claude-opus-5-5", "max", ({"type": "adaptive", "display": "summarized"}, {"effort": "max"}, 128_000)),
        ("claude-opus-5-5", "", ({"type": "adaptive", "display": "summarized"}, None, 128_000)),
        ("claude-opus-4-6", "xhigh", ({"type": "adaptive", "display": "summarized"}, {"effort": "high"}, 128_000)),
        ("claude-haiku-4-5", "medium", ({"type": "enabled", "budget_tokens": 10_000}, None, 64_000)),
        ("claude-3-5-haiku", "high", (None, None, 8192)),
        ("kimi-k2", "high", (None, None, 8192)),
    ],
)
async def test_a_model_is_asked_to_think_as_it_can(model: str, effort: str, expected: tuple[object, ...]) -> None:
    body = json.loads(await body_of("anthropic-messages", request(model=model, effort=effort)))
    assert (body.get("thinking"), body.get("output_config"), body["max_tokens"]) == expected


async def test_a_budget_stays_below_the_bound_and_out_of_calls_begun_without() -> None:
    small = json.loads(await body_of("anthropic-messages", request(model="claude-haiku-4-5", max_output_tokens=4000)))
    assert small["thinking"]["budget_tokens"] == 2976
    entries = [user("a"), assistant(called("c1")), result("c1", "x")]
    begun = json.loads(await body_of("anthropic-messages", request(*entries, model="claude-haiku-4-5")))
    assert "thinking" not in begun


async def test_calls_of_tools_that_are_offered_no_longer_are_explained() -> None:
    entries = [user("a"), assistant(called("c1", "Old"), called("c2", "Old")), result("c1", "x"), result("c2", "x")]
    bare = llm_pb2.Prompt(system_text="You are careful.")
    body = await body_of("anthropic-messages", request(*entries, prompt=bare))
    assert_legal(body)
    sent = json.loads(body)
    assert ([tool["name"] for tool in sent["tools"]], sent["tool_choice"]) == (["Old"], {"type": "none"})
    assert "tools" not in json.loads(await body_of("anthropic-messages", request(prompt=bare)))


async def test_call_ids_of_others_are_made_legal_and_stay_apart() -> None:
    names = ["functions.Bash:0", "functions.Bash_0", "functions_Bash:0", "x" * 99, "toolu_1"]
    entries = [user("a"), assistant(*map(called, names)), *(result(name, "x") for name in names)]
    body = await body_of("anthropic-messages", request(*entries))
    assert_legal(body)
    sent = [block["id"] for block in json.loads(body)["messages"][1]["content"]]
    assert (len(set(sent)), sent[-1]) == (5, "toolu_1")


async def test_reasoning_without_what_it_led_to_is_left_out() -> None:
    cut = assistant(said("x"), thought(REASONING_1, "openai-responses"), said(""))
    body = await body_of("openai-responses", request(user("a"), cut, user("b")))
    assert_legal(body)
    assert b"rs_1" not in body


async def test_foreign_and_broken_reasoning_is_left_out() -> None:
    for wire_format in WIRE_FORMATS:
        others = [thought('{"type":"foreign"}', other) for other in WIRE_FORMATS if other != wire_format]
        response = assistant(*others, thought("{broken", wire_format), said("x"))
        body = await body_of(wire_format, request(user("a"), response, user("b")))
        assert_legal(body)
        assert b"foreign" not in body
        assert b"broken" not in body


async def test_chat_reasoning_stands_in_its_message() -> None:
    entries = [user("a"), assistant(thought(CHAT_REASONING, "openai-chat"), called("c1")), result("c1", "x")]
    messages = json.loads(await body_of("openai-chat", request(*entries)))["messages"]
    assert messages[2] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "Bash", "arguments": '{"command":"ls"}'}}],
    }


async def test_chat_images_follow_behind_all_results_of_the_response() -> None:
    entries = [
        user("a"),
        assistant(called("c1", "ViewImage", "{}"), called("c2", "ViewImage", "{}")),
        result("c1", image_part(), name="ViewImage"),
        result("c2", "ok", name="ViewImage"),
    ]
    body = await body_of("openai-chat", request(*entries))
    assert_legal(body)
    messages = json.loads(body)["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert messages[3]["content"] == "[The image follows in the next user message.]"
    assert [part["type"] for part in messages[5]["content"]] == ["text", "image_url"]
    assert "c1" in messages[5]["content"][0]["text"]


async def test_an_empty_response_is_left_out() -> None:
    for wire_format in WIRE_FORMATS:
        body = await body_of(wire_format, request(user("a"), assistant(said("")), assistant(), user("b")))
        assert_legal(body)


async def test_a_compaction_allows_no_call_and_keeps_the_tools() -> None:
    for wire_format in WIRE_FORMATS:
        body = json.loads(await body_of(wire_format, request(is_compaction=True)))
        choice = {"type": "none"} if wire_format == "anthropic-messages" else "none"
        assert (body["tool_choice"], len(body["tools"])) == (choice, 1)


async def test_effort_and_cache_key_take_the_providers_form() -> None:
    asked = request(effort="max", model="anthropic/claude-opus-5")
    plain = json.loads(await body_of("openai-chat", asked))
    assert (plain["reasoning_effort"], "prompt_cache_key" in plain) == ("max", False)
    quirky = json.loads(
        await body_of(
            "openai-chat", asked, effort_is_object=True, efforts={"max": "xhigh"}, marks_cache_for="anthropic/"
        )
    )
    assert (quirky["reasoning"], quirky["cache_control"]["type"]) == ({"effort": "xhigh"}, "ephemeral")
    responses = json.loads(await body_of("openai-responses", asked, sends_cache_key=True))
    assert (responses["reasoning"], responses["prompt_cache_key"], responses["include"]) == (
        {"effort": "max", "summary": "auto"},
        "cache-1",
        ["reasoning.encrypted_content"],
    )


async def test_a_model_that_does_not_reason_is_sent_no_reasoning_settings() -> None:
    body = json.loads(await body_of("openai-responses", request(model="gpt-4.1-mini")))
    assert body.keys() & {"reasoning", "include"} == set()


@pytest.mark.parametrize(
    ("sent_back", "expected"),
    [
        ("", "{}"),
        ("  ", "{}"),
        ("{}", "{}"),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a":1,"a":2}', '{"a":1,"a":2}'),
        ("[]", '{"malformed_arguments":"[]"}'),
        ('"x"', '{"malformed_arguments":"\\"x\\""}'),
        ('{"a":', '{"malformed_arguments":"{\\"a\\":"}'),
        ('{"a":1}{"b":2}', '{"malformed_arguments":"{\\"a\\":1}{\\"b\\":2}"}'),
        ('{"a":NaN}', '{"malformed_arguments":"{\\"a\\":NaN}"}'),
        ('{"a":"\\ud800"}', '{"malformed_arguments":"{\\"a\\":\\"\\\\ud800\\"}"}'),
    ],
)
def test_arguments_go_back_as_a_json_object(sent_back: str, expected: str) -> None:
    assert replayable_arguments(sent_back) == expected


@given(st.text())
def test_any_arguments_go_back_as_a_json_object(arguments: str) -> None:
    assert isinstance(json.loads(replayable_arguments(arguments)), dict)


TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
CALL = st.tuples(TEXT, TEXT, st.booleans())
TURN = st.tuples(st.lists(TEXT, min_size=1, max_size=2), TEXT, st.lists(CALL, max_size=3), st.booleans())


@given(st.lists(TURN, min_size=1, max_size=4))
async def test_every_conversation_is_legal_in_every_format(
    turns: list[tuple[list[str], str, list[tuple[str, str, bool]], bool]],
) -> None:
    entries: list[llm_pb2.ContextEntry] = []
    for number, (inputs, text, calls, has_reasoning) in enumerate(turns):
        entries += [user(text_in or "-") for text_in in inputs]
        items = [thought(REASONING_2, "openai-responses")] if has_reasoning else []
        items.append(said(text))
        results = []
        for place, (name, arguments, has_image) in enumerate(calls):
            items.append(called(f"c{number}-{place}", name, arguments))
            results.append(result(f"c{number}-{place}", "x", *([image_part()] if has_image else [])))
        entries += [assistant(*items), *results]
    entries.append(user("go on"))
    for wire_format in WIRE_FORMATS:
        assert_legal(await body_of(wire_format, request(*entries)))
