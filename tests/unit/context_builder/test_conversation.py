"""What the model is sent, as a pure function of the history: who stands where, and what never moves."""

from __future__ import annotations

from harness.context_builder import ContextState, advance, next_request, report
from harness.context_builder.entries import Totals
from harness.tools.presentation import RUNNING_PLACEHOLDER, late_result_parts
from tests.support.context_items import (
    PROMPT,
    answered,
    built,
    call,
    compacted,
    control,
    crash,
    final,
    heartbeat,
    history,
    image,
    reasoning,
    started,
    text,
    turn,
    user,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2


def said(value: str) -> llm_pb2.OutputItem:
    return llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text=value, phase="commentary"))


def test_an_input_becomes_a_user_message() -> None:
    assert built(history(user("hello"))) == [
        llm_pb2.ContextEntry(user=llm_pb2.UserMessage(parts=[text("hello")]), source_sequence=1)
    ]


def test_all_parts_of_an_input_are_kept_in_order() -> None:
    parts = [text("look"), image("aa" * 32), text("there")]
    content = item_pb2.Item(input=item_pb2.Input(content=item_pb2.Content(parts=parts)))
    assert list(built(history(content))[0].user.parts) == parts


def test_a_heartbeat_becomes_a_user_message() -> None:
    assert built(history(heartbeat("still running"))) == [
        llm_pb2.ContextEntry(user=llm_pb2.UserMessage(parts=[text("still running")]), source_sequence=1)
    ]


def test_other_controls_and_crashes_are_not_shown() -> None:
    stop = control(stop=item_pb2.Stop(mode=item_pb2.STOP_MODE_HARD, reason="enough"))
    settings = control(settings=session_pb2.SettingsPatch(model="m2"))
    assert built(history(stop, settings, crash())) == []


def test_a_response_is_appended_as_it_came() -> None:
    items = [reasoning("{}"), said("so"), call("c1")]
    entries = built(history(user("hello"), turn(), answered(*items), started("c1")))
    assert entries[1] == llm_pb2.ContextEntry(assistant=llm_pb2.AssistantMessage(items=items), source_sequence=3)


def test_a_response_stands_before_inputs_that_came_while_it_ran() -> None:
    entries = built(history(user("first"), turn(), user("second"), answered(said("an answer"))))
    assert [entry.source_sequence for entry in entries] == [1, 4, 3]


def test_a_running_call_is_shown_by_a_placeholder_directly_behind_its_response() -> None:
    entries = built(history(user("go"), turn(), user("more"), answered(call("c1"), call("c2")), started("c1")))
    placeholders = [
        llm_pb2.ContextEntry(
            tool_result=llm_pb2.ToolResult(
                call_id=call_id, tool_name="Bash", parts=[text(RUNNING_PLACEHOLDER)], is_placeholder=True
            ),
            source_sequence=4,
        )
        for call_id in ("c1", "c2")
    ]
    assert entries[2:4] == placeholders
    assert entries[4].source_sequence == 3


def test_a_final_result_replaces_a_placeholder_that_was_not_sent() -> None:
    parts = [text("look"), image("bb" * 32)]
    entries = built(history(user("go"), turn(), answered(call("c1")), started("c1"), final("c1", *parts)))
    assert entries[2:] == [
        llm_pb2.ContextEntry(
            tool_result=llm_pb2.ToolResult(call_id="c1", tool_name="Bash", parts=parts), source_sequence=5
        )
    ]


def test_a_final_result_follows_a_placeholder_that_was_sent() -> None:
    items = [user("go"), turn(), answered(call("c1")), started("c1"), user("?"), turn(), final("c1", text("done"))]
    entries = built(history(*items))
    assert entries[2].tool_result.is_placeholder
    result = items[6].tool_call_status.result
    assert entries[4:] == [
        llm_pb2.ContextEntry(user=llm_pb2.UserMessage(parts=late_result_parts("Bash", "c1", result)), source_sequence=7)
    ]


def test_results_stand_before_late_results_and_those_before_inputs() -> None:
    entries = built(
        history(
            *(user("go"), turn(), answered(call("old")), started("old"), user("?"), turn()),
            *(user("later"), final("old", text("late")), answered(call("new")), started("new")),
            final("new", text("quick")),
        )
    )
    assert [entry.source_sequence for entry in entries[4:]] == [9, 11, 8, 7]


def test_an_empty_response_adds_nothing() -> None:
    assert len(built(history(user("go"), turn(), answered()))) == 1


def test_a_turn_failure_changes_nothing() -> None:
    items = [user("go"), turn()]
    failure = item_pb2.Item(turn_failure=item_pb2.TurnFailure(turn_id="t2"))
    assert history(*items, failure) == history(*items)


def test_a_request_that_was_built_does_not_change_with_the_history() -> None:
    context = history(user("go"), turn(), answered(call("c1")), started("c1"))
    request = next_request(context, provider="scripted", model="m1", prompt_digest=PROMPT)
    before = [entry.SerializeToString(deterministic=True) for entry in request.entries]
    later = advance(context, _at(5, final("c1", text("done"))))
    advance(later, _at(6, user("more")))
    assert [entry.SerializeToString(deterministic=True) for entry in request.entries] == before


def _at(sequence: int, item: item_pb2.Item) -> item_pb2.Item:
    item.sequence = sequence
    return item


def test_another_prompt_leaves_the_conversation_alone() -> None:
    context = history(user("go"), turn(), answered(said("so")), user("more"))
    same = next_request(context, provider="scripted", model="m1", prompt_digest=PROMPT)
    other = next_request(context, provider="scripted", model="m1", prompt_digest="cd" * 32)
    assert other.entries == same.entries
    assert other.digest != same.digest
    assert [change.kind for change in other.changes] == [item_pb2.CONTEXT_CHANGE_KIND_PREFIX_BREAK]


def test_another_model_is_sent_no_reasoning_of_the_one_before() -> None:
    context = history(
        *(user("go"), turn(), answered(reasoning("{}"), said("so"))),
        *(user("more"), turn(), answered(reasoning("{}"))),
    )
    request = next_request(context, provider="scripted", model="m2", prompt_digest=PROMPT)
    assert [entry.source_sequence for entry in request.entries] == [1, 3, 4]
    assert list(request.entries[1].assistant.items) == [said("so")]
    assert [change.kind for change in request.changes] == [item_pb2.CONTEXT_CHANGE_KIND_PREFIX_BREAK]


def test_reasoning_that_was_left_out_does_not_come_back() -> None:
    context = history(
        *(user("go"), turn(), answered(reasoning("{}"), said("so"))),
        *(user("more"), turn(model="m2"), answered(said("well"))),
    )
    request = next_request(context, provider="scripted", model="m1", prompt_digest=PROMPT)
    assert list(request.entries[1].assistant.items) == [said("so")]
    assert request.changes == ()


def test_another_model_without_reasoning_breaks_nothing() -> None:
    context = history(user("go"), turn(), answered(said("so")))
    same = next_request(context, provider="scripted", model="m1", prompt_digest=PROMPT)
    other = next_request(context, provider="elsewhere", model="m2", prompt_digest=PROMPT)
    assert (other.digest, other.changes) == (same.digest, ())


def test_the_report_lists_everything_that_would_be_sent() -> None:
    context = history(user("go"), turn(), answered(call("c1")), started("c1"), user("more"))
    assert [(placed.kind, placed.call_id) for placed in report(context)] == [
        ("input", ""),
        ("response", ""),
        ("tool_result", "c1"),
        ("input", ""),
    ]


def test_totals_count_texts_images_and_calls() -> None:
    blob = llm_pb2.BlobRef(digest="ee" * 32, size_bytes=70_000)
    long_text = llm_pb2.ContentPart(text=llm_pb2.TextPart(blob=blob))
    content = item_pb2.Item(input=item_pb2.Input(content=item_pb2.Content(parts=[text("héllo"), long_text])))
    arguments = '{"command": "true"}'
    context = history(
        *(content, turn(), answered(said("so"), call("c1"), reasoning("{}"))),
        *(started("c1"), final("c1", text("done"), image("ff" * 32))),
    )
    totals = next_request(context, provider="scripted", model="m1", prompt_digest=PROMPT).prefix.totals
    text_bytes = len("héllo".encode()) + 70_000 + len("so") + len(arguments) + len("Bash") + len("{}") + len("done")
    assert totals == Totals(entries=3, text_bytes=text_bytes, images=1, image_tokens=1_500)
    assert totals.estimated_tokens == text_bytes // 4 + 1_500


def test_a_cut_result_is_in_the_report_of_the_next_turn_only() -> None:
    cut = final("c1", text("do"))
    cut.tool_call_status.result.truncation.omitted_bytes = 7
    cut.tool_call_status.result.truncation.reason = "too long"
    context = history(user("go"), turn(), answered(call("c1")), started("c1"), cut)
    expected = item_pb2.ContextChange(
        kind=item_pb2.CONTEXT_CHANGE_KIND_TRUNCATED,
        source_sequence=5,
        call_id="c1",
        reason="too long",
        omitted_bytes=7,
    )
    request = next_request(context, provider="scripted", model="m1", prompt_digest=PROMPT)
    assert request.changes == (expected,)
    after = advance(context, _at(6, turn()))
    assert next_request(after, provider="scripted", model="m1", prompt_digest=PROMPT).changes == ()


def test_a_compaction_puts_a_summary_in_the_place_of_what_it_covers() -> None:
    context = history(
        *(user("long ago"), turn(), answered(said("long since"))),
        *(user("lately"), turn(), answered(said("just now"))),
        compacted("a summary", through_sequence=3),
    )
    request = next_request(context, provider="scripted", model="m1", prompt_digest=PROMPT)
    assert [entry.source_sequence for entry in request.entries] == [7, 4, 6]
    assert request.entries[0].user == llm_pb2.UserMessage(parts=[text("a summary")])
    assert [(change.kind, change.omitted_bytes) for change in request.changes] == [
        (item_pb2.CONTEXT_CHANGE_KIND_COMPACTED, len("long ago") + len("long since"))
    ]


def test_a_compaction_turn_and_its_response_are_not_shown() -> None:
    items = [user("go"), turn(), answered(said("so"))]
    compacting = [turn(kind=item_pb2.TURN_KIND_COMPACTION), answered(said("a summary"), call("c1"))]
    assert history(*items, *compacting) == history(*items)


def test_a_response_behind_a_compaction_is_shown_again() -> None:
    compacting = [turn(kind=item_pb2.TURN_KIND_COMPACTION), answered(said("a summary"))]
    entries = built(history(user("go"), *compacting, turn(), answered(said("so"))))
    assert [entry.source_sequence for entry in entries] == [1, 5]


def test_an_empty_history_sends_nothing() -> None:
    request = next_request(ContextState(), provider="scripted", model="m1", prompt_digest=PROMPT)
    assert (request.entries, request.digest, request.changes) == ([], PROMPT, ())
