"""A running call is shown by a placeholder; once that was sent, its result follows as a labelled user message."""

from __future__ import annotations

from harness.tools.presentation import LATE_RESULT_TAG, RUNNING_PLACEHOLDER
from tests.support.session_driver import calls, says
from tests.support.session_scenes import FAILED, asked_session, results, session_with_calls
from unreal_agent.llm.v1 import llm_pb2


def test_a_result_that_is_there_in_time_stands_in_the_place_of_the_placeholder() -> None:
    driver = session_with_calls("c1")
    assert driver.next_sent()[-1] == ("tool_result", f"c1: {RUNNING_PLACEHOLDER}")
    driver.report(driver.operation_of("c1"), text="in time")
    assert driver.sent() == [("user", "do it"), ("assistant", "c1"), ("tool_result", "c1: in time")]


def test_the_placeholder_is_constant_and_stays_once_it_was_sent() -> None:
    driver = session_with_calls("c1")
    driver.say("go on")
    driver.answer(says("yes"))
    driver.report(driver.operation_of("c1"), text="late")
    sent = driver.sent()
    assert sent[:-1] == [
        ("user", "do it"),
        ("assistant", "c1"),
        ("tool_result", f"c1: {RUNNING_PLACEHOLDER}"),
        ("user", "go on"),
        ("assistant", "yes"),
    ]
    role, text = sent[-1]
    assert role == "user"
    assert text.startswith(f'<{LATE_RESULT_TAG} tool="Bash" call_id="c1" outcome="completed" mark="')
    assert "\nlate\n" in text


def test_a_placeholder_of_an_interrupted_turn_stays_too() -> None:
    driver = session_with_calls("c1")
    driver.say("first")
    driver.report(driver.operation_of("c1"), text="late")
    driver.say("second")
    roles = [role for role, _ in driver.sent()]
    assert roles == ["user", "assistant", "tool_result", "user", "user", "user"]
    assert driver.sent()[2] == ("tool_result", f"c1: {RUNNING_PLACEHOLDER}")


def test_late_results_stand_behind_the_results_and_before_the_inputs() -> None:
    driver = session_with_calls("old")
    driver.say("go on")
    driver.answer(calls("new"))
    driver.say("a question", after_turn=True)
    driver.report(driver.operation_of("old"), text="of old")
    driver.report(driver.operation_of("new"), text="of new")
    sent = driver.sent()[-3:]
    assert sent[0] == ("tool_result", "new: of new")
    assert "of old" in sent[1][1]
    assert sent[2] == ("user", "a question")


def test_late_results_stand_in_the_order_in_which_they_came() -> None:
    driver = session_with_calls("c1", "c2")
    driver.say("go on")
    driver.report(driver.operation_of("c2"), text="second call")
    driver.report(driver.operation_of("c1"), text="first call")
    driver.answer(says("yes"))
    texts = [text for _, text in driver.sent()[-2:]]
    assert ["second call" in texts[0], "first call" in texts[1]] == [True, True]


def test_a_late_failure_says_that_it_is_one() -> None:
    driver = session_with_calls("c1")
    driver.say("go on")
    driver.report(driver.operation_of("c1"), FAILED, text="it broke")
    driver.answer(says("yes"))
    assert 'outcome="failed"' in driver.sent()[-1][1]
    assert driver.state.context.open_calls == {}


def test_a_placeholder_never_replaces_a_result() -> None:
    driver = session_with_calls("c1", "c2")
    driver.report(driver.operation_of("c1"), text="one")
    driver.wait(1.1)
    driver.restart()
    assert driver.sent()[-2:] == [
        ("tool_result", "c1: one"),
        ("tool_result", f"c2: {RUNNING_PLACEHOLDER}"),
    ]


def test_a_response_is_placed_before_what_came_while_it_ran() -> None:
    driver = session_with_calls("c1")
    driver.say("go on")
    driver.report(driver.operation_of("c1"), text="late")
    driver.say("later", after_turn=True)
    driver.answer(says("an answer"))
    sent = driver.sent()[-3:]
    assert sent[0] == ("assistant", "an answer")
    assert "late" in sent[1][1]
    assert sent[2] == ("user", "later")


def test_requests_that_were_built_do_not_change() -> None:
    driver = session_with_calls("c1")
    driver.say("go on")
    built = driver.state.context.submitted
    image = [placed.entry.SerializeToString(deterministic=True) for placed in built.entries]
    driver.report(driver.operation_of("c1"), text="late")
    driver.answer(says("yes"))
    assert [placed.entry.SerializeToString(deterministic=True) for placed in built.entries] == image


def test_a_result_that_is_an_error_is_marked_as_one() -> None:
    driver = session_with_calls("c1", "c2")
    driver.report(driver.operation_of("c1"), FAILED, text="it broke")
    driver.report(driver.operation_of("c2"))
    placed = list(driver.state.context.submitted.entries)[-2:]
    assert [one.entry.tool_result.is_error for one in placed] == [True, False]
    assert [one.entry.tool_result.is_placeholder for one in placed] == [False, False]
    assert results(driver)["c1"][0] == "FAILED"


def test_reasoning_goes_back_with_its_response() -> None:
    driver = asked_session()
    reasoning = llm_pb2.OutputItem(reasoning=llm_pb2.Reasoning(raw_json='{"a": 1}', wire_format="scripted"))
    driver.answer(reasoning, calls("c1"))
    driver.report(driver.operation_of("c1"))
    assistant = driver.state.context.submitted.entries[1].entry.assistant
    assert list(assistant.items) == [reasoning, calls("c1")]
