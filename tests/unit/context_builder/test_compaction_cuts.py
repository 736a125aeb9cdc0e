"""Wherever a conversation is cut, what is left is legal for every provider; nothing that belongs together is parted."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from harness.context_builder import ContextState, advance, awaited_calls, next_request
from harness.context_builder.compaction import cut_index, kept_input, plan, request_entries, summary_text
from harness.llm import LLMRequest
from harness.llm.providers import dialect_of
from harness.llm.request_parts import Quirks, load_blobs
from tests.support.context_items import (
    PROMPT,
    answered,
    call,
    compacted,
    final,
    heartbeat,
    history,
    started,
    text,
    turn,
    user,
)
from tests.support.llm import PNG, blob_ref, request, thought
from tests.support.request_rules import assert_legal
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

FORMATS = ("openai-chat", "openai-responses", "anthropic-messages")
REASONING = {
    "openai-responses": '{"id":"rs_1", "type":"reasoning","encrypted_content":"gA==","summary":[]}',
    "openai-chat": '{"reasoning_content":"hm"}',
    "anthropic-messages": '{"type":"thinking","thinking":"hm","signature":"c2ln"}',
}


def said(value: str) -> llm_pb2.OutputItem:
    return llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text=value))


def picture() -> llm_pb2.ContentPart:
    image = llm_pb2.ImagePart(blob=blob_ref(PNG, "image/png"), media_type="image/png")
    return llm_pb2.ContentPart(image=image)


def whole(wire_format: str) -> list[item_pb2.Item]:
    """Return a history with everything in it: parallel calls, reasoning, pictures, calls that run on, late results."""
    hm = thought(REASONING[wire_format], wire_format)
    return [
        *(user("the first question"), turn(), answered(hm, said("both"), call("a"), call("b"))),
        *(started("a"), started("b"), final("b", text("of b")), final("a", text("of a"), picture())),
        *(turn(), answered(hm, call("slow"), call("quick")), started("slow"), started("quick")),
        *(final("quick", text("quick")), user("hurry"), turn(), answered(said("I do"))),
        *(final("slow", text("at last")), turn(), answered(hm, said("so"), hm, call("runs")), started("runs")),
        *(user("and this?"), turn(), answered(said("later")), heartbeat("[heartbeat] still there")),
        *(turn(), answered(hm, call("c"), call("d")), started("c"), started("d"), final("d", text("of d"))),
        *(final("c", text("c" * 5_000)), turn(), answered(said("nearly"))),
        *(user("the newest question"), turn(), answered(call("e")), started("e"), final("e", text("of e"))),
    ]


def responses_of(context: ContextState) -> list[int]:
    return [one.entry.source_sequence for one in context.answered.entries if one.kind == "response"]


def sent(context: ContextState) -> list[llm_pb2.ContextEntry]:
    return next_request(context, provider="scripted", model="m1", prompt_digest=PROMPT).entries


async def assert_legal_everywhere(entries: Sequence[llm_pb2.ContextEntry]) -> list[str]:
    """Fail where a provider would refuse it; return the bodies."""
    asked: LLMRequest = request(*entries)
    blobs = await load_blobs(asked.entries, asked.load_blob)
    bodies = [dialect_of(one, Quirks()).body(asked, blobs) for one in FORMATS]
    for body in bodies:
        assert_legal(body)
    return [body.decode() for body in bodies]


def after_compaction(context: ContextState, through: int, sequence: int) -> ContextState:
    cut = cut_index(context.answered.entries, through)
    summary = summary_text("a summary", context.answered.entries[:cut], awaited_calls(context))
    item = compacted(summary, through_sequence=through)
    item.sequence = sequence
    waiting = [*context.submitted.entries[len(context.answered.entries) :], *context.inputs]
    item.compaction.kept_input_sequence = kept_input(
        context.answered.entries,
        through,
        is_newest=not any(one.kind == "input" for one in waiting),
        max_tokens=1_000,
    )
    return advance(context, item)


@pytest.mark.parametrize("wire_format", sorted(REASONING))
async def test_every_length_of_history_can_be_cut_behind_every_response(wire_format: str) -> None:
    items = whole(wire_format)
    cuts = 0
    for length in range(1, len(items) + 1):
        context = history(*items[:length])
        entries = context.answered.entries
        for keep_tokens in {0, 10, 40, 100, 400, 100_000}:
            planned = plan(
                context.answered.entries, keep_tokens=keep_tokens, max_request_tokens=10**6, is_trimmed=False
            )
            if planned is None:
                continue
            cuts += 1
            asked = [one.entry for one in request_entries(entries, planned.changes)]
            await assert_legal_everywhere(asked)
            after = after_compaction(context, planned.through_sequence, length + 1)
            await assert_legal_everywhere(sent(after))
    assert cuts > 100


@pytest.mark.parametrize("wire_format", sorted(REASONING))
async def test_nothing_that_is_kept_changes_and_nothing_that_waits_is_lost(wire_format: str) -> None:
    items = whole(wire_format)
    context = history(*items)
    waiting = [one.entry for one in (*context.results, *context.late, *context.inputs)]
    for through in responses_of(context)[:-1]:
        after = after_compaction(context, through, len(items) + 1)
        entries = sent(after)
        cut = cut_index(context.answered.entries, through)
        kept = [one.entry for one in context.answered.entries[cut:]]
        behind = len(kept) + len(waiting)
        assert entries[-behind:] == [*kept, *waiting]
        assert "a summary" in entries[0].user.parts[0].text.text
        words = [part.text.text for entry in entries for part in entry.user.parts]
        assert words.count("the newest question") == 1


async def test_reasoning_goes_back_byte_for_byte_with_what_it_led_to() -> None:
    for place, wire_format in enumerate(FORMATS):
        context = history(*whole(wire_format))
        through = responses_of(context)[1]
        entries = sent(after_compaction(context, through, 100))
        left = sum(one.HasField("reasoning") for entry in entries for one in entry.assistant.items)
        assert left == 3
        body = (await assert_legal_everywhere(entries))[place]
        if wire_format != "openai-chat":
            assert body.count(REASONING[wire_format]) >= 2


def test_a_call_that_still_runs_is_listed_and_answered_later() -> None:
    items = whole("openai-responses")
    context = history(*items)
    after = after_compaction(context, responses_of(context)[5], 100)
    summary = sent(after)[0].user.parts[0].text.text
    listed = [line for line in summary.splitlines() if line.startswith("- call ID ")]
    assert [line.split(",")[0] for line in listed] == ["- call ID runs"]
    late = final("runs", text("done at last"))
    late.sequence = 101
    told = [part.text.text for entry in sent(advance(after, late)) for part in entry.user.parts]
    assert sum("done at last" in one for one in told) == 1


def test_a_long_call_is_listed_by_its_beginning() -> None:
    made = llm_pb2.ToolCall(call_id="c1", name="Bash", arguments_json=json.dumps({"command": "x" * 5_000}))
    context = history(user("go"), turn(), answered(llm_pb2.OutputItem(tool_call=made)), started("c1"), turn())
    summary = summary_text("s", context.submitted.entries, awaited_calls(context))
    assert len(summary.splitlines()[-1].partition("arguments: ")[2]) == 500


def test_no_plan_where_no_turn_is_whole() -> None:
    for items in (
        [],
        [user("go")],
        [user("go"), turn()],
        [user("go"), turn(), answered(call("a")), started("a")],
        [user("go"), turn(), answered(call("a")), started("a"), final("a", text("x")), turn()],
    ):
        answered_part = history(*items).answered.entries
        assert plan(answered_part, keep_tokens=0, max_request_tokens=10**6, is_trimmed=False) is None


@pytest.mark.parametrize("max_tokens", [50, 400, 700, 1_000, 1_400, 5_000])
async def test_a_request_for_a_summary_fits_what_it_may_take(max_tokens: int) -> None:
    items = whole("openai-responses")
    context = history(*items)
    planned = plan(context.answered.entries, keep_tokens=0, max_request_tokens=max_tokens, is_trimmed=True)
    assert planned is not None
    entries = request_entries(context.answered.entries, planned.changes)
    await assert_legal_everywhere([one.entry for one in entries])
    tokens = sum(one.totals.estimated_tokens for one in entries)
    # The instruction and the latest turn stay, however little room there is.
    assert tokens <= max(max_tokens, 700)
