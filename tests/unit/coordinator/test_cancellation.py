"""One operation is cancelled: recorded, told to the manager, and repeated until it settles."""

from __future__ import annotations

from harness.coordinator.protocol import Dispatch, ManagerLost, SendCancel
from tests.support.session_driver import INSTANCE, MANAGER, calls
from tests.support.session_scenes import (
    CANCELED,
    CANCELING,
    COMPLETED,
    cancel_input,
    idle_session,
    refusals,
    results,
    session_with_calls,
    status_of,
)
from unreal_agent.session.v1 import item_pb2, session_pb2


def test_it_is_recorded_before_the_manager_is_told() -> None:
    driver = session_with_calls("c1", "c2")
    operation_id = driver.operation_of("c1")
    decision = driver.submit(cancel_input("x1", operation_id, reason="not needed"))
    (item,) = decision.items
    assert item.input.control.cancel_operation == item_pb2.CancelOperation(
        operation_id=operation_id, reason="not needed"
    )
    assert decision.effects == (SendCancel(manager_name=MANAGER, operation_id=operation_id, reason="not needed"),)


def test_the_call_ends_when_the_manager_says_so() -> None:
    driver = session_with_calls("c1")
    operation_id = driver.operation_of("c1")
    driver.submit(cancel_input("x1", operation_id))
    driver.report(operation_id, CANCELING)
    assert results(driver) == {}
    driver.report(operation_id, CANCELED, text="ended by a person")
    assert results(driver)["c1"][0] == "CANCELED"
    assert driver.state.cancellations == {}
    assert driver.volatile.request_turn_id, "the model is told"


def test_an_operation_that_was_quicker_stays_completed() -> None:
    driver = session_with_calls("c1")
    driver.submit(cancel_input("x1", driver.operation_of("c1")))
    driver.report(driver.operation_of("c1"), COMPLETED, text="done")
    assert results(driver) == {"c1": ("COMPLETED", "done")}


def test_the_manager_is_told_once_over_one_connection() -> None:
    driver = session_with_calls("c1")
    operation_id = driver.operation_of("c1")
    driver.submit(cancel_input("x1", operation_id))
    driver.submit(cancel_input("x2", operation_id))
    driver.wait(1.1)
    assert sum(isinstance(one, SendCancel) for one in driver.effects) == 1


def test_it_is_repeated_after_a_reconnect_behind_the_operation() -> None:
    driver = session_with_calls("c1")
    operation_id = driver.operation_of("c1")
    driver.submit(cancel_input("x1", operation_id, reason="no"))
    driver.step(ManagerLost(manager_name=MANAGER))
    decision = driver.connect(INSTANCE)
    operation = driver.operations[operation_id]
    assert decision.effects == (
        Dispatch(manager_name=MANAGER, instance_id=INSTANCE, operations=(operation,)),
        SendCancel(manager_name=MANAGER, operation_id=operation_id, reason="no"),
    )


def test_it_is_repeated_by_another_process_until_it_settles() -> None:
    driver = session_with_calls("c1")
    operation_id = driver.operation_of("c1")
    driver.submit(cancel_input("x1", operation_id, reason="no"))
    for _ in range(2):
        driver.restart()
        assert (
            SendCancel(manager_name=MANAGER, operation_id=operation_id, reason="no") in driver.connect(INSTANCE).effects
        )
    driver.report(operation_id, CANCELED, text="gone")
    driver.restart()
    assert not any(isinstance(one, SendCancel) for one in driver.connect(INSTANCE).effects)


def test_one_that_came_while_the_manager_was_away_is_told_when_it_is_back() -> None:
    driver = session_with_calls("c1")
    driver.step(ManagerLost(manager_name=MANAGER))
    decision = driver.submit(cancel_input("x1", driver.operation_of("c1")))
    assert decision.effects == ()
    assert isinstance(driver.connect(INSTANCE).effects[-1], SendCancel)


def test_an_operation_that_was_never_sent_ends_at_once() -> None:
    driver = idle_session(limits=session_pb2.SessionLimits(max_running_operations=1))
    driver.say("two")
    driver.answer(calls("c1"), calls("c2"))
    decision = driver.submit(cancel_input("x1", driver.operation_of("c2"), reason="no"))
    assert decision.effects == ()
    assert (status_of(driver, "c2"), results(driver)["c2"][0]) == (("CANCELED", "CANCELED"), "CANCELED")


def test_an_unknown_or_ended_operation_is_refused_and_nothing_recorded() -> None:
    driver = session_with_calls("c1", "c2")
    driver.report(driver.operation_of("c1"))
    before = len(driver.items)
    driver.submit(cancel_input("x1", driver.operation_of("c1")))
    driver.submit(cancel_input("x2", "never-was"))
    assert (refusals(driver), len(driver.items)) == (["OPERATION_TERMINAL", "OPERATION_TERMINAL"], before)


def test_other_calls_run_on() -> None:
    driver = session_with_calls("c1", "c2")
    driver.submit(cancel_input("x1", driver.operation_of("c1")))
    driver.report(driver.operation_of("c1"), CANCELED, text="gone")
    driver.report(driver.operation_of("c2"), text="fine")
    assert results(driver)["c2"] == ("COMPLETED", "fine")
