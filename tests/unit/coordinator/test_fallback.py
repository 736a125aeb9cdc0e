"""A second provider answers while the first one is exhausted or fails, and the history says so."""

from __future__ import annotations

from datetime import timedelta

import pytest

from harness.clock import timestamp
from harness.coordinator.protocol import ModelFailed
from harness.coordinator.settings import fallback_model
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, calls, says, session
from tests.support.session_scenes import refusals, retry_input, settings_input, standing
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

RATE_LIMIT = llm_pb2.ERROR_CLASS_RATE_LIMIT
QUOTA = llm_pb2.ERROR_CLASS_QUOTA


def asked(fallback: str = "other/m9") -> CheckedDriver:
    record = session()
    record.initial_settings.fallback_provider = fallback
    driver = CheckedDriver(record)
    driver.say("do it")
    return driver


def providers(driver: CheckedDriver) -> list[str]:
    return [f"{item.turn.provider}/{item.turn.model}" for item in driver.items if item.HasField("turn")]


def rate_limited(driver: CheckedDriver, *, retry_in_s: float) -> None:
    failure = llm_pb2.Failure(error_class=RATE_LIMIT, message="slow down")
    failure.retry_time.CopyFrom(timestamp(driver.now.wall_time + timedelta(seconds=retry_in_s)))
    driver.step(ModelFailed(turn_id=driver.volatile.request_turn_id, failure=failure))


@pytest.mark.parametrize(
    "error_class",
    [
        RATE_LIMIT,
        QUOTA,
        llm_pb2.ERROR_CLASS_OVERLOAD,
        llm_pb2.ERROR_CLASS_AUTHENTICATION,
        llm_pb2.ERROR_CLASS_PERMISSION,
        llm_pb2.ERROR_CLASS_TIMEOUT,
        llm_pb2.ERROR_CLASS_CONNECTION,
        llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE,
    ],
)
def test_it_is_asked_at_once_where_the_first_one_fails(error_class: llm_pb2.ErrorClass.ValueType) -> None:
    driver = asked()
    decision = driver.fail(error_class)
    assert [item.WhichOneof("item") for item in decision.items] == ["turn_failure", "turn"]
    assert providers(driver) == ["scripted/m1", "other/m9"]
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


@pytest.mark.parametrize(
    "error_class",
    [
        llm_pb2.ERROR_CLASS_INVALID_REQUEST,
        llm_pb2.ERROR_CLASS_CONTENT_POLICY,
        llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW,
        llm_pb2.ERROR_CLASS_SCRIPT,
    ],
)
def test_what_is_wrong_with_the_request_is_not_sent_elsewhere(error_class: llm_pb2.ErrorClass.ValueType) -> None:
    driver = asked()
    driver.fail(error_class)
    assert (providers(driver), standing(driver)[0]) == (["scripted/m1"], "FAILED")


def test_it_goes_on_with_the_fallback_until_the_users_next_word() -> None:
    driver = asked()
    driver.fail(QUOTA)
    driver.answer(calls("c1"))
    driver.report(driver.operation_of("c1"))
    driver.answer(says("done"))
    driver.say("more")
    assert providers(driver) == ["scripted/m1", "other/m9", "other/m9", "scripted/m1"]


def test_the_first_one_is_not_asked_before_the_time_that_it_named() -> None:
    driver = asked()
    rate_limited(driver, retry_in_s=300)
    driver.answer(says("done"))
    driver.wait(100)
    driver.say("more")
    driver.answer(says("done"))
    driver.wait(250)
    driver.say("and more")
    assert providers(driver) == ["scripted/m1", "other/m9", "other/m9", "scripted/m1"]


def test_where_both_must_wait_the_session_waits_and_tries_the_first_again() -> None:
    driver = asked()
    driver.fail(RATE_LIMIT)
    rate_limited(driver, retry_in_s=60)
    assert standing(driver)[0] == "WAITING_FOR_PROVIDER"
    driver.wait(60)
    assert providers(driver) == ["scripted/m1", "other/m9", "scripted/m1"]
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_where_both_fail_for_good_so_does_the_session_and_a_retry_tries_the_first() -> None:
    driver = asked()
    driver.fail(QUOTA)
    driver.fail(llm_pb2.ERROR_CLASS_AUTHENTICATION)
    assert standing(driver) == ("FAILED", "AUTHENTICATION: it failed")
    driver.submit(retry_input("r1"))
    assert providers(driver)[-1] == "scripted/m1"


def test_another_process_goes_on_with_it() -> None:
    driver = asked()
    driver.fail(QUOTA)
    driver.restart(was_taken_over=True)
    driver.connect(INSTANCE)
    assert providers(driver)[-1] == "other/m9"


def test_new_settings_are_followed_at_once() -> None:
    driver = asked()
    driver.fail(QUOTA)
    driver.answer(says("done"))
    driver.submit(settings_input("s1", provider="third", model="m3"))
    driver.say("more")
    assert providers(driver)[-1] == "third/m3"


def test_reasoning_of_the_first_is_left_out_and_the_break_recorded() -> None:
    driver = asked()
    thought = llm_pb2.OutputItem(reasoning=llm_pb2.Reasoning(raw_json='{"it": 1}', wire_format="scripted"))
    driver.answer(thought, says("so"))
    driver.say("more")
    driver.fail(QUOTA)
    turn = driver.items[-1].turn
    assert [change.kind for change in turn.changes] == [item_pb2.CONTEXT_CHANGE_KIND_PREFIX_BREAK]
    assert "m9" in turn.changes[0].reason


def test_a_summary_is_asked_of_it_too() -> None:
    driver = asked()
    driver.answer(says("an answer"))
    driver.say("more")
    driver.fail_with_overflow()
    driver.fail(QUOTA)
    assert providers(driver)[-1] == "other/m9"
    driver.answer(says("a summary"))
    assert "a summary" in driver.sent()[0][1]


def test_without_one_everything_is_as_before() -> None:
    driver = asked("")
    driver.fail(QUOTA)
    assert standing(driver) == ("FAILED", "QUOTA: it failed")


def test_it_can_not_become_what_it_stands_in_for() -> None:
    driver = asked("other/m9")
    driver.submit(settings_input("s1", fallback_provider="scripted/m1"))
    driver.submit(settings_input("s2", provider="other", model="m9"))
    assert refusals(driver) == ["FALLBACK_IS_PROVIDER"] * 2
    driver.submit(settings_input("s3", fallback_provider="scripted/m2"))
    assert len(refusals(driver)) == 2, "another model of the same provider may stand in"


@pytest.mark.parametrize(
    ("fallback", "expected"),
    [
        ("openrouter/anthropic/claude-opus-5", ("openrouter", "anthropic/claude-opus-5")),
        ("openai", ("openai", "gpt-6-astra")),
        ("openai-compatible", ("openai-compatible", "m1")),
    ],
)
def test_it_is_asked_for_its_own_model(fallback: str, expected: tuple[str, str]) -> None:
    settings = session_pb2.SessionSettings(provider="scripted", model="m1", fallback_provider=fallback)
    assert fallback_model(settings) == expected
