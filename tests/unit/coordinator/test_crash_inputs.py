"""A takeover of a session that was not released is recorded; too many in a row without progress end it."""

from __future__ import annotations

from harness.coordinator.protocol import Loaded, ManagerConnected
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, MANAGER, says, text_input
from tests.support.session_scenes import (
    asked_session,
    idle_session,
    nothing_happened,
    retry_input,
    session_with_calls,
    standing,
)
from unreal_agent.session.v1 import item_pb2


def test_it_is_an_input_that_is_not_in_context() -> None:
    driver = asked_session()
    driver.restart(was_taken_over=True)
    assert driver.kinds() == ["input", "turn", "input", "turn"]
    crash = driver.items[2].input
    assert crash == item_pb2.Input(
        schema_version=1,
        input_id="crash-uid-s1-3",
        kind=item_pb2.INPUT_KIND_CRASH,
        crash=item_pb2.CrashReport(kind="EPOCH", message="the former owner did not release the session"),
    )
    assert driver.sent() == [("user", "do it")]


def test_it_wakes_nothing() -> None:
    driver = idle_session()
    driver.restart(was_taken_over=True)
    assert (driver.kinds()[-1], standing(driver), len(driver.requests())) == ("input", ("IDLE", ""), 1)


def test_a_released_session_gets_none() -> None:
    driver = idle_session()
    driver.restart()
    assert driver.kinds() == ["input", "turn", "model_response"]


def crash_five_times(driver: CheckedDriver) -> None:
    for _ in range(5):
        driver.restart(was_taken_over=True)


def test_five_in_a_row_with_nothing_answered_make_the_session_failed() -> None:
    driver = asked_session()
    crash_five_times(driver)
    assert standing(driver) == ("FAILED", "RECOVERY_LIMIT: crashed 5 times in a row")
    assert len(driver.requests()) == 5
    driver.restart()
    assert nothing_happened(driver.connect(INSTANCE))


def test_an_answer_between_counts_as_progress() -> None:
    driver = asked_session()
    for _ in range(4):
        driver.restart(was_taken_over=True)
    driver.answer(says("done"))
    driver.say("more")
    for _ in range(4):
        driver.restart(was_taken_over=True)
    assert standing(driver) == ("RUNNING", "")


def test_a_settled_call_between_counts_as_progress() -> None:
    driver = session_with_calls("c1", "c2")
    for _ in range(4):
        driver.restart(was_taken_over=True)
    driver.connect(INSTANCE)
    driver.report(driver.operation_of("c1"))
    for _ in range(4):
        driver.restart(was_taken_over=True)
    assert standing(driver)[0] != "FAILED"


def test_an_input_revives_the_session() -> None:
    driver = asked_session()
    crash_five_times(driver)
    driver.say("try again")
    assert driver.sent() == [("user", "do it"), ("user", "try again")]
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_a_retry_revives_the_session() -> None:
    driver = asked_session()
    crash_five_times(driver)
    driver.submit(retry_input("r1"))
    assert driver.sent() == [("user", "do it")]


def test_a_client_that_takes_its_id_does_not_stop_the_session() -> None:
    driver = idle_session()
    driver.submit(text_input("crash-uid-s1-6", "mine"))
    driver.restart(was_taken_over=True)
    assert driver.items[5].input.input_id == "crash-uid-s1-6-own"
    driver.step(Loaded(was_taken_over=False), ManagerConnected(manager_name=MANAGER, instance_id=INSTANCE))
