"""Results of one response are gathered for a grace period that ends when all are there."""

from __future__ import annotations

from harness.coordinator import CoordinatorConfig
from harness.tools.presentation import RUNNING_PLACEHOLDER
from tests.support.session_driver import calls, says, stop_input
from tests.support.session_scenes import (
    CANCELED,
    FAILED,
    HARD,
    WHEN_IDLE,
    asked_session,
    idle_session,
    nothing_happened,
    session_with_calls,
    settings_input,
    standing,
)

PLACEHOLDER = RUNNING_PLACEHOLDER


def test_all_results_of_a_response_go_into_one_turn() -> None:
    driver = session_with_calls("c1", "c2", "c3")
    requests = len(driver.requests())
    driver.report(driver.operation_of("c2"), FAILED, text="no")
    driver.report(driver.operation_of("c3"), CANCELED, text="no")
    assert len(driver.requests()) == requests
    driver.report(driver.operation_of("c1"), text="yes")
    assert len(driver.requests()) == requests + 1
    assert [role for role, _ in driver.sent()[-3:]] == ["tool_result"] * 3


def test_it_ends_as_soon_as_all_are_there() -> None:
    driver = session_with_calls("c1")
    driver.monotonic_s += 0.2
    driver.report(driver.operation_of("c1"))
    assert len(driver.requests()) == 2


def test_it_ends_at_its_deadline_with_what_is_there() -> None:
    driver = session_with_calls("c1", "c2")
    driver.report(driver.operation_of("c2"), text="two")
    assert driver.decision is not None
    assert driver.decision.wake_s == driver.monotonic_s + 1.0
    driver.wait(1.0)
    assert driver.sent()[-2:] == [("tool_result", f"c1: {PLACEHOLDER}"), ("tool_result", "c2: two")]


def test_a_result_does_not_move_the_deadline() -> None:
    driver = session_with_calls("c1", "c2")
    deadline_s = driver.volatile.grace_until_s
    driver.monotonic_s += 0.9
    driver.report(driver.operation_of("c1"))
    assert driver.volatile.grace_until_s == deadline_s
    assert len(driver.requests()) == 1
    driver.wait(0.2)
    assert len(driver.requests()) == 2


def test_its_end_with_nothing_there_starts_no_turn() -> None:
    driver = session_with_calls("c1")
    assert nothing_happened(driver.wait(1.1))
    driver.report(driver.operation_of("c1"), text="later")
    assert driver.sent()[-1] == ("tool_result", "c1: later")


def test_results_of_older_calls_neither_end_nor_prolong_it() -> None:
    driver = session_with_calls("old")
    driver.wait(1.1)
    driver.say("go on")
    driver.answer(calls("new1"), calls("new2"))
    requests = len(driver.requests())
    driver.monotonic_s += 0.5
    driver.report(driver.operation_of("old"), text="of old")
    assert len(driver.requests()) == requests
    driver.report(driver.operation_of("new1"), text="one")
    driver.wait(0.5)
    assert len(driver.requests()) == requests + 1
    sent = driver.sent()[-3:]
    assert sent[:2] == [("tool_result", "new1: one"), ("tool_result", f"new2: {PLACEHOLDER}")]
    assert "of old" in sent[2][1]


def test_an_older_result_that_is_pending_waits_for_the_grace_of_the_new_call() -> None:
    driver = session_with_calls("old")
    driver.say("go on")
    driver.report(driver.operation_of("old"), text="of old")
    driver.answer(calls("new"))
    requests = len(driver.requests())
    assert requests == 2
    driver.report(driver.operation_of("new"), text="of new")
    assert len(driver.requests()) == 3
    assert driver.sent()[-2] == ("tool_result", "new: of new")
    assert "of old" in driver.sent()[-1][1]


def test_an_interrupting_input_ends_it() -> None:
    driver = session_with_calls("c1")
    driver.say("and?")
    assert driver.sent()[-2:] == [("tool_result", f"c1: {PLACEHOLDER}"), ("user", "and?")]
    assert driver.volatile.grace_until_s is None


def test_an_input_for_after_the_turn_does_not_end_it() -> None:
    driver = session_with_calls("c1")
    driver.say("then this", after_turn=True)
    assert len(driver.requests()) == 1
    driver.report(driver.operation_of("c1"), text="one")
    assert driver.sent()[-2:] == [("tool_result", "c1: one"), ("user", "then this")]


def test_a_heartbeat_ends_it() -> None:
    driver = session_with_calls("c1", config=CoordinatorConfig(grace_s=50.0, heartbeat_interval_s=10.0))
    driver.wait(10.0)
    assert [role for role, _ in driver.sent()[-2:]] == ["tool_result", "user"]


def test_a_change_of_settings_does_not_end_it() -> None:
    driver = session_with_calls("c1")
    driver.submit(settings_input("s1", model="m2"))
    assert len(driver.requests()) == 1
    assert driver.volatile.grace_until_s == driver.monotonic_s + 1.0
    driver.report(driver.operation_of("c1"))
    assert driver.items[-1].turn.model == "m2"


def test_a_rejected_call_bypasses_it() -> None:
    driver = asked_session()
    driver.answer(calls("good"), calls("bad", name="Nope"))
    assert len(driver.requests()) == 2
    assert driver.sent()[-2] == ("tool_result", f"good: {PLACEHOLDER}")


def test_a_new_response_replaces_its_deadline() -> None:
    driver = session_with_calls("c1")
    driver.monotonic_s += 0.9
    driver.say("more")
    driver.answer(calls("c2"), calls("c3"))
    driver.report(driver.operation_of("c2"))
    requests = len(driver.requests())
    driver.wait(0.5)
    assert len(driver.requests()) == requests
    driver.wait(0.5)
    assert len(driver.requests()) == requests + 1


def test_a_hard_stop_inside_it_cancels_at_once() -> None:
    driver = session_with_calls("c1")
    driver.submit(stop_input("s1", HARD))
    assert standing(driver) == ("STOPPING", "")
    driver.report(driver.operation_of("c1"), CANCELED)
    assert standing(driver) == ("STOPPED", "")
    assert len(driver.requests()) == 1


def test_a_stop_when_idle_inside_it_lets_the_result_be_answered() -> None:
    driver = session_with_calls("c1")
    driver.submit(stop_input("s1", WHEN_IDLE))
    driver.report(driver.operation_of("c1"), text="one")
    assert driver.sent()[-1] == ("tool_result", "c1: one")
    driver.answer(says("done"))
    assert standing(driver) == ("STOPPED", "")


def test_without_grace_each_result_is_delivered_as_it_comes() -> None:
    driver = session_with_calls("c1", "c2", config=CoordinatorConfig(grace_s=0.0))
    driver.report(driver.operation_of("c2"), text="two")
    assert driver.sent()[-2:] == [("tool_result", f"c1: {PLACEHOLDER}"), ("tool_result", "c2: two")]


def test_it_is_not_remembered_by_another_process() -> None:
    driver = session_with_calls("c1", "c2")
    driver.report(driver.operation_of("c1"), text="one")
    assert len(driver.requests()) == 1
    driver.restart()
    assert len(driver.requests()) == 2
    assert driver.sent()[-2:] == [("tool_result", "c1: one"), ("tool_result", f"c2: {PLACEHOLDER}")]


def test_an_idle_session_has_none() -> None:
    driver = idle_session()
    assert driver.volatile.grace_until_s is None
