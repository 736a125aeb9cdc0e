"""A model error is a recorded failure and a FAILED session that the next input or a retry revives."""

from __future__ import annotations

import pytest

from harness.coordinator.protocol import ModelFailed
from tests.support.session_driver import INSTANCE, says
from tests.support.session_scenes import asked_session, nothing_happened, session_with_calls, standing
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

WAITED_FOR = {llm_pb2.ERROR_CLASS_RATE_LIMIT, llm_pb2.ERROR_CLASS_OVERLOAD}
FATAL = [
    value
    for value in llm_pb2.ErrorClass.values()
    if value not in {*WAITED_FOR, llm_pb2.ERROR_CLASS_UNSPECIFIED, llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW}
]


def test_it_is_recorded_with_every_attempt() -> None:
    driver = asked_session()
    turn_id = driver.volatile.request_turn_id
    failure = llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_QUOTA, message="no credit left", http_status=402)
    attempts = (llm_pb2.Attempt(number=1, http_status=402, failure=failure),)
    decision = driver.step(ModelFailed(turn_id=turn_id, failure=failure, attempts=attempts))
    (item,) = decision.items
    assert item.turn_failure == item_pb2.TurnFailure(turn_id=turn_id, failure=failure, attempts=attempts)
    assert decision.effects == ()
    assert standing(driver) == ("FAILED", "QUOTA: no credit left")


@pytest.mark.parametrize("error_class", FATAL)
def test_the_next_input_revives_the_session(error_class: llm_pb2.ErrorClass.ValueType) -> None:
    driver = asked_session()
    driver.fail(error_class)
    assert standing(driver)[0] == "FAILED"
    assert nothing_happened(driver.wait(1e6))
    driver.say("once more")
    assert driver.sent() == [("user", "do it"), ("user", "once more")]
    driver.answer(says("done"))
    assert (standing(driver), driver.state.pending) == (("IDLE", ""), 0)


def test_an_input_for_after_the_turn_revives_it_too() -> None:
    driver = asked_session()
    driver.fail(llm_pb2.ERROR_CLASS_QUOTA)
    driver.say("once more", after_turn=True)
    assert driver.sent() == [("user", "do it"), ("user", "once more")]


def test_results_are_recorded_while_it_has_failed_and_start_nothing() -> None:
    driver = session_with_calls("c1")
    driver.say("how is it?")
    driver.fail(llm_pb2.ERROR_CLASS_QUOTA)
    requests = driver.requests()
    driver.report(driver.operation_of("c1"), text="of c1")
    assert (standing(driver)[0], driver.requests()) == ("FAILED", requests)
    driver.say("again")
    assert "of c1" in driver.sent()[-2][1]


def test_it_survives_a_restart() -> None:
    driver = asked_session()
    driver.fail(llm_pb2.ERROR_CLASS_INVALID_REQUEST)
    driver.restart()
    assert nothing_happened(driver.connect(INSTANCE))
    assert standing(driver) == ("FAILED", "INVALID_REQUEST: it failed")
    driver.say("once more")
    assert driver.volatile.request_turn_id


def test_failures_and_responses_are_counted_and_interruptions_are_not() -> None:
    driver = asked_session()
    driver.say("rather this")
    assert driver.state.recorded_outcomes == 0
    driver.fail(llm_pb2.ERROR_CLASS_SCRIPT)
    assert driver.state.recorded_outcomes == 1
    driver.say("once more")
    driver.answer(says("done"))
    assert driver.state.recorded_outcomes == 2
