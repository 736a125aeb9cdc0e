"""Another process goes on from any commit: nothing is lost, done twice or shown twice."""

from __future__ import annotations

from harness.context_builder import next_request
from harness.coordinator.protocol import Dispatch, Loaded, ManagerConnected, Volatile
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, MANAGER, SessionDriver, calls, says, text_input
from tests.support.session_oracle import Change, loaded_state
from tests.support.session_scenes import (
    AWAITING,
    COMPLETED,
    asked_session,
    idle_session,
    nothing_happened,
    results,
    session_with_calls,
    standing,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2


def test_it_rebuilds_exactly_the_request_that_would_have_been_sent() -> None:
    driver = session_with_calls("c1", "c2")
    driver.report(driver.operation_of("c2"), text="two")
    driver.say("go on")
    driver.report(driver.operation_of("c1"), text="one")
    driver.say("later", after_turn=True)
    loaded = loaded_state(driver.record, driver.changes)
    assert loaded == driver.state
    digest = driver.state.prompt.digest if driver.state.prompt is not None else ""
    requests = [
        next_request(state.context, provider="scripted", model="m1", prompt_digest=digest)
        for state in (driver.state, loaded)
    ]
    assert requests[0] == requests[1]


def test_an_input_without_turn_gets_one() -> None:
    driver = CheckedDriver()
    driver.submit(text_input("i1", "do it"))
    driver.restart()
    driver.connect(INSTANCE)
    driver.finish_inspection()
    assert driver.sent() == [("user", "do it")]
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_a_turn_without_response_is_followed_by_a_new_one() -> None:
    driver = asked_session()
    first = driver.volatile.request_turn_id
    driver.restart()
    turn = driver.items[-1].turn
    assert (turn.previous_turn_id, driver.volatile.request_turn_id) == (first, turn.turn_id)
    assert driver.sent() == [("user", "do it")]
    driver.answer(says("done"))
    assert driver.state.pending == 0


def test_an_answered_session_does_nothing() -> None:
    driver = idle_session()
    before = len(driver.commits)
    driver.restart()
    assert nothing_happened(driver.connect(INSTANCE))
    assert len(driver.commits) == before


def test_operations_that_were_committed_and_never_dispatched_are_dispatched() -> None:
    driver = asked_session()
    driver.volatile = Volatile(request_turn_id=driver.volatile.request_turn_id)
    driver.answer(calls("c1"))
    assert driver.operation_of("c1") not in driver.dispatched()
    driver.connect(INSTANCE)
    assert driver.dispatched()[-1] == driver.operation_of("c1")


def test_what_is_unsettled_is_handed_over_once_more_in_one_go_and_nothing_else() -> None:
    driver = session_with_calls("c1", "c2", "c3")
    driver.report(driver.operation_of("c2"))
    driver.report(driver.operation_of("c1"), AWAITING)
    driver.wait(0.6)
    driver.restart()
    decision = driver.connect(INSTANCE)
    unsettled = (driver.operations[driver.operation_of("c1")], driver.operations[driver.operation_of("c3")])
    assert decision.effects == (Dispatch(manager_name=MANAGER, instance_id=INSTANCE, operations=unsettled),)
    assert not decision.has_commit


def test_a_manager_that_was_there_before_the_session_is_handed_over_to_at_loading() -> None:
    driver = session_with_calls("c1")
    fresh = SessionDriver(driver.record, load=False)
    fresh.state = loaded_state(driver.record, driver.changes)
    fresh.volatile = Volatile(instances=driver.volatile.instances)
    decision = fresh.step(Loaded(was_taken_over=False))
    operation = driver.operations[driver.operation_of("c1")]
    assert decision.effects[0] == Dispatch(manager_name=MANAGER, instance_id=INSTANCE, operations=(operation,))


def test_a_result_that_was_recorded_before_the_crash_is_delivered_and_its_operation_not_sent_again() -> None:
    driver = session_with_calls("c1", "c2")
    driver.report(driver.operation_of("c1"), text="one")
    driver.restart()
    assert driver.sent()[-2] == ("tool_result", "c1: one")
    decision = driver.connect(INSTANCE)
    (dispatch,) = decision.effects
    assert isinstance(dispatch, Dispatch)
    assert [one.operation_id for one in dispatch.operations] == [driver.operation_of("c2")]


def test_a_result_whose_acknowledgement_was_lost_is_reported_again_and_recorded_once() -> None:
    driver = session_with_calls("c1", "c2")
    report = driver.reported(driver.operation_of("c1"), COMPLETED, text="one")
    driver.step(report)
    driver.restart()
    driver.connect(INSTANCE)
    again = driver.step(report)
    assert not again.has_commit
    assert list(results(driver)) == ["c1"]


def test_a_call_ends_after_a_restart_as_it_would_have_before() -> None:
    driver = session_with_calls("c1")
    driver.restart()
    driver.connect(INSTANCE)
    driver.report(driver.operation_of("c1"), text="one")
    assert driver.sent()[-1] == ("tool_result", "c1: one")
    driver.answer(says("done"))
    assert (standing(driver), results(driver)) == (("IDLE", ""), {"c1": ("COMPLETED", "one")})


def test_steering_and_mixed_results_settle_once_whatever_process_sees_them() -> None:
    driver = session_with_calls("c1", "c2")
    driver.say("faster")
    driver.report(driver.operation_of("c2"), text="of c2")
    driver.restart()
    driver.connect(INSTANCE)
    driver.say("still faster")
    driver.report(driver.operation_of("c1"), text="of c1")
    driver.restart()
    driver.answer(says("done"))
    assert (driver.state.available, driver.state.delivered) == (5, 5)
    texts = [text for _, text in driver.sent()]
    assert [sum(f"of {call_id}" in text for text in texts) for call_id in ("c1", "c2")] == [1, 1]


def test_what_was_submitted_stays_submitted_when_the_turn_has_failed() -> None:
    driver = session_with_calls("c1")
    driver.say("go on")
    driver.fail(llm_pb2.ERROR_CLASS_QUOTA)
    sent = driver.sent()
    driver.restart()
    driver.connect(INSTANCE)
    assert (driver.sent(), standing(driver)[0]) == (sent, "FAILED")
    driver.report(driver.operation_of("c1"), text="of c1")
    assert standing(driver)[0] == "FAILED"
    driver.say("again")
    assert driver.sent()[: len(sent)] == sent
    assert "of c1" in driver.sent()[len(sent)][1]


def test_a_skill_can_be_used_after_a_restart() -> None:
    driver = CheckedDriver()
    driver.submit(text_input("i1", "do it"))
    found = operation_pb2.InspectWorkspaceState(workspace="/work", exists=True, shell="/bin/bash")
    found.skills.add(name="testing", description="how", path="SKILL.md")
    driver.report(f"{driver.state.session_uid}-i1", inspection=found)
    driver.restart()
    driver.answer(calls("c1", "SkillUse", '{"name": "testing"}'))
    assert driver.operations[driver.operation_of("c1")].type == "skill_use"


def test_a_session_whose_workspace_was_not_found_stays_failed_and_asks_nobody_again() -> None:
    driver = CheckedDriver()
    driver.submit(text_input("i1", "do it"))
    driver.report(f"{driver.state.session_uid}-i1", inspection=operation_pb2.InspectWorkspaceState())
    expected = ("FAILED", "WORKSPACE_NOT_FOUND: the workspace '/work' is not a directory")
    assert standing(driver) == expected
    driver.restart()
    assert nothing_happened(driver.step(ManagerConnected(manager_name=MANAGER, instance_id=INSTANCE)))
    assert standing(driver) == expected


def test_every_commit_of_a_session_is_a_place_to_go_on_from() -> None:
    whole = session_with_calls("c1", "c2")
    whole.say("go on")
    whole.report(whole.operation_of("c1"), text="of c1")
    whole.answer(says("well"))
    whole.report(whole.operation_of("c2"), text="of c2")
    whole.answer(says("done"))
    for count in range(1, len(whole.commits) + 1):
        changes: list[Change] = []
        for decision in whole.commits[:count]:
            changes += [*decision.items, *decision.operations]
        driver = SessionDriver(whole.record, load=False)
        driver.monotonic_s = whole.monotonic_s
        driver.state = loaded_state(whole.record, changes)
        driver.operations = {key: one for key, one in whole.operations.items() if key in driver.state.operations}
        driver.operations.update(driver.state.operations)
        driver.step(Loaded(was_taken_over=True), ManagerConnected(manager_name=MANAGER, instance_id=INSTANCE))
        _finish(driver)
        assert (standing(driver), driver.state.pending, dict(driver.state.calls)) == (("IDLE", ""), 0, {})


def _finish(driver: SessionDriver) -> None:
    driver.finish_inspection()
    for _ in range(10):
        if driver.volatile.request_turn_id:
            driver.answer(says("done"))
        for operation in list(driver.state.unsettled()):
            driver.report(operation.operation_id)
