"""An INTERRUPT input cancels the request in flight; an AFTER_TURN input never does."""

from __future__ import annotations

from harness.coordinator import CoordinatorConfig
from harness.coordinator.protocol import CancelRequest, InputArrived, ModelAnswered, ModelFailed, SendRequest
from tests.support.session_driver import calls, output, says, text_input
from tests.support.session_scenes import asked_session, idle_session, nothing_happened, session_with_calls, standing
from unreal_agent.llm.v1 import llm_pb2


def test_an_input_cancels_the_request_and_starts_a_turn_that_includes_it() -> None:
    driver = asked_session()
    first = driver.volatile.request_turn_id
    decision = driver.say("rather this")
    second = driver.volatile.request_turn_id
    assert decision.effects == (CancelRequest(turn_id=first), SendRequest(turn_id=second))
    assert [item.WhichOneof("item") for item in decision.items] == ["input", "turn"]
    assert decision.items[1].turn.previous_turn_id == first
    assert driver.sent() == [("user", "do it"), ("user", "rather this")]


def test_a_late_success_of_the_cancelled_request_is_dropped() -> None:
    driver = asked_session()
    first = driver.volatile.request_turn_id
    driver.say("rather this")
    assert nothing_happened(driver.step(ModelAnswered(turn_id=first, output=output(says("too late")))))
    assert driver.state.usage == llm_pb2.Usage()
    driver.answer(says("in time"))
    assert driver.sent()[-1] == ("assistant", "in time")


def test_a_late_failure_of_the_cancelled_request_is_dropped() -> None:
    driver = asked_session()
    first = driver.volatile.request_turn_id
    driver.say("rather this")
    failure = llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_QUOTA, message="none left")
    assert nothing_happened(driver.step(ModelFailed(turn_id=first, failure=failure)))
    assert standing(driver) == ("RUNNING", "")


def test_an_input_that_raced_with_the_response_is_in_history_before_it() -> None:
    driver = asked_session()
    raced = InputArrived(ticket=9, message=text_input("raced", "wait"))
    decision = driver.step(ModelAnswered(turn_id=driver.volatile.request_turn_id, output=output(calls("c1"))), raced)
    assert [item.WhichOneof("item") for item in decision.items] == [
        "input",
        "model_response",
        "tool_call_status",
        "turn",
    ]
    assert [role for role, _ in driver.sent()] == ["user", "assistant", "tool_result", "user"]


def test_an_input_for_after_the_turn_waits_for_the_response() -> None:
    driver = asked_session()
    decision = driver.say("then this", after_turn=True)
    assert ([item.WhichOneof("item") for item in decision.items], decision.effects) == (["input"], ())
    driver.answer(says("done"))
    assert driver.sent() == [("user", "do it"), ("assistant", "done"), ("user", "then this")]
    assert driver.volatile.request_turn_id


def test_an_input_for_after_the_turn_that_raced_with_the_response_follows_it_at_once() -> None:
    driver = asked_session()
    raced = InputArrived(ticket=9, message=text_input("raced", "then this", after_turn=True))
    answered = ModelAnswered(turn_id=driver.volatile.request_turn_id, output=output(says("done")))
    decision = driver.step(raced, answered)
    assert [item.WhichOneof("item") for item in decision.items] == ["input", "model_response", "turn"]


def test_an_input_for_after_the_turn_starts_one_where_the_session_is_idle() -> None:
    driver = idle_session()
    decision = driver.say("begin", after_turn=True)
    assert [item.WhichOneof("item") for item in decision.items] == ["input", "turn"]


def test_an_input_for_after_the_turn_starts_one_while_older_calls_run() -> None:
    driver = session_with_calls("c1")
    driver.wait(1.1)
    driver.say("and this", after_turn=True)
    assert driver.volatile.request_turn_id
    assert driver.sent()[-1] == ("user", "and this")


def test_an_input_for_after_the_turn_joins_the_turn_of_an_interrupting_one() -> None:
    driver = asked_session()
    driver.say("later", after_turn=True)
    driver.say("now")
    assert driver.sent() == [("user", "do it"), ("user", "later"), ("user", "now")]


def test_results_and_heartbeats_do_not_interrupt() -> None:
    driver = session_with_calls("c1", "c2", config=CoordinatorConfig(heartbeat_interval_s=10.0))
    driver.say("tell me")
    request = driver.volatile.request_turn_id
    driver.report(driver.operation_of("c1"))
    driver.wait(60.0)
    assert driver.volatile.request_turn_id == request
    assert not any(isinstance(one, CancelRequest) for one in driver.effects)


def test_many_interruptions_leave_a_chain_of_turns_and_one_request() -> None:
    driver = asked_session()
    for number in range(5):
        driver.say(f"no, {number}")
    turns = [item.turn for item in driver.items if item.HasField("turn")]
    assert [turn.previous_turn_id for turn in turns] == ["", *(turn.turn_id for turn in turns[:-1])]
    assert driver.requests() == [turn.turn_id for turn in turns]
    driver.answer(says("at last"))
    assert standing(driver) == ("IDLE", "")
