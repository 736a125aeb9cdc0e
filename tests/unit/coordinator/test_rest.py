"""Each commit says how it leaves its session: whether there is work, what a watcher is shown, and since when."""

from __future__ import annotations

from harness.clock import timestamp
from harness.coordinator.rest import rest_of
from tests.support.histories import CheckedDriver
from tests.support.session_driver import MANAGER, calls, stop_input
from tests.support.session_scenes import AWAITING, CANCELED, HARD, asked_session, idle_session, session_with_calls
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import session_pb2


def latest(driver: CheckedDriver) -> session_pb2.Rest:
    return driver.commits[-1].rest


def rest(
    driver: CheckedDriver,
    state: session_pb2.RestState.ValueType,
    session_state: session_pb2.SessionState.ValueType,
    *,
    reason: str = "",
    managers: tuple[str, ...] = (),
) -> session_pb2.Rest:
    return session_pb2.Rest(
        state=state,
        session_state=session_state,
        reason=reason,
        manager_names=managers,
        since_time=timestamp(driver.now.wall_time),
    )


def test_a_session_whose_model_is_asked_runs() -> None:
    driver = asked_session()
    assert latest(driver) == rest(driver, session_pb2.REST_STATE_WORKING, session_pb2.SESSION_STATE_RUNNING)


def test_an_answered_session_is_idle() -> None:
    driver = idle_session()
    assert latest(driver) == rest(driver, session_pb2.REST_STATE_AT_REST, session_pb2.SESSION_STATE_IDLE)


def test_a_session_with_running_calls_waits_for_their_manager() -> None:
    driver = session_with_calls("c1")
    assert latest(driver) == rest(
        driver,
        session_pb2.REST_STATE_WORKING,
        session_pb2.SESSION_STATE_WAITING_FOR_OPERATIONS,
        managers=(MANAGER,),
    )


def test_a_stop_that_waits_is_work_and_a_complete_one_is_rest() -> None:
    driver = session_with_calls("c1")
    driver.submit(stop_input("s1", HARD, "enough"))
    assert latest(driver) == rest(
        driver, session_pb2.REST_STATE_WORKING, session_pb2.SESSION_STATE_STOPPING, reason="enough"
    )
    driver.report(driver.operation_of("c1"), CANCELED, text="gone")
    assert latest(driver) == rest(
        driver, session_pb2.REST_STATE_AT_REST, session_pb2.SESSION_STATE_STOPPED, reason="enough"
    )


def test_a_failed_session_is_at_rest_and_says_why() -> None:
    driver = asked_session()
    driver.fail(llm_pb2.ERROR_CLASS_AUTHENTICATION)
    assert latest(driver) == rest(
        driver,
        session_pb2.REST_STATE_AT_REST,
        session_pb2.SESSION_STATE_FAILED,
        reason="AUTHENTICATION: it failed",
    )


def test_it_holds_since_the_state_changed_and_not_since_the_last_commit() -> None:
    driver = session_with_calls("c1", "c2")
    since = timestamp(driver.now.wall_time)
    driver.monotonic_s += 0.5
    driver.report(driver.operation_of("c1"))
    assert latest(driver).since_time == since
    driver.monotonic_s += 0.1
    driver.report(driver.operation_of("c2"))
    assert latest(driver).since_time == timestamp(driver.now.wall_time)


def test_another_process_keeps_the_time_since_when_it_holds() -> None:
    driver = session_with_calls("c1")
    since = timestamp(driver.now.wall_time)
    driver.wait(1.1)
    driver.restart()
    driver.monotonic_s += 5.0
    driver.connect("instance-1")
    driver.report(driver.operation_of("c1"), AWAITING)
    assert driver.wait(0.5).has_commit
    assert latest(driver).since_time == since


def test_it_follows_from_the_state_alone() -> None:
    driver = session_with_calls("c1")
    decision = driver.decision
    assert decision is not None
    assert rest_of(driver.state, driver.volatile, driver.now) == decision.rest


def test_a_session_that_was_never_spoken_to_is_idle() -> None:
    driver = CheckedDriver()
    assert driver.decision is not None
    assert driver.decision.rest == rest(driver, session_pb2.REST_STATE_AT_REST, session_pb2.SESSION_STATE_IDLE)


def test_a_failed_session_stays_failed_while_its_calls_end() -> None:
    driver = asked_session()
    driver.answer(calls("c1"))
    driver.say("more")
    driver.fail(llm_pb2.ERROR_CLASS_QUOTA)
    driver.report(driver.operation_of("c1"))
    assert latest(driver).session_state == session_pb2.SESSION_STATE_FAILED
