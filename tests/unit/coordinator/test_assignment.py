"""Operations are recorded with their status, assigned in a commit, and dispatched in the model's order."""

from __future__ import annotations

from harness.clock import timestamp
from harness.coordinator import CoordinatorConfig
from harness.coordinator.protocol import Acknowledge, Dispatch, ManagerConnected, ManagerLost, OperationRefused
from tests.support.session_driver import INSTANCE, MANAGER, calls, says
from tests.support.session_scenes import (
    AWAITING,
    asked_session,
    idle_session,
    results,
    session_with_calls,
    standing,
    status_of,
)
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2


def test_a_response_its_statuses_and_its_operations_are_one_commit_and_sent_after_it() -> None:
    driver = asked_session()
    decision = driver.answer(says("so"), calls("c1", arguments='{"command": "ls"}'))
    response, status = decision.items
    (operation,) = decision.operations
    assert status.tool_call_status == item_pb2.ToolCallStatus(
        turn_id=response.model_response.turn_id, call_id="c1", operation_ids=[operation.operation_id]
    )
    assert operation == operation_pb2.Operation(
        schema_version=1,
        operation_id="uid-s1-4-0",
        session_id="s1",
        type="bash",
        type_version=operation.type_version,
        status=operation_pb2.OPERATION_STATUS_READY,
        step=2,
        effect_class=operation_pb2.EFFECT_CLASS_AT_MOST_ONCE,
        manager_name=MANAGER,
        instance_id=INSTANCE,
        limits=operation.limits,
        create_time=timestamp(driver.now.wall_time),
        call_id="c1",
        bash=operation_pb2.BashState(command="ls"),
    )
    assert decision.effects == (Dispatch(manager_name=MANAGER, instance_id=INSTANCE, operations=(operation,)),)


def test_they_are_dispatched_in_the_models_order_whatever_their_ids() -> None:
    driver = idle_session()
    driver.say("go")
    driver.say("go now")
    driver.answer(*(calls(f"c{number}") for number in range(4)))
    assert [driver.operation_of(f"c{number}") for number in range(4)] == [
        "uid-s1-9-0",
        "uid-s1-10-0",
        "uid-s1-11-0",
        "uid-s1-12-0",
    ]
    assert driver.dispatched()[-4:] == [driver.operation_of(f"c{number}") for number in range(4)]


def test_only_as_many_run_at_once_as_the_session_may() -> None:
    driver = idle_session(limits=session_pb2.SessionLimits(max_running_operations=2))
    driver.say("go")
    driver.answer(*(calls(f"c{number}") for number in range(4)))
    ids = [driver.operation_of(f"c{number}") for number in range(4)]
    assert driver.dispatched()[-2:] == ids[:2]
    driver.report(ids[1])
    assert driver.dispatched()[-1] == ids[2]
    driver.report(ids[0])
    assert driver.dispatched()[-1] == ids[3]
    assert len(driver.dispatched()) == 1 + 4


def test_the_coordinators_bound_counts_where_the_session_has_none() -> None:
    driver = asked_session(config=CoordinatorConfig(max_running_operations=1))
    driver.answer(calls("c1"), calls("c2"))
    assert driver.dispatched()[-1] == driver.operation_of("c1")


def test_older_calls_come_before_newer_ones() -> None:
    driver = idle_session(limits=session_pb2.SessionLimits(max_running_operations=1))
    driver.say("go")
    driver.answer(calls("c1"), calls("c2"))
    driver.say("more")
    driver.answer(calls("c3"))
    driver.report(driver.operation_of("c1"))
    driver.report(driver.operation_of("c2"))
    assert driver.dispatched()[1:] == [driver.operation_of(call_id) for call_id in ("c1", "c2", "c3")]


def test_nothing_is_sent_while_the_manager_is_away() -> None:
    driver = asked_session()
    driver.step(ManagerLost(manager_name=MANAGER))
    decision = driver.answer(calls("c1"))
    assert (decision.effects, standing(driver)) == ((), ("WAITING_FOR_OPERATIONS", ""))
    assert driver.commits[-1].rest.manager_names == [MANAGER]
    driver.step(ManagerConnected(manager_name=MANAGER, instance_id=INSTANCE))
    assert driver.dispatched()[-1] == driver.operation_of("c1")


def test_a_refusal_is_the_operations_failure_and_not_the_sessions() -> None:
    driver = session_with_calls("c1", "c2")
    error = operation_pb2.OperationError(reason="UNSUPPORTED_OPERATION_VERSION", message="bash 9 is unknown")
    driver.step(OperationRefused(operation_id=driver.operation_of("c1"), error=error))
    assert status_of(driver, "c1") == ("FAILED", "UNSUPPORTED_OPERATION_VERSION")
    assert results(driver) == {"c1": ("FAILED", "[failed: bash 9 is unknown]")}
    driver.report(driver.operation_of("c2"))
    driver.answer(says("a pity"))
    assert standing(driver) == ("IDLE", "")


def test_a_refusal_of_what_has_ended_changes_nothing() -> None:
    driver = session_with_calls("c1", "c2")
    driver.report(driver.operation_of("c1"))
    decision = driver.step(
        OperationRefused(operation_id=driver.operation_of("c1"), error=operation_pb2.OperationError())
    )
    assert not decision.has_commit


def test_what_is_sent_equals_what_is_recorded() -> None:
    driver = asked_session()
    decision = driver.answer(calls("c1"), calls("c2"))
    (dispatch,) = decision.effects
    assert isinstance(dispatch, Dispatch)
    assert dispatch.operations == decision.operations


def test_a_running_operation_is_sent_once_over_one_connection() -> None:
    driver = session_with_calls("c1")
    driver.report(driver.operation_of("c1"), AWAITING)
    driver.wait(5.0)
    driver.say("more")
    driver.answer(says("yes"))
    assert driver.dispatched().count(driver.operation_of("c1")) == 1
    assert not any(isinstance(one, Acknowledge) for one in driver.effects[2:])
