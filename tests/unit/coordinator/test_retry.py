"""A retry tries the failed turn again, with or without what was new in the refused request."""

from __future__ import annotations

from harness.context_builder.context_builder import OMITTED_RESULT
from harness.tools.presentation import RUNNING_PLACEHOLDER
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, calls, says, text_input
from tests.support.session_scenes import (
    accepted,
    asked_session,
    idle_session,
    nothing_happened,
    refusals,
    retry_input,
    session_with_calls,
    standing,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

REFUSED = llm_pb2.ERROR_CLASS_INVALID_REQUEST


def omitted(sequence: int, omitted_bytes: int, call_id: str = "") -> item_pb2.ContextChange:
    return item_pb2.ContextChange(
        kind=item_pb2.CONTEXT_CHANGE_KIND_OMITTED,
        source_sequence=sequence,
        call_id=call_id,
        reason="left out on retry of a refused request",
        omitted_bytes=omitted_bytes,
    )


def test_it_sends_the_same_again() -> None:
    driver = asked_session()
    driver.fail(llm_pb2.ERROR_CLASS_QUOTA)
    decision = driver.submit(retry_input("r1"))
    assert [item.WhichOneof("item") for item in decision.items] == ["input", "turn"]
    first, second = (item.turn for item in driver.items if item.HasField("turn"))
    assert (second.previous_turn_id, second.context_digest) == (first.turn_id, first.context_digest)


def test_it_is_refused_where_nothing_has_failed() -> None:
    for driver in (idle_session(), asked_session(), session_with_calls("c1")):
        before = len(driver.items)
        driver.submit(retry_input("r1"))
        assert (refusals(driver), len(driver.items)) == (["SESSION_NOT_FAILED"], before)


def test_a_repeated_one_is_a_duplicate() -> None:
    driver = asked_session()
    driver.fail(llm_pb2.ERROR_CLASS_QUOTA)
    driver.submit(retry_input("r1"))
    assert nothing_happened(driver.submit(retry_input("r1")))
    assert accepted(driver)[-2:] == [(4, False), (4, True)]


def test_without_what_was_new_a_refused_input_is_left_out_for_good() -> None:
    driver = idle_session()
    driver.say("a bad picture")
    driver.fail(REFUSED)
    decision = driver.submit(retry_input("r1", omit_new=True))
    assert ([item.WhichOneof("item") for item in decision.items], decision.effects) == (["input"], ())
    assert (standing(driver), driver.state.pending) == (("IDLE", ""), 0)
    driver.say("a good word")
    assert driver.sent() == [("user", "do it"), ("assistant", "ready"), ("user", "a good word")]
    assert list(driver.items[-1].turn.changes) == [omitted(4, 13)]


def test_without_what_was_new_a_refused_result_is_replaced_and_answered() -> None:
    driver = session_with_calls("c1")
    driver.report(driver.operation_of("c1"), text="poison")
    driver.fail(REFUSED)
    driver.submit(retry_input("r1", omit_new=True))
    assert driver.sent()[-1] == ("tool_result", f"c1: {OMITTED_RESULT}")
    assert list(driver.items[-1].turn.changes) == [omitted(5, 6, "c1")]
    driver.answer(says("never mind"))
    assert standing(driver) == ("IDLE", "")


def test_without_what_was_new_a_running_call_keeps_its_placeholder_and_its_result_comes() -> None:
    driver = session_with_calls("c1")
    driver.say("a bad picture")
    driver.fail(REFUSED)
    driver.submit(retry_input("r1", omit_new=True))
    assert standing(driver) == ("WAITING_FOR_OPERATIONS", "")
    assert driver.sent()[-1] == ("tool_result", f"c1: {RUNNING_PLACEHOLDER}")
    driver.report(driver.operation_of("c1"), text="of c1")
    assert driver.sent()[-2] == ("tool_result", f"c1: {RUNNING_PLACEHOLDER}")
    assert "of c1" in driver.sent()[-1][1]


def test_without_what_was_new_what_came_later_is_still_delivered() -> None:
    driver = asked_session()
    driver.answer(calls("c1"))
    driver.say("a bad picture")
    driver.say("later", after_turn=True)
    driver.fail(REFUSED)
    driver.submit(retry_input("r1", omit_new=True))
    assert driver.sent()[-1] == ("user", "later")


def test_it_works_after_a_restart() -> None:
    driver = idle_session()
    driver.say("a bad picture")
    driver.fail(REFUSED)
    driver.restart()
    driver.connect(INSTANCE)
    driver.submit(retry_input("r1", omit_new=True))
    driver.restart()
    driver.connect(INSTANCE)
    driver.say("a good word")
    assert driver.sent() == [("user", "do it"), ("assistant", "ready"), ("user", "a good word")]


def test_a_session_whose_workspace_was_not_found_looks_again() -> None:
    driver = CheckedDriver()
    driver.submit(text_input("i1", "do it"))
    driver.report(f"{driver.state.session_uid}-i1", inspection=operation_pb2.InspectWorkspaceState())
    assert standing(driver)[0] == "FAILED"
    driver.submit(retry_input("r1"))
    driver.finish_inspection()
    assert driver.sent() == [("user", "do it")]
