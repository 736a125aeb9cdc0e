"""A refused request's new content is left out on retry; calls keep their one result."""

from __future__ import annotations

from harness.context_builder import next_request, omit_new
from harness.context_builder.context_builder import OMITTED_RESULT
from tests.support.context_items import (
    PROMPT,
    answered,
    built,
    call,
    final,
    heartbeat,
    history,
    started,
    text,
    turn,
    user,
)
from tests.support.session_oracle import assert_conversation_is_legal
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2


def test_refused_inputs_are_dropped_and_nothing_is_left_to_answer() -> None:
    context, must_answer = omit_new(history(user("bad"), turn()))
    assert (built(context), must_answer) == ([], False)


def test_refused_results_are_replaced_and_must_be_answered() -> None:
    before = history(
        *(user("go"), turn(), answered(call("c1"), call("c2")), started("c1"), started("c2")),
        *(final("c1", text("poison")), final("c2", text("fine")), user("bad"), turn()),
    )
    context, must_answer = omit_new(before)
    entries = built(context)
    assert must_answer
    assert_conversation_is_legal(entries)
    assert [list(entry.tool_result.parts) for entry in entries[2:]] == [[text(OMITTED_RESULT)]] * 2


def test_placeholders_stay_and_need_no_answer() -> None:
    before = history(user("go"), turn(), answered(call("c1")), started("c1"), user("bad"), turn())
    context, must_answer = omit_new(before)
    entries = built(context)
    assert (len(entries), entries[2].tool_result.is_placeholder, must_answer) == (3, True, False)


def test_late_results_and_heartbeats_are_dropped_with_the_rest() -> None:
    before = history(
        *(user("go"), turn(), answered(call("c1")), started("c1"), user("?"), turn()),
        *(answered(llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text="so"))), heartbeat("still")),
        *(final("c1", text("late")), turn()),
    )
    context, must_answer = omit_new(before)
    assert ([entry.source_sequence for entry in built(context)], must_answer) == ([1, 3, 3, 5, 7], False)


def test_everything_that_was_left_out_is_reported() -> None:
    before = history(
        *(user("go"), turn(), answered(call("c1")), started("c1")),
        *(final("c1", text("poison")), user("bad"), turn()),
    )
    context, _ = omit_new(before)
    changes = next_request(context, provider="scripted", model="m1", prompt_digest=PROMPT).changes
    assert [(change.kind, change.source_sequence, change.call_id, change.omitted_bytes) for change in changes] == [
        (item_pb2.CONTEXT_CHANGE_KIND_OMITTED, 5, "c1", len("poison")),
        (item_pb2.CONTEXT_CHANGE_KIND_OMITTED, 6, "", len("bad")),
    ]


def test_what_was_answered_before_is_not_touched() -> None:
    before = history(
        *(user("go"), turn(), answered(llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text="so")))),
        *(user("bad"), turn()),
    )
    context, _ = omit_new(before)
    assert context.submitted == before.answered
