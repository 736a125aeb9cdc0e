"""After a long wait for calls alone the model is woken with a note that lists them."""

from __future__ import annotations

from harness.coordinator import CoordinatorConfig
from harness.coordinator.protocol import Decision
from harness.tools.presentation import heartbeat_text
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, calls, says, stop_input, text_input
from tests.support.session_scenes import (
    CANCELED,
    HARD,
    WHEN_IDLE,
    asked_session,
    idle_session,
    nothing_happened,
    session_with_calls,
    standing,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

EVERY_10_S = CoordinatorConfig(heartbeat_interval_s=10.0)


def waiting_session(*call_ids: str) -> CheckedDriver:
    driver = session_with_calls(*call_ids, config=EVERY_10_S)
    driver.wait(1.1)
    return driver


def heartbeats(driver: CheckedDriver) -> list[item_pb2.Heartbeat]:
    return [item.input.control.heartbeat for item in driver.items if item.input.control.HasField("heartbeat")]


def kinds(decision: Decision) -> list[str]:
    return [str(item.WhichOneof("item")) for item in decision.items]


def test_it_is_recorded_as_an_input_and_starts_a_turn_that_shows_it() -> None:
    driver = waiting_session("c2", "c1")
    decision = driver.wait(10.0)
    assert kinds(decision) == ["input", "turn"]
    running = [item_pb2.RunningCall(call_id=one, tool_name="Bash") for one in ("c1", "c2")]
    text = heartbeat_text(11.1, running)
    assert heartbeats(driver) == [item_pb2.Heartbeat(reason=text, running_calls=running)]
    assert driver.sent()[-1] == ("user", text)
    assert decision.items[0].input.kind == item_pb2.INPUT_KIND_CONTROL


def test_it_comes_at_its_time_and_not_before() -> None:
    driver = session_with_calls("c1", config=EVERY_10_S)
    assert driver.decision is not None
    assert driver.decision.wake_s == driver.monotonic_s + 1.0
    assert driver.wait(1.0).wake_s == driver.monotonic_s + 9.0
    assert nothing_happened(driver.wait(8.9))
    assert kinds(driver.wait(0.1)) == ["input", "turn"]


def test_its_clock_starts_again_after_each_turn() -> None:
    driver = waiting_session("c1")
    driver.wait(9.0)
    driver.monotonic_s += 5.0
    driver.answer(says("I wait"))
    assert heartbeats(driver)[1:] == []
    driver.wait(9.9)
    assert len(heartbeats(driver)) == 1
    driver.wait(0.1)
    assert len(heartbeats(driver)) == 2


def test_an_input_starts_its_clock_again() -> None:
    driver = waiting_session("c1")
    driver.wait(5.0)
    driver.say("how is it?")
    driver.answer(says("it runs"))
    assert nothing_happened(driver.wait(9.0))
    driver.wait(1.0)
    assert len(heartbeats(driver)) == 1


def test_there_is_none_during_a_request() -> None:
    driver = waiting_session("c1")
    driver.say("how is it?")
    assert nothing_happened(driver.wait(100.0))


def test_zero_means_never() -> None:
    driver = session_with_calls("c1", config=CoordinatorConfig(heartbeat_interval_s=0.0))
    driver.wait(1.1)
    assert driver.wait(1e6).wake_s is None
    assert heartbeats(driver) == []


def test_there_is_none_in_an_idle_session() -> None:
    driver = idle_session(config=EVERY_10_S)
    assert nothing_happened(driver.wait(1e6))


def test_it_lists_only_the_calls_that_still_run() -> None:
    driver = waiting_session("c1", "c2")
    driver.report(driver.operation_of("c1"))
    driver.answer(says("one is done"))
    driver.wait(10.0)
    assert [[one.call_id for one in heartbeat.running_calls] for heartbeat in heartbeats(driver)] == [["c2"]]


def test_a_tiny_interval_works() -> None:
    driver = session_with_calls("c1", config=CoordinatorConfig(heartbeat_interval_s=0.001))
    for _ in range(3):
        driver.wait(0.001)
        driver.answer(says("I wait"))
    assert len(heartbeats(driver)) == 3


def test_there_is_none_while_a_hard_stop_waits() -> None:
    driver = waiting_session("c1")
    driver.submit(stop_input("s1", HARD))
    driver.wait(15.0)
    assert heartbeats(driver) == []
    driver.report(driver.operation_of("c1"), CANCELED, text="gone")
    assert standing(driver) == ("STOPPED", "")


def test_a_stop_when_idle_does_not_end_them() -> None:
    driver = waiting_session("c1")
    driver.submit(stop_input("s1", WHEN_IDLE))
    driver.wait(10.0)
    assert len(heartbeats(driver)) == 1


def test_there_is_none_while_the_session_has_failed() -> None:
    driver = waiting_session("c1")
    driver.say("how is it?")
    driver.fail(llm_pb2.ERROR_CLASS_QUOTA)
    assert nothing_happened(driver.wait(100.0))


def test_one_that_is_not_answered_is_shown_again_by_the_next_turn() -> None:
    driver = waiting_session("c1")
    driver.wait(10.0)
    (heartbeat,) = heartbeats(driver)
    driver.say("leave it")
    assert driver.sent()[-2:] == [("user", heartbeat.reason), ("user", "leave it")]


def test_its_clock_starts_anew_in_another_process() -> None:
    driver = waiting_session("c1")
    driver.wait(5.0)
    driver.restart()
    driver.connect(INSTANCE)
    driver.wait(9.9)
    assert heartbeats(driver) == []
    driver.wait(0.1)
    assert len(heartbeats(driver)) == 1


def test_one_that_was_recorded_before_a_restart_is_delivered_after_it() -> None:
    driver = waiting_session("c1")
    driver.wait(10.0)
    driver.restart()
    assert driver.sent()[-1] == ("user", heartbeats(driver)[0].reason)
    driver.answer(says("I wait"))
    assert driver.state.pending == 0


def test_a_client_that_takes_the_ids_of_heartbeats_does_not_stop_the_session() -> None:
    driver = waiting_session("c1")
    next_sequence = driver.state.last_sequence + 4
    taken = f"heartbeat-{driver.state.session_uid}-{next_sequence}"
    driver.submit(text_input(taken, "mine"))
    driver.answer(says("yours"))
    assert driver.state.last_sequence == next_sequence - 1
    driver.wait(10.0)
    assert driver.items[-2].input.input_id == f"{taken}-own"


def test_a_session_that_only_ran_one_call_at_a_time_gets_none() -> None:
    driver = asked_session(config=EVERY_10_S)
    for number in range(3):
        driver.answer(calls(f"c{number}"))
        driver.wait(9.0)
        driver.report(driver.operation_of(f"c{number}"))
    assert heartbeats(driver) == []
