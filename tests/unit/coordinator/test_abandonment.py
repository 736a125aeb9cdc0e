"""What can't be reached for too long, or is given up by a person, ends as OUTCOME_UNKNOWN for good."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from harness.coordinator.protocol import Acknowledge, ManagerLost, ResolveReport, SendCancel
from tests.support.session_driver import INSTANCE, MANAGER, control_input, stop_input
from tests.support.session_scenes import (
    AWAITING,
    COMPLETED,
    HARD,
    abandon_input,
    cancel_input,
    nothing_happened,
    refusals,
    results,
    session_with_calls,
    standing,
    status_of,
)
from unreal_agent.session.v1 import item_pb2

LOST = ManagerLost(manager_name=MANAGER)


def test_a_person_gives_an_operation_up_and_the_manager_is_told_to_end_it() -> None:
    driver = session_with_calls("c1", "c2")
    operation_id = driver.operation_of("c1")
    step = driver.operations[operation_id].step
    decision = driver.submit(abandon_input("x1", operation_id, reason="hopeless"))
    assert decision.effects[0] == Acknowledge(
        manager_name=MANAGER, operation_id=operation_id, step=step, is_discarded=True
    )
    assert status_of(driver, "c1") == ("OUTCOME_UNKNOWN", "ABANDONED")
    outcome, text = results(driver)["c1"]
    assert outcome == "UNKNOWN"
    assert "hopeless" in text


def test_a_report_that_comes_later_is_discarded() -> None:
    driver = session_with_calls("c1", "c2")
    operation_id = driver.operation_of("c1")
    report = driver.reported(operation_id, COMPLETED)
    driver.submit(abandon_input("x1", operation_id))
    assert driver.step(report).effects == (ResolveReport(operation=report.operation),)
    assert results(driver)["c1"][0] == "UNKNOWN"


def test_a_report_in_the_same_moment_loses_against_the_one_that_came_first() -> None:
    driver = session_with_calls("c1", "c2")
    operation_id = driver.operation_of("c1")
    driver.report(operation_id, COMPLETED, text="quick")
    driver.submit(abandon_input("x1", operation_id))
    assert (refusals(driver), results(driver)["c1"]) == (["OPERATION_TERMINAL"], ("COMPLETED", "quick"))


def test_a_hard_stop_gives_up_what_cannot_be_reached_after_its_time() -> None:
    driver = session_with_calls("c1")
    driver.step(LOST)
    stop = item_pb2.Stop(mode=HARD, reason="enough", abandon_after=Duration(seconds=7))
    decision = driver.submit(control_input("s1", item_pb2.Control(stop=stop)))
    assert (standing(driver), decision.wake_s) == (("STOPPING", "enough"), driver.monotonic_s + 7)
    assert nothing_happened(driver.wait(6.9))
    driver.wait(0.1)
    assert (standing(driver), status_of(driver, "c1")) == (("STOPPED", "enough"), ("OUTCOME_UNKNOWN", "ABANDONED"))


def test_a_hard_stop_waits_thirty_seconds_unless_told_otherwise() -> None:
    driver = session_with_calls("c1")
    driver.step(LOST)
    decision = driver.submit(stop_input("s1", HARD))
    assert decision.wake_s == driver.monotonic_s + 30
    driver.wait(30)
    assert standing(driver) == ("STOPPED", "")


def test_the_time_counts_from_the_loss_and_starts_again_after_a_return() -> None:
    driver = session_with_calls("c1")
    driver.submit(cancel_input("x1", driver.operation_of("c1"), abandon_after_s=10))
    driver.step(LOST)
    driver.wait(9)
    driver.connect(INSTANCE)
    driver.wait(100)
    driver.step(LOST)
    driver.wait(9.9)
    assert status_of(driver, "c1") == ("READY", "")
    driver.wait(0.1)
    assert status_of(driver, "c1") == ("OUTCOME_UNKNOWN", "ABANDONED")


def test_a_cancellation_waits_for_ever_unless_told_otherwise() -> None:
    driver = session_with_calls("c1")
    driver.submit(cancel_input("x1", driver.operation_of("c1")))
    driver.step(LOST)
    assert nothing_happened(driver.wait(500))
    assert isinstance(driver.connect(INSTANCE).effects[-1], SendCancel)


def test_silence_alone_never_proves_a_loss() -> None:
    driver = session_with_calls("c1")
    driver.step(LOST)
    driver.wait(599)
    assert (standing(driver)[0], status_of(driver, "c1")) == ("WAITING_FOR_OPERATIONS", ("READY", ""))
    driver.connect(INSTANCE)
    driver.report(driver.operation_of("c1"), text="still here")
    assert results(driver) == {"c1": ("COMPLETED", "still here")}


def test_a_manager_that_returns_is_told_to_discard_what_was_given_up() -> None:
    driver = session_with_calls("c1", "c2")
    operation_id = driver.operation_of("c1")
    report = driver.reported(operation_id, AWAITING)
    driver.step(LOST)
    decision = driver.submit(abandon_input("x1", operation_id))
    assert not any(isinstance(one, Acknowledge) for one in decision.effects), "nobody is there to be told"
    driver.connect(INSTANCE)
    assert driver.step(report).effects == (ResolveReport(operation=report.operation),)


def test_a_manager_that_this_process_does_not_know_is_missed_from_the_loading_on() -> None:
    driver = session_with_calls("c1")
    driver.submit(stop_input("s1", HARD))
    driver.restart()
    assert standing(driver)[0] == "STOPPING"
    driver.wait(30)
    assert (standing(driver), status_of(driver, "c1")) == (("STOPPED", ""), ("OUTCOME_UNKNOWN", "ABANDONED"))


def test_an_input_after_the_stop_goes_on_once_what_cannot_be_reached_is_given_up() -> None:
    driver = session_with_calls("c1")
    driver.step(LOST)
    driver.submit(stop_input("s1", HARD))
    driver.say("go on")
    assert len(driver.requests()) == 1
    driver.wait(30)
    assert driver.sent()[-1] == ("user", "go on")
