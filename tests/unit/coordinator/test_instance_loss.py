"""A name that answers with another instance: what may run again does, the rest ends as OUTCOME_UNKNOWN."""

from __future__ import annotations

from harness.coordinator.protocol import Dispatch, ManagerConnected, ManagerLost
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, MANAGER, calls, text_input
from tests.support.session_scenes import (
    AWAITING,
    COMPLETED,
    asked_session,
    cancel_input,
    results,
    session_with_calls,
    standing,
    status_of,
)
from unreal_agent.operation.v1 import operation_pb2

LOST = ManagerLost(manager_name=MANAGER)
PICTURE = calls("p1", "ViewImage", '{"path": "a.png"}')


def test_a_command_ends_as_unknown_and_the_model_is_told() -> None:
    driver = session_with_calls("c1")
    driver.step(LOST)
    decision = driver.connect("instance-2")
    assert status_of(driver, "c1") == ("OUTCOME_UNKNOWN", "INSTANCE_GONE")
    outcome, text = results(driver)["c1"]
    assert outcome == "UNKNOWN"
    assert "may or may not have" in text
    assert not any(isinstance(one, Dispatch) for one in decision.effects)
    assert driver.sent()[-1] == ("tool_result", f"c1: {text}")


def test_pure_work_is_assigned_to_the_new_instance_and_sent_again() -> None:
    driver = asked_session()
    driver.answer(PICTURE)
    operation_id = driver.operation_of("p1")
    before = driver.operations[operation_id]
    driver.step(LOST)
    decision = driver.connect("instance-2")
    expected = operation_pb2.Operation()
    expected.CopyFrom(before)
    expected.instance_id = "instance-2"
    expected.step = before.step + 2
    assert driver.operations[operation_id] == expected
    assert decision.effects == (Dispatch(manager_name=MANAGER, instance_id="instance-2", operations=(expected,)),)
    driver.report(operation_id)
    assert results(driver)["p1"][0] == "COMPLETED"


def test_what_the_gone_instance_said_last_does_not_stand_above_the_new_one() -> None:
    driver = asked_session()
    driver.answer(PICTURE)
    operation_id = driver.operation_of("p1")
    far = driver.reported(operation_id, AWAITING)
    far.operation.step += 40
    driver.step(far)
    driver.step(LOST)
    driver.connect("instance-2")
    driver.wait(1.0)
    assert driver.operations[operation_id].status == operation_pb2.OPERATION_STATUS_READY
    driver.report(operation_id)
    assert results(driver)["p1"][0] == "COMPLETED"


def test_the_same_instance_is_handed_everything_over_and_nothing_is_concluded() -> None:
    driver = session_with_calls("c1")
    driver.step(LOST)
    decision = driver.connect(INSTANCE)
    operation = driver.operations[driver.operation_of("c1")]
    assert decision.effects == (Dispatch(manager_name=MANAGER, instance_id=INSTANCE, operations=(operation,)),)
    assert not decision.has_commit


def test_an_operation_that_was_never_sent_may_go_anywhere() -> None:
    driver = asked_session()
    driver.step(LOST)
    driver.answer(calls("c1"))
    operation_id = driver.operation_of("c1")
    assert driver.operations[operation_id].instance_id == ""
    driver.connect("instance-2")
    assert driver.operations[operation_id].instance_id == "instance-2"
    assert driver.dispatched()[-1] == operation_id


def test_it_is_noticed_by_another_process_too() -> None:
    driver = session_with_calls("c1")
    driver.restart()
    assert status_of(driver, "c1") == ("READY", "")
    driver.connect("instance-2")
    assert status_of(driver, "c1") == ("OUTCOME_UNKNOWN", "INSTANCE_GONE")


def test_pure_work_that_was_to_be_cancelled_ends_instead_of_running_again() -> None:
    driver = asked_session()
    driver.answer(PICTURE)
    driver.step(LOST)
    driver.submit(cancel_input("x1", driver.operation_of("p1")))
    decision = driver.connect("instance-2")
    assert status_of(driver, "p1") == ("CANCELED", "CANCELED")
    assert not any(isinstance(one, Dispatch) for one in decision.effects)


def test_other_managers_operations_are_left_alone() -> None:
    driver = session_with_calls("c1")
    decision = driver.step(ManagerConnected(manager_name="other", instance_id="elsewhere"))
    assert (decision.effects, decision.has_commit) == ((), False)
    driver.report(driver.operation_of("c1"), COMPLETED)
    assert standing(driver) == ("RUNNING", "")


def test_the_inspection_of_the_workspace_runs_again() -> None:
    driver = CheckedDriver()
    driver.submit(text_input("i1", "do it"))
    driver.step(LOST)
    driver.connect("instance-2")
    driver.finish_inspection()
    assert driver.sent() == [("user", "do it")]
