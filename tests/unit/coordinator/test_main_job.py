"""The ordinary course of a session: input, inspection, turn, call, result, answer."""

from __future__ import annotations

from harness.coordinator.protocol import Acknowledge, Answer
from harness.tools.presentation import RUNNING_PLACEHOLDER
from tests.support.session_driver import SessionDriver, calls, says, text_input
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import session_pb2


def test_a_quick_tool_turn_costs_four_commits() -> None:
    driver = SessionDriver()
    driver.say("warm up")
    driver.answer(says("ready"))
    before = len(driver.commits)
    driver.say("do it")
    driver.answer(says("running"), calls("c1"))
    driver.report(driver.operation_of("c1"), operation_pb2.OPERATION_STATUS_AWAITING)
    driver.report(driver.operation_of("c1"))
    driver.answer(says("finished"))
    assert len(driver.commits) - before == 4
    assert driver.state.pending == 0
    assert driver.commits[-1].rest.session_state == session_pb2.SESSION_STATE_IDLE


def test_the_history_is_input_turn_response_status_result_turn_response() -> None:
    driver = SessionDriver()
    driver.say("do it")
    driver.answer(calls("c1"))
    driver.report(driver.operation_of("c1"), text="hello")
    driver.answer(says("finished"))
    assert driver.kinds() == [
        "input",
        "turn",
        "model_response",
        "tool_call_status",
        "tool_call_status",
        "turn",
        "model_response",
    ]
    assert [item.sequence for item in driver.items] == list(range(1, 8))
    assert driver.sent() == [
        ("user", "do it"),
        ("assistant", "c1"),
        ("tool_result", "c1: hello"),
        ("assistant", "finished"),
    ]


def test_operations_are_dispatched_once_and_acknowledged_after_their_commit() -> None:
    driver = SessionDriver()
    driver.say("do it")
    driver.answer(calls("c1"), calls("c2"))
    first, second = driver.operation_of("c1"), driver.operation_of("c2")
    assert driver.dispatched()[-2:] == [first, second]
    driver.report(second)
    driver.report(first)
    acknowledged = [one.operation_id for one in driver.effects if isinstance(one, Acknowledge)]
    assert acknowledged[-2:] == [second, first]
    assert driver.dispatched().count(first) == 1


def test_a_running_call_is_shown_as_placeholder_and_its_result_follows_late() -> None:
    driver = SessionDriver()
    driver.say("do it")
    driver.answer(calls("c1"), calls("c2"))
    driver.report(driver.operation_of("c1"), text="one")
    driver.wait(1.1)
    assert driver.sent()[-2:] == [
        ("tool_result", "c1: one"),
        ("tool_result", f"c2: {RUNNING_PLACEHOLDER}"),
    ]
    driver.answer(says("waiting for c2"))
    driver.report(driver.operation_of("c2"), text="two")
    role, text = driver.sent()[-1]
    assert role == "user"
    assert "two" in text
    assert 'call_id="c2"' in text


def test_redelivered_input_is_answered_with_its_first_place() -> None:
    driver = SessionDriver()
    driver.submit(text_input("same", "hello"))
    driver.finish_inspection()
    requests = driver.requests()
    driver.submit(text_input("same", "hello"))
    assert driver.answers == [Answer(ticket=1, sequence=1), Answer(ticket=2, sequence=1, is_duplicate=True)]
    assert driver.requests() == requests
