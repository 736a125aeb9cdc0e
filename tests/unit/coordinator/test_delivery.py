"""Counters decide delivery: what an answered turn has not shown is pending, and nothing is shown twice."""

from __future__ import annotations

from harness.coordinator.apply import apply_all
from harness.coordinator.protocol import InputArrived
from tests.support.session_driver import calls, says, text_input
from tests.support.session_oracle import assert_shown_exactly_once
from tests.support.session_scenes import (
    COMPLETED,
    asked_session,
    idle_session,
    retry_input,
    session_with_calls,
    standing,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2


def test_inputs_that_came_together_go_into_one_request() -> None:
    driver = idle_session()
    requests = len(driver.requests())
    driver.step(*(InputArrived(ticket=n, message=text_input(f"x{n}", f"text {n}")) for n in range(3)))
    assert len(driver.requests()) == requests + 1
    assert driver.sent()[-3:] == [("user", "text 0"), ("user", "text 1"), ("user", "text 2")]


def test_inputs_that_came_before_the_first_turn_go_into_it() -> None:
    driver = asked_session()
    assert driver.kinds() == ["input", "turn"]
    assert driver.sent() == [("user", "do it")]


def test_a_turn_is_credited_when_its_response_is_recorded() -> None:
    driver = asked_session()
    assert (driver.state.available, driver.state.snapshot, driver.state.delivered) == (1, 1, 0)
    driver.answer(says("done"))
    assert (driver.state.available, driver.state.snapshot, driver.state.delivered) == (1, 1, 1)


def test_an_interrupted_turn_loses_nothing() -> None:
    driver = asked_session()
    driver.say("and this")
    driver.say("and that")
    assert driver.sent() == [("user", "do it"), ("user", "and this"), ("user", "and that")]
    driver.answer(says("all three"))
    assert (driver.state.available, driver.state.delivered) == (3, 3)
    assert standing(driver) == ("IDLE", "")


def test_a_failed_turn_delivers_nothing() -> None:
    driver = asked_session()
    driver.fail(llm_pb2.ERROR_CLASS_QUOTA)
    assert driver.state.pending == 1
    driver.submit(retry_input("r1"))
    assert driver.sent() == [("user", "do it")]
    driver.answer(says("done"))
    assert driver.state.pending == 0


def test_results_that_finish_during_a_request_wait_for_its_end() -> None:
    driver = session_with_calls("c1", "c2")
    driver.say("how far are you?")
    requests = driver.requests()
    driver.report(driver.operation_of("c1"), text="one")
    driver.report(driver.operation_of("c2"), text="two")
    assert driver.requests() == requests
    driver.answer(says("they run"))
    assert len(driver.requests()) == len(requests) + 1
    late = driver.sent()[-2:]
    assert [role for role, _ in late] == ["user", "user"]
    assert ["one" in late[0][1], "two" in late[1][1]] == [True, True]


def test_results_wait_for_a_steered_request_too_and_are_delivered_once() -> None:
    driver = session_with_calls("c1")
    driver.say("faster")
    driver.report(driver.operation_of("c1"), text="one")
    driver.say("much faster")
    driver.answer(says("ready"))
    assert standing(driver) == ("IDLE", "")
    assert sum("one" in text for _, text in driver.sent()) == 1


def test_independent_results_that_arrive_together_share_a_turn() -> None:
    driver = asked_session()
    driver.answer(calls("c1"))
    driver.wait(1.1)
    driver.say("another")
    driver.answer(calls("c2"))
    driver.wait(1.1)
    requests = len(driver.requests())
    first = driver.reported(driver.operation_of("c1"), COMPLETED, text="one")
    second = driver.reported(driver.operation_of("c2"), COMPLETED, text="two")
    driver.step(first, second)
    assert len(driver.requests()) == requests + 1


def test_a_response_without_calls_and_nothing_pending_is_the_end() -> None:
    driver = asked_session()
    decision = driver.answer(says("done"))
    assert (decision.effects, decision.wake_s) == ((), None)
    assert standing(driver) == ("IDLE", "")


def test_an_empty_response_is_an_answer() -> None:
    driver = asked_session()
    driver.answer()
    assert standing(driver) == ("IDLE", "")
    driver.say("well?")
    assert driver.sent() == [("user", "do it"), ("user", "well?")]


def test_a_long_session_shows_every_input_and_result_exactly_once() -> None:
    driver = idle_session()
    for number in range(60):
        driver.say(f"step {number}")
        driver.answer(calls(f"c{number}"))
        driver.report(driver.operation_of(f"c{number}"), text=f"result {number}")
        driver.answer(says("next"))
    driver.say("finally")
    driver.answer(says("all done"))
    assert_shown_exactly_once(driver.turns.answered, driver.items)
    assert (driver.state.available, driver.state.delivered) == (122, 122)


def test_a_compaction_response_delivers_nothing_and_schedules_no_call() -> None:
    driver = asked_session()
    before = driver.state
    turn = item_pb2.Turn(turn_id="summing-up", kind=item_pb2.TURN_KIND_COMPACTION)
    output = llm_pb2.ModelOutput(items=[says("a summary"), calls("c1")])
    response = item_pb2.ModelResponse(turn_id="summing-up", output=output)
    after = apply_all(
        before, [item_pb2.Item(sequence=3, turn=turn), item_pb2.Item(sequence=4, model_response=response)]
    )
    assert (after.delivered, after.snapshot, after.calls, after.context) == (
        before.delivered,
        before.snapshot,
        before.calls,
        before.context,
    )
