"""HARD and WHEN_IDLE stops: what they end, what they wait for, and how a session goes on after them."""

from __future__ import annotations

from harness.coordinator.protocol import CancelRequest, InputArrived, ModelAnswered, SendCancel
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, MANAGER, calls, output, says, stop_input, text_input
from tests.support.session_scenes import (
    CANCELED,
    COMPLETED,
    FAILED,
    HARD,
    WHEN_IDLE,
    asked_session,
    idle_session,
    nothing_happened,
    results,
    session_with_calls,
    settings_input,
    standing,
    status_of,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import session_pb2


def test_a_session_is_there_until_a_stop_is_asked_for() -> None:
    driver = idle_session()
    assert nothing_happened(driver.wait(10_000))
    assert standing(driver) == ("IDLE", "")


def test_a_hard_stop_cancels_the_request() -> None:
    driver = asked_session()
    request = driver.volatile.request_turn_id
    decision = driver.submit(stop_input("s1", HARD, "enough"))
    assert decision.effects == (CancelRequest(turn_id=request),)
    assert standing(driver) == ("STOPPED", "enough")


def test_a_response_that_comes_after_a_hard_stop_is_dropped() -> None:
    driver = asked_session()
    request = driver.volatile.request_turn_id
    driver.submit(stop_input("s1", HARD))
    assert nothing_happened(driver.step(ModelAnswered(turn_id=request, output=output(calls("c1")))))


def test_a_response_that_races_with_a_hard_stop_is_dropped() -> None:
    driver = asked_session()
    answered = ModelAnswered(turn_id=driver.volatile.request_turn_id, output=output(calls("c1")))
    driver.step(answered, InputArrived(ticket=9, message=stop_input("s1", HARD)))
    assert driver.kinds() == ["input", "turn", "input"]
    assert standing(driver) == ("STOPPED", "")


def test_a_hard_stop_cancels_every_operation_once_with_its_reason_and_waits_for_them() -> None:
    driver = session_with_calls("c1", "c2")
    first, second = driver.operation_of("c1"), driver.operation_of("c2")
    decision = driver.submit(stop_input("s1", HARD, "enough"))
    assert decision.effects == (
        SendCancel(manager_name=MANAGER, operation_id=first, reason="enough"),
        SendCancel(manager_name=MANAGER, operation_id=second, reason="enough"),
    )
    assert standing(driver) == ("STOPPING", "enough")
    driver.report(first, CANCELED, text="canceled")
    assert standing(driver) == ("STOPPING", "enough")
    decision = driver.report(second, COMPLETED, text="it was quicker")
    assert standing(driver) == ("STOPPED", "enough")
    assert not any(isinstance(one, SendCancel) for one in decision.effects)
    assert {call_id: outcome for call_id, (outcome, _) in results(driver).items()} == {
        "c1": "CANCELED",
        "c2": "COMPLETED",
    }
    assert len(driver.requests()) == 1


def test_a_hard_stop_ends_what_was_never_sent() -> None:
    driver = idle_session(limits=session_pb2.SessionLimits(max_running_operations=1))
    driver.say("two")
    driver.answer(calls("c1"), calls("c2"))
    decision = driver.submit(stop_input("s1", HARD))
    assert [one.operation_id for one in decision.effects if isinstance(one, SendCancel)] == [driver.operation_of("c1")]
    assert status_of(driver, "c2") == ("CANCELED", "CANCELED")


def test_an_input_after_a_hard_stop_waits_until_it_is_complete() -> None:
    driver = session_with_calls("c1")
    driver.submit(stop_input("s1", HARD))
    driver.say("and now this")
    assert len(driver.requests()) == 1
    assert standing(driver) == ("STOPPING", "")
    driver.report(driver.operation_of("c1"), CANCELED, text="gone")
    assert len(driver.requests()) == 2
    assert driver.sent()[-1] == ("user", "and now this")
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_an_input_after_a_complete_stop_goes_on_with_what_was_pending() -> None:
    driver = asked_session()
    driver.submit(stop_input("s1", HARD))
    driver.say("go on")
    assert driver.sent() == [("user", "do it"), ("user", "go on")]
    driver.answer(says("done"))
    assert (standing(driver), driver.state.pending) == (("IDLE", ""), 0)


def test_a_hard_stop_keeps_what_is_pending() -> None:
    driver = asked_session()
    driver.say("more", after_turn=True)
    driver.submit(stop_input("s1", HARD))
    assert (standing(driver), driver.state.pending) == (("STOPPED", ""), 2)


def test_a_hard_stop_overrides_one_when_idle() -> None:
    driver = session_with_calls("c1")
    driver.submit(stop_input("s1", WHEN_IDLE))
    decision = driver.submit(stop_input("s2", HARD))
    assert [type(one) for one in decision.effects] == [SendCancel]


def test_a_hard_stop_cannot_be_downgraded() -> None:
    driver = session_with_calls("c1")
    driver.submit(stop_input("s1", HARD, "now"))
    driver.submit(stop_input("s2", WHEN_IDLE, "later"))
    driver.report(driver.operation_of("c1"), CANCELED, text="gone")
    assert (standing(driver), len(driver.requests())) == (("STOPPED", "now"), 1)


def test_a_stop_when_idle_does_not_wake_a_stopped_session() -> None:
    driver = asked_session()
    driver.submit(stop_input("s1", HARD, "now"))
    decision = driver.submit(stop_input("s2", WHEN_IDLE, "later"))
    assert decision.effects == ()
    assert (standing(driver), driver.state.pending) == (("STOPPED", "now"), 1)


def test_a_stop_when_idle_cancels_nothing_and_lets_everything_be_answered() -> None:
    driver = session_with_calls("c1")
    decision = driver.submit(stop_input("s1", WHEN_IDLE, "then"))
    assert decision.effects == ()
    driver.report(driver.operation_of("c1"), FAILED, text="it broke")
    driver.answer(says("it broke"))
    assert standing(driver) == ("STOPPED", "then")


def test_a_stop_when_idle_during_a_request_waits_for_the_response_and_its_calls() -> None:
    driver = asked_session()
    driver.submit(stop_input("s1", WHEN_IDLE))
    driver.answer(calls("c1"))
    assert standing(driver) == ("WAITING_FOR_OPERATIONS", "")
    driver.report(driver.operation_of("c1"))
    driver.answer(says("done"))
    assert standing(driver) == ("STOPPED", "")


def test_a_stop_when_idle_stops_an_idle_session_at_once() -> None:
    driver = idle_session()
    driver.submit(stop_input("s1", WHEN_IDLE))
    assert standing(driver) == ("STOPPED", "")


def test_an_input_after_a_complete_stop_when_idle_starts_the_session_again() -> None:
    driver = idle_session()
    driver.submit(stop_input("s1", WHEN_IDLE))
    driver.say("go on")
    assert standing(driver) == ("RUNNING", "")
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_a_stop_when_idle_waits_for_a_provider_that_asked_to_wait() -> None:
    driver = asked_session()
    driver.fail(llm_pb2.ERROR_CLASS_RATE_LIMIT)
    driver.submit(stop_input("s1", WHEN_IDLE))
    assert standing(driver)[0] == "WAITING_FOR_PROVIDER"
    driver.wait(6.0)
    driver.answer(says("done"))
    assert standing(driver) == ("STOPPED", "")


def test_a_stop_when_idle_stops_a_failed_session() -> None:
    driver = asked_session()
    driver.fail(llm_pb2.ERROR_CLASS_QUOTA)
    driver.submit(stop_input("s1", WHEN_IDLE))
    assert standing(driver) == ("STOPPED", "")


def test_a_change_of_settings_does_not_clear_a_stop() -> None:
    driver = asked_session()
    driver.submit(stop_input("s1", WHEN_IDLE))
    driver.submit(settings_input("s2", model="m2"))
    driver.answer(says("done"))
    assert standing(driver) == ("STOPPED", "")
    driver.submit(settings_input("s3", model="m3"))
    assert standing(driver) == ("STOPPED", "")


def test_an_unfinished_hard_stop_is_finished_by_another_process_and_nothing_else_started() -> None:
    driver = session_with_calls("c1")
    driver.say("this must wait", after_turn=True)
    driver.submit(stop_input("s1", HARD, "enough"))
    driver.restart()
    decision = driver.connect(INSTANCE)
    operation_id = driver.operation_of("c1")
    assert [type(one).__name__ for one in decision.effects] == ["Dispatch", "SendCancel"]
    driver.report(operation_id, CANCELED, text="gone")
    assert (standing(driver), driver.requests()) == (("STOPPED", "enough"), driver.requests()[:1])


def test_a_complete_stop_survives_a_restart() -> None:
    driver = asked_session()
    driver.submit(stop_input("s1", HARD, "enough"))
    driver.restart()
    assert nothing_happened(driver.connect(INSTANCE))
    assert (standing(driver), len(driver.requests())) == (("STOPPED", "enough"), 1)


def test_an_unfinished_stop_when_idle_is_finished_by_another_process() -> None:
    driver = asked_session()
    driver.submit(stop_input("s1", WHEN_IDLE))
    driver.restart()
    driver.answer(says("done"))
    assert standing(driver) == ("STOPPED", "")


def test_restored_results_are_delivered_before_a_stop_when_idle_completes() -> None:
    driver = session_with_calls("c1")
    driver.say("hold")
    driver.report(driver.operation_of("c1"), text="of c1")
    driver.submit(stop_input("s1", WHEN_IDLE))
    driver.restart()
    assert "of c1" in driver.sent()[-1][1]
    driver.answer(says("done"))
    assert standing(driver) == ("STOPPED", "")


def test_a_second_hard_stop_holds_back_the_input_that_came_between() -> None:
    driver = session_with_calls("c1")
    driver.submit(stop_input("s1", HARD))
    driver.say("go on")
    driver.submit(stop_input("s2", HARD, "no"))
    driver.report(driver.operation_of("c1"), CANCELED, text="gone")
    assert (standing(driver), len(driver.requests())) == (("STOPPED", "no"), 1)


def test_a_hard_stop_during_the_inspection_ends_it_and_an_input_starts_another() -> None:
    driver = CheckedDriver()
    driver.submit(text_input("i1", "do it"))
    first = f"{driver.state.session_uid}-i1"
    decision = driver.submit(stop_input("s1", HARD, "enough"))
    assert decision.effects == (SendCancel(manager_name=MANAGER, operation_id=first, reason="enough"),)
    assert standing(driver) == ("STOPPING", "enough")
    driver.report(first, CANCELED, text="gone")
    assert standing(driver) == ("STOPPED", "enough")
    driver.say("go on")
    assert driver.dispatched() == [first, f"{driver.state.session_uid}-i3"]
    assert driver.sent() == [("user", "do it"), ("user", "go on")]
