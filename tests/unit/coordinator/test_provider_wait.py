"""Rate limits and overload wait for the provider's time and go on by themselves."""

from __future__ import annotations

from datetime import timedelta

import pytest

from harness.clock import instant, timestamp
from harness.coordinator.protocol import ModelFailed
from tests.support.session_driver import INSTANCE, SessionDriver, calls, says
from tests.support.session_scenes import asked_session, nothing_happened, retry_input, session_with_calls, standing
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import session_pb2


def failed(driver: SessionDriver, *, retry_in_s: float | None = None) -> ModelFailed:
    failure = llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_RATE_LIMIT, message="slow down")
    if retry_in_s is not None:
        failure.retry_time.CopyFrom(timestamp(driver.now.wall_time + timedelta(seconds=retry_in_s)))
    return ModelFailed(turn_id=driver.volatile.request_turn_id, failure=failure)


def waits_s(driver: SessionDriver) -> float:
    resume_time = driver.items[-1].turn_failure.resume_time
    return (instant(resume_time) - driver.now.wall_time).total_seconds()


def test_it_waits_until_the_time_that_the_provider_named() -> None:
    driver = asked_session()
    decision = driver.step(failed(driver, retry_in_s=90))
    assert (waits_s(driver), decision.effects, decision.wake_s) == (90, (), driver.monotonic_s + 90)
    rest = driver.commits[-1].rest
    assert rest == session_pb2.Rest(
        state=session_pb2.REST_STATE_WAITING_UNTIL,
        wake_time=driver.items[-1].turn_failure.resume_time,
        session_state=session_pb2.SESSION_STATE_WAITING_FOR_PROVIDER,
        reason="RATE_LIMIT: slow down",
        since_time=timestamp(driver.now.wall_time),
    )
    assert nothing_happened(driver.wait(89))
    driver.wait(1)
    assert driver.sent() == [("user", "do it")]
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


@pytest.mark.parametrize("error_class", [llm_pb2.ERROR_CLASS_RATE_LIMIT, llm_pb2.ERROR_CLASS_OVERLOAD])
def test_without_a_time_it_waits_longer_each_time_up_to_a_bound(error_class: llm_pb2.ErrorClass.ValueType) -> None:
    driver = asked_session()
    waited: list[float] = []
    for _ in range(9):
        driver.fail(error_class)
        waited.append(waits_s(driver))
        driver.wait(waited[-1])
    assert waited == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    driver.answer(says("done"))
    driver.say("again")
    driver.fail(error_class)
    assert waits_s(driver) == 5


def test_a_time_that_is_over_is_no_reason_to_ask_without_pause() -> None:
    driver = asked_session()
    driver.step(failed(driver, retry_in_s=-60))
    assert waits_s(driver) == 5


def test_an_input_is_recorded_and_waits_too() -> None:
    driver = asked_session()
    driver.step(failed(driver, retry_in_s=30))
    decision = driver.say("and this")
    assert (decision.effects, standing(driver)[0]) == ((), "WAITING_FOR_PROVIDER")
    driver.wait(30)
    assert driver.sent() == [("user", "do it"), ("user", "and this")]


def test_a_retry_does_not_wait() -> None:
    driver = asked_session()
    driver.step(failed(driver, retry_in_s=3000))
    driver.submit(retry_input("r1"))
    assert driver.sent() == [("user", "do it")]
    assert standing(driver) == ("RUNNING", "")


def test_results_that_come_meanwhile_are_recorded_and_go_with_the_next_turn() -> None:
    driver = session_with_calls("c1")
    driver.say("how is it?")
    driver.step(failed(driver, retry_in_s=30))
    driver.report(driver.operation_of("c1"), text="of c1")
    assert standing(driver)[0] == "WAITING_FOR_PROVIDER"
    driver.wait(30)
    assert "of c1" in driver.sent()[-1][1]


def test_another_process_waits_for_the_same_time() -> None:
    driver = asked_session()
    driver.step(failed(driver, retry_in_s=30))
    driver.restart()
    decision = driver.connect(INSTANCE)
    assert nothing_happened(decision)
    assert decision.wake_s == driver.monotonic_s + 30
    driver.wait(30)
    assert driver.volatile.request_turn_id


def test_a_turn_that_had_nothing_pending_is_tried_again_too() -> None:
    driver = asked_session()
    driver.answer(calls("c1"))
    driver.report(driver.operation_of("c1"), text="too much")
    driver.fail(llm_pb2.ERROR_CLASS_INVALID_REQUEST)
    driver.submit(retry_input("r1", omit_new=True))
    assert (driver.state.pending, driver.state.is_turn_open) == (0, True)
    driver.step(failed(driver, retry_in_s=30))
    driver.wait(30)
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")
