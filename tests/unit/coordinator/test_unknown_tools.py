"""Calls that can't be run are told to the model at once, with what it may do instead; the others run."""

from __future__ import annotations

import pytest

from tests.support.session_driver import calls, says
from tests.support.session_scenes import asked_session, results, standing
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

UNKNOWN = 'There is no tool named "Nope"; nothing was run. Available tools: Bash, ViewImage.'


def test_an_unknown_tool_is_answered_with_those_that_exist_in_a_corrective_turn() -> None:
    driver = asked_session()
    decision = driver.answer(calls("c1", name="Nope"))
    assert [item.WhichOneof("item") for item in decision.items] == ["model_response", "tool_call_status", "turn"]
    assert decision.items[1].tool_call_status == item_pb2.ToolCallStatus(
        turn_id=decision.items[0].model_response.turn_id,
        call_id="c1",
        result=item_pb2.CallResult(
            outcome=item_pb2.CALL_OUTCOME_REJECTED, parts=[llm_pb2.ContentPart(text=llm_pb2.TextPart(text=UNKNOWN))]
        ),
    )
    assert decision.operations == ()
    assert driver.sent()[-1] == ("tool_result", f"c1: {UNKNOWN}")


def test_wrong_arguments_are_answered_in_a_corrective_turn() -> None:
    driver = asked_session()
    driver.answer(calls("c1", arguments="not json"))
    outcome, text = results(driver)["c1"]
    assert outcome == "REJECTED"
    assert "Bash" in text
    assert driver.volatile.request_turn_id
    driver.answer(says("I see"))
    assert standing(driver) == ("IDLE", "")


def test_a_good_call_runs_beside_an_unknown_one() -> None:
    driver = asked_session()
    driver.answer(calls("good"), calls("bad", name="Nope"))
    assert driver.dispatched()[-1] == driver.operation_of("good")
    assert results(driver) == {"bad": ("REJECTED", UNKNOWN)}
    driver.answer(says("hm"))
    driver.report(driver.operation_of("good"), text="fine")
    assert results(driver)["good"] == ("COMPLETED", "fine")


def test_a_rejection_is_restored_and_not_made_again() -> None:
    driver = asked_session()
    driver.answer(calls("c1", name="Nope"))
    items = len(driver.items)
    driver.restart()
    assert [item.WhichOneof("item") for item in driver.items[items:]] == ["turn"]
    assert driver.sent()[-1] == ("tool_result", f"c1: {UNKNOWN}")


@pytest.mark.parametrize(
    ("stop_reason", "told"),
    [
        (llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS, "cut off at the output limit"),
        (llm_pb2.STOP_REASON_REFUSED, "the answer was refused"),
    ],
)
def test_calls_of_an_answer_that_was_cut_off_are_never_run(
    stop_reason: llm_pb2.StopReason.ValueType, told: str
) -> None:
    driver = asked_session()
    decision = driver.answer(says("so"), calls("c1"), calls("c2"), stop=stop_reason)
    assert decision.operations == ()
    assert [outcome for outcome, _ in results(driver).values()] == ["REJECTED", "REJECTED"]
    assert all(told in text for _, text in results(driver).values())
    assert driver.volatile.request_turn_id


def test_a_refused_answer_without_calls_is_the_end() -> None:
    driver = asked_session()
    driver.answer(says("as I said"), stop=llm_pb2.STOP_REASON_REFUSED)
    assert (standing(driver), driver.sent()[-1]) == (("IDLE", ""), ("assistant", "as I said"))
