"""Budgets stop a session cleanly, with a reason."""

from __future__ import annotations

from dataclasses import replace

from google.protobuf.duration_pb2 import Duration

from harness.clock import timestamp
from harness.coordinator.protocol import CancelRequest, ModelFailed, SendCancel
from harness.llm.models import Price
from tests.support.histories import CheckedDriver
from tests.support.session_driver import START, calls, says, session, stop_input
from tests.support.session_scenes import (
    CANCELED,
    HARD,
    asked_session,
    idle_session,
    nothing_happened,
    refusals,
    retry_input,
    session_with_calls,
    settings_input,
    standing,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import session_pb2

TWO_TURNS = session_pb2.SessionLimits(max_turns=2)
TURNS_USED_UP = ("STOPPED", "LIMIT_TURNS: the limit of 2 turns is reached")


def test_the_last_turn_is_answered_and_the_next_one_not_begun() -> None:
    driver = idle_session(limits=TWO_TURNS)
    driver.say("second")
    driver.answer(says("the second answer"))
    assert standing(driver) == ("IDLE", "")
    decision = driver.say("third")
    assert [item.WhichOneof("item") for item in decision.items] == ["input", "input"]
    assert decision.items[1].input.control.stop.reason == TURNS_USED_UP[1]
    assert (standing(driver), driver.state.pending, len(driver.requests())) == (TURNS_USED_UP, 1, 2)


def test_running_operations_are_cancelled_at_once() -> None:
    driver = asked_session(limits=session_pb2.SessionLimits(max_turns=1))
    driver.answer(calls("c1"), calls("c2"))
    decision = driver.say("go on")
    assert [one.operation_id for one in decision.effects if isinstance(one, SendCancel)] == [
        driver.operation_of("c1"),
        driver.operation_of("c2"),
    ]
    assert standing(driver)[0] == "STOPPING"
    for call_id in ("c1", "c2"):
        driver.report(driver.operation_of(call_id), CANCELED, text="gone")
    assert standing(driver)[0] == "STOPPED"


def test_a_result_beyond_the_limit_is_recorded_and_not_sent() -> None:
    driver = asked_session(limits=session_pb2.SessionLimits(max_turns=1))
    driver.answer(calls("c1"))
    driver.report(driver.operation_of("c1"))
    assert (standing(driver)[0], len(driver.requests()), dict(driver.state.calls)) == ("STOPPED", 1, {})


def test_a_steered_request_beyond_the_limit_is_cancelled() -> None:
    driver = asked_session(limits=session_pb2.SessionLimits(max_turns=1))
    request = driver.volatile.request_turn_id
    assert driver.say("rather this").effects == (CancelRequest(turn_id=request),)


def test_tokens_count_in_and_out() -> None:
    driver = idle_session(limits=session_pb2.SessionLimits(max_tokens=15))
    driver.say("more")
    assert standing(driver) == ("STOPPED", "LIMIT_TOKENS: the limit of 15 tokens is reached")


def test_a_raised_limit_and_an_input_go_on_with_what_is_pending() -> None:
    driver = idle_session(limits=TWO_TURNS)
    driver.say("second")
    driver.answer(says("the second answer"))
    driver.say("third")
    driver.submit(settings_input("s1", limits=session_pb2.SessionLimits(max_turns=9)))
    driver.say("now")
    assert driver.sent()[-2:] == [("user", "third"), ("user", "now")]
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_a_raised_limit_alone_goes_on_with_what_is_pending() -> None:
    driver = idle_session(limits=TWO_TURNS)
    driver.say("second")
    driver.answer(says("the second answer"))
    driver.say("third")
    driver.submit(settings_input("s1", limits=session_pb2.SessionLimits(max_turns=9)))
    assert driver.sent()[-1] == ("user", "third")
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_a_limit_raised_while_it_still_stops_goes_on_once_it_has_stopped() -> None:
    driver = asked_session(limits=session_pb2.SessionLimits(max_turns=1))
    driver.answer(calls("c1"))
    driver.say("go on")
    assert standing(driver)[0] == "STOPPING"
    driver.submit(settings_input("s1", limits=session_pb2.SessionLimits(max_turns=9)))
    driver.report(driver.operation_of("c1"), CANCELED, text="gone")
    assert standing(driver)[0] == "RUNNING"
    assert driver.sent()[-1] == ("user", "go on")


def test_a_raised_limit_goes_on_after_a_restart() -> None:
    driver = idle_session(limits=session_pb2.SessionLimits(max_turns=1))
    driver.say("second")
    driver.restart()
    driver.connect("instance-1")
    driver.submit(settings_input("s1", limits=session_pb2.SessionLimits()))
    assert driver.sent()[-1] == ("user", "second")


def test_a_limit_raised_too_little_stops_again() -> None:
    driver = idle_session(limits=session_pb2.SessionLimits(max_tokens=15))
    driver.say("more")
    driver.submit(settings_input("s1", limits=session_pb2.SessionLimits(max_tokens=10)))
    assert standing(driver) == ("STOPPED", "LIMIT_TOKENS: the limit of 10 tokens is reached")
    assert driver.state.pending == 1


def test_other_settings_and_a_persons_stop_are_not_gone_on_from() -> None:
    driver = idle_session(limits=session_pb2.SessionLimits(max_turns=1))
    driver.say("second")
    driver.submit(settings_input("s1", effort="high"))
    assert standing(driver)[0] == "STOPPED"
    stopped = asked_session()
    stopped.submit(stop_input("stop", HARD))
    stopped.submit(settings_input("s1", limits=session_pb2.SessionLimits(max_turns=9)))
    assert standing(stopped)[0] == "STOPPED"


def priced_session(max_cost_micros: int) -> CheckedDriver:
    """Return a session at rest whose first answer cost 10 x 2 + 5 x 8 = 60 millionths of a dollar."""
    driver = CheckedDriver(session(limits=session_pb2.SessionLimits(max_cost_micros=max_cost_micros)))
    price = Price(input=2.0, cached_input=0.5, cache_write=2.0, output=8.0)
    driver.environment = replace(driver.environment, price=lambda model: price if model == "m1" else None)
    driver.say("do it")
    driver.answer(says("ready"))
    return driver


def test_cost_is_bounded_by_what_models_cost() -> None:
    driver = priced_session(61)
    driver.say("more")
    driver.answer(says("done"))
    driver.say("and more")
    assert standing(driver) == ("STOPPED", "LIMIT_COST: the limit of 6.1e-05 US dollars is reached")
    assert len(driver.requests()) == 2


def test_cached_tokens_cost_what_they_cost() -> None:
    driver = priced_session(61)
    driver.usage = llm_pb2.Usage(input_tokens=10, cached_input_tokens=10, output_tokens=0)
    usage = driver.state.usage_by_model["m1"]
    price = driver.environment.price("m1")
    assert price is not None
    assert price.cost_micros(usage) == 60
    driver.say("more")
    driver.answer(says("done"))
    assert price.cost_micros(driver.state.usage_by_model["m1"]) == 65


def test_attempts_that_failed_cost_too_where_the_provider_says_so() -> None:
    driver = priced_session(1_000)
    driver.say("more")
    attempt = llm_pb2.Attempt(number=1, usage=llm_pb2.Usage(input_tokens=500))
    failure = llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_TIMEOUT, message="it broke off")
    turn_id = driver.volatile.request_turn_id
    driver.step(ModelFailed(turn_id=turn_id, failure=failure, attempts=(attempt,)))
    driver.submit(retry_input("r1"))
    assert standing(driver)[1].startswith("LIMIT_COST")


def test_a_model_without_price_is_refused_where_the_cost_is_bounded() -> None:
    driver = priced_session(1_000)
    driver.submit(settings_input("s1", model="m2"))
    assert refusals(driver) == ["PRICE_UNKNOWN"]
    driver.submit(settings_input("s2", fallback_provider="other/m3"))
    assert refusals(driver) == ["PRICE_UNKNOWN"] * 2
    assert driver.state.settings.model == "m1"
    driver.submit(settings_input("s3", model="m2", limits=session_pb2.SessionLimits()))
    assert (len(refusals(driver)), driver.state.settings.model) == (2, "m2")


def test_each_input_beyond_a_limit_is_recorded_and_stops_again() -> None:
    driver = idle_session(limits=session_pb2.SessionLimits(max_turns=1))
    for number in range(3):
        driver.say(f"more {number}")
        assert standing(driver)[0] == "STOPPED"
    assert driver.kinds().count("turn") == 1
    assert driver.state.pending == 3


def test_an_unlimited_session_goes_on() -> None:
    driver = session_with_calls("c1")
    for _ in range(50):
        driver.say("more")
        driver.answer(says("more"))
    assert standing(driver) == ("WAITING_FOR_OPERATIONS", "")


def aged_session(**wall_time: int) -> CheckedDriver:
    record = session(limits=session_pb2.SessionLimits(max_wall_time=Duration(**wall_time)))
    record.create_time.CopyFrom(timestamp(START))
    driver = CheckedDriver(record, load=False)
    driver.monotonic_s = 0.0
    driver.step()
    driver.connect("instance-1")
    driver.say("do it")
    return driver


def test_wall_time_ends_what_runs_when_it_is_used_up() -> None:
    driver = aged_session(seconds=60)
    assert driver.decision is not None
    assert driver.decision.wake_s == 60.0
    driver.answer(calls("c1"))
    assert nothing_happened(driver.wait(59.0))
    decision = driver.wait(1.0)
    assert [type(one) for one in decision.effects] == [SendCancel]
    driver.report(driver.operation_of("c1"), CANCELED, text="gone")
    assert standing(driver) == ("STOPPED", "LIMIT_WALL_TIME: the session is older than 60 s")


def test_wall_time_cancels_the_request() -> None:
    driver = aged_session(seconds=60)
    request = driver.volatile.request_turn_id
    assert driver.wait(60.0).effects == (CancelRequest(turn_id=request),)


def test_wall_time_writes_nothing_while_the_session_rests() -> None:
    driver = aged_session(seconds=60)
    driver.answer(says("done"))
    assert nothing_happened(driver.wait(1000.0))
    driver.say("more")
    assert standing(driver)[0] == "STOPPED"


def test_an_absurd_wall_time_is_no_limit() -> None:
    driver = aged_session(seconds=315_576_000_000)
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")
