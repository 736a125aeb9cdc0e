"""A fork begins idle, with nothing of its parent running, and goes on when somebody speaks to it."""

from __future__ import annotations

from harness.tools.presentation import RUNNING_PLACEHOLDER
from tests.support.histories import fork_of
from tests.support.session_driver import SessionDriver, calls, says, stop_input, text_input
from tests.support.session_oracle import assert_conversation_is_legal, loaded_state
from tests.support.session_scenes import (
    HARD,
    WHEN_IDLE,
    accepted,
    asked_session,
    idle_session,
    results,
    retry_input,
    session_with_calls,
    settings_input,
    standing,
)
from unreal_agent.llm.v1 import llm_pb2

INTERRUPTED = "Not carried over: this call was still running where the conversation was forked."


def assert_is_at_rest(child: SessionDriver) -> None:
    assert child.commits == [], "a fork writes nothing before it is spoken to"
    assert (child.effects, child.decision and child.decision.wake_s) == ([], None)


def test_it_rests_at_each_stage_of_its_parent() -> None:
    parent = session_with_calls("c1", "c2")
    parent.report(parent.operation_of("c1"), text="one")
    parent.wait(1.1)
    parent.answer(says("waiting"))
    parent.report(parent.operation_of("c2"), text="two")
    parent.answer(says("done"))
    for cut in range(1, len(parent.items) + 1):
        child = fork_of(parent, cut_sequence=cut)
        assert_is_at_rest(child)
        assert dict(child.state.calls) == {}


def test_an_open_call_is_closed_by_a_result_that_says_so() -> None:
    parent = session_with_calls("c1", "c2")
    parent.report(parent.operation_of("c1"), text="one")
    child = fork_of(parent)
    child.say("go on")
    sent = child.sent()
    assert sent[:3] == [("user", "do it"), ("assistant", "c1 c2"), ("tool_result", "c1: one")]
    assert sent[3][1].startswith(f"c2: {INTERRUPTED}")
    assert sent[4] == ("user", "go on")
    assert {call_id: outcome for call_id, (outcome, _) in results(child).items()} == {
        "c1": "COMPLETED",
        "c2": "NOT_CARRIED_OVER",
    }


def test_a_call_whose_placeholder_was_sent_is_closed_by_a_late_result() -> None:
    parent = session_with_calls("c1")
    parent.say("and?")
    parent.answer(says("it runs"))
    child = fork_of(parent)
    child.say("go on")
    assert child.sent()[2] == ("tool_result", f"c1: {RUNNING_PLACEHOLDER}")
    assert INTERRUPTED in child.sent()[-2][1]


def test_its_turns_chain_to_the_inherited_ones() -> None:
    parent = idle_session()
    child = fork_of(parent)
    child.say("go on")
    turn = child.items[-1].turn
    assert turn.previous_turn_id == parent.items[1].turn.turn_id
    assert turn.turn_id == f"uid-child-t{turn_sequence(child)}"
    assert turn.prompt == parent.items[1].turn.prompt


def turn_sequence(driver: SessionDriver) -> int:
    return driver.items[-1].sequence


def test_unanswered_inherited_inputs_go_with_its_first_turn() -> None:
    parent = asked_session()
    parent.say("more", after_turn=True)
    child = fork_of(parent)
    child.say("go on")
    assert child.sent() == [("user", "do it"), ("user", "more"), ("user", "go on")]
    child.answer(says("done"))
    assert (standing(child), child.state.pending) == (("IDLE", ""), 0)


def test_a_cut_between_a_turn_and_its_response_keeps_what_the_turn_sent() -> None:
    parent = asked_session()
    parent.answer(says("unheard"))
    child = fork_of(parent, cut_sequence=2)
    child.say("go on")
    assert child.sent() == [("user", "do it"), ("user", "go on")]


def test_inherited_input_ids_count_as_seen() -> None:
    parent = idle_session()
    known = parent.items[0].input
    child = fork_of(parent)
    child.submit(known)
    assert (accepted(child), child.commits) == ([(1, True)], [])


def test_it_has_the_settings_at_the_cut() -> None:
    parent = idle_session()
    parent.submit(settings_input("s1", model="m2"))
    child = fork_of(parent)
    parent.submit(settings_input("s2", model="m3"))
    child.say("go on")
    assert child.items[-1].turn.model == "m2"


def test_neither_a_stop_nor_a_failure_of_its_parent_is_its_own() -> None:
    stopped = asked_session()
    stopped.submit(stop_input("s1", HARD))
    failed = asked_session()
    failed.fail(llm_pb2.ERROR_CLASS_QUOTA)
    waiting = asked_session()
    waiting.fail(llm_pb2.ERROR_CLASS_RATE_LIMIT)
    for parent in (stopped, failed, waiting):
        child = fork_of(parent)
        assert_is_at_rest(child)
        child.say("go on")
        assert child.sent() == [("user", "do it"), ("user", "go on")]


def test_it_stops_when_it_is_told_to_and_starts_again() -> None:
    child = fork_of(session_with_calls("c1"))
    child.submit(stop_input("s1", HARD, "no"))
    assert standing(child) == ("STOPPED", "no")
    child.say("yes")
    assert standing(child) == ("RUNNING", "")


def test_a_call_of_its_own_runs_under_its_own_operation() -> None:
    parent = session_with_calls("c1")
    child = fork_of(parent)
    child.say("go on")
    child.answer(calls("c1"), calls("own"))
    renamed = child.items[-3].model_response.output.items[0].tool_call
    assert (renamed.call_id != "c1", renamed.provider_call_id) == (True, "c1")
    assert child.operation_of("own").startswith("uid-child-")
    for operation in list(child.state.unsettled()):
        child.report(operation.operation_id, text="mine")
    child.answer(says("done"))
    assert standing(child) == ("IDLE", "")
    assert_conversation_is_legal([one.entry for one in child.state.context.submitted.entries])


def test_a_late_report_of_its_parents_operation_is_not_its_business() -> None:
    parent = session_with_calls("c1")
    child = fork_of(parent)
    report = parent.reported(parent.operation_of("c1"), parent.operations[parent.operation_of("c1")].status)
    child.step(report)
    assert child.commits == []


def test_skills_can_be_used_though_the_inspection_was_the_parents() -> None:
    child = fork_of(idle_session())
    child.say("go on")
    child.answer(calls("c1", "SkillUse", '{"name": "testing"}'))
    assert child.operations[child.operation_of("c1")].type == "skill_use"


def test_another_prompt_makes_it_look_at_the_workspace_itself() -> None:
    child = fork_of(idle_session())
    child.submit(settings_input("s1", system_prompt="be brief"))
    child.say("go on")
    assert child.dispatched() == ["uid-child-i6"]
    assert child.sent()[-1] == ("user", "go on")


def test_a_fork_of_a_fork_is_a_fork() -> None:
    child = fork_of(session_with_calls("c1"))
    child.say("go on")
    child.answer(calls("c2"))
    grandchild = fork_of(child, session_id="grandchild")
    assert dict(grandchild.state.calls) == {}
    grandchild.say("and on")
    assert_conversation_is_legal([one.entry for one in grandchild.state.context.submitted.entries])
    grandchild.answer(says("done"))
    assert standing(grandchild) == ("IDLE", "")


def test_replay_of_a_fork_that_lives_gives_its_state() -> None:
    child = fork_of(session_with_calls("c1"))
    child.say("go on")
    child.answer(calls("c2"))
    assert loaded_state(child.record, child.changes) == child.state


def test_a_stop_when_idle_of_the_parent_does_not_end_the_fork() -> None:
    parent = session_with_calls("c1")
    parent.submit(stop_input("s1", WHEN_IDLE))
    child = fork_of(parent)
    child.say("go on")
    child.answer(says("done"))
    assert standing(child) == ("IDLE", "")


def test_nothing_of_it_has_failed() -> None:
    parent = asked_session()
    parent.fail(llm_pb2.ERROR_CLASS_QUOTA)
    child = fork_of(parent)
    child.submit(retry_input("r1"))
    assert child.commits == []
    child.submit(text_input("x1", "go on"))
    assert standing(child) == ("RUNNING", "")
