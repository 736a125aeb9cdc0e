"""Call IDs are unique in a session: a missing, repeated or overlong one is replaced before it is recorded."""

from __future__ import annotations

from harness.coordinator.protocol import ModelAnswered
from tests.support.histories import CheckedDriver
from tests.support.session_driver import calls, output, says
from tests.support.session_scenes import asked_session, results, session_with_calls, standing
from unreal_agent.llm.v1 import llm_pb2


def recorded_calls(driver: CheckedDriver) -> list[tuple[str, str]]:
    return [
        (one.tool_call.call_id, one.tool_call.provider_call_id)
        for item in driver.items
        for one in item.model_response.output.items
        if one.HasField("tool_call")
    ]


def test_good_ids_are_kept_and_the_output_is_recorded_as_it_came() -> None:
    driver = asked_session()
    came = output(says("so"), calls("functions.Bash:0"), calls("c2"))
    driver.step(ModelAnswered(turn_id=driver.volatile.request_turn_id, output=came))
    assert driver.items[2].model_response.output == came


def test_a_missing_one_is_made() -> None:
    driver = asked_session()
    driver.answer(calls(""), calls(""))
    assert recorded_calls(driver) == [("call-3-0-uid-s1", ""), ("call-3-1-uid-s1", "")]
    assert [one.call_id for one in driver.state.unsettled()] == ["call-3-0-uid-s1", "call-3-1-uid-s1"]


def test_one_that_occurs_twice_in_a_response_is_replaced_the_second_time() -> None:
    driver = asked_session()
    driver.answer(calls("c1"), calls("c1", arguments='{"command": "false"}'))
    assert recorded_calls(driver) == [("c1", ""), ("call-3-1-uid-s1", "c1")]
    first, second = (one.tool_call.arguments_json for one in driver.items[2].model_response.output.items)
    assert (first, second) == ('{"command": "true"}', '{"command": "false"}')


def test_one_of_an_earlier_turn_makes_another_call() -> None:
    driver = session_with_calls("c1")
    driver.report(driver.operation_of("c1"), text="first")
    driver.answer(calls("c1"))
    (_, second) = recorded_calls(driver)
    assert second == ("call-7-0-uid-s1", "c1")
    driver.report(driver.operation_of(second[0]), text="second")
    assert results(driver) == {"c1": ("COMPLETED", "first"), second[0]: ("COMPLETED", "second")}
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_one_that_no_provider_would_take_back_is_replaced() -> None:
    driver = asked_session()
    driver.answer(calls("x" * 65), calls("y" * 64))
    assert recorded_calls(driver) == [("call-3-0-uid-s1", "x" * 65), ("y" * 64, "")]


def test_one_that_a_model_guessed_before_does_not_stop_the_session() -> None:
    driver = asked_session()
    driver.answer(calls("call-7-0-uid-s1"))
    driver.report(driver.operation_of("call-7-0-uid-s1"))
    driver.answer(calls(""), calls("call-7-0-uid-s1x"))
    made = [call_id for call_id, _ in recorded_calls(driver)]
    assert made == ["call-7-0-uid-s1", "call-7-0-uid-s1x", "call-7-1-uid-s1"]


def test_the_output_that_was_given_is_not_changed() -> None:
    driver = asked_session()
    came = output(calls(""), calls(""))
    before = llm_pb2.ModelOutput()
    before.CopyFrom(came)
    driver.step(ModelAnswered(turn_id=driver.volatile.request_turn_id, output=came))
    assert came == before


def test_ids_of_rejected_calls_are_unique_too() -> None:
    driver = asked_session()
    driver.answer(calls("c1", name="Nope"), calls("c1", name="Nope"))
    assert list(results(driver)) == ["c1", "call-3-1-uid-s1"]
