"""Settings change from the next turn on; they wake nobody and interrupt nothing."""

from __future__ import annotations

from harness.coordinator.state import initial_state
from tests.support.session_driver import calls, says, session
from tests.support.session_scenes import (
    accepted,
    asked_session,
    idle_session,
    nothing_happened,
    results,
    session_with_calls,
    settings_input,
    standing,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2


def changed(**changes: str) -> session_pb2.SessionSettings:
    settings = session_pb2.SessionSettings()
    settings.CopyFrom(session().initial_settings)
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings


def test_they_neither_wake_nor_interrupt() -> None:
    driver = asked_session()
    decision = driver.submit(settings_input("s1", model="m2"))
    assert (driver.kinds()[-1], decision.effects) == ("input", ())
    driver.answer(says("done"))
    decision = driver.submit(settings_input("s2", model="m3"))
    assert (decision.effects, standing(driver)) == ((), ("IDLE", ""))


def test_the_next_turn_uses_them() -> None:
    driver = asked_session()
    driver.submit(settings_input("s1", provider="openai", model="m2", effort="high"))
    driver.answer(says("done"))
    driver.say("again")
    turn = driver.items[-1].turn
    assert (turn.provider, turn.model, turn.effort) == ("openai", "m2", "high")
    assert driver.state.settings == changed(provider="openai", model="m2", effort="high")


def test_what_is_unset_stays_and_the_last_change_counts() -> None:
    driver = idle_session()
    driver.submit(settings_input("s1", model="m2", effort="low"))
    driver.submit(settings_input("s2", model="m3"))
    assert driver.state.settings == changed(model="m3", effort="low")


def test_they_are_deduplicated() -> None:
    driver = idle_session()
    driver.submit(settings_input("s1", model="m2"))
    driver.submit(settings_input("s2", model="m3"))
    assert nothing_happened(driver.submit(settings_input("s1", model="m2")))
    assert accepted(driver)[-3:] == [(4, False), (5, False), (4, True)]
    assert driver.state.settings.model == "m3"


def test_another_model_and_effort_keep_the_prompt() -> None:
    driver = idle_session()
    before = driver.state.prompt
    driver.submit(settings_input("s1", model="m2", effort="low"))
    driver.say("go on")
    assert driver.items[-1].turn.prompt == before
    assert list(driver.items[-1].turn.changes) == []


def test_another_system_prompt_is_a_recorded_break_and_keeps_the_conversation() -> None:
    driver = idle_session()
    before = driver.state.prompt
    driver.submit(settings_input("s1", system_prompt="be brief"))
    driver.say("go on")
    turn = driver.items[-1].turn
    assert turn.prompt != before
    assert list(turn.changes) == [
        item_pb2.ContextChange(
            kind=item_pb2.CONTEXT_CHANGE_KIND_PREFIX_BREAK, reason="the prompt changed with the settings"
        )
    ]
    assert driver.sent() == [("user", "do it"), ("assistant", "ready"), ("user", "go on")]
    assert driver.dispatched() == [f"{driver.state.session_uid}-i1"], "the workspace is known already"


def test_the_same_prompt_again_is_no_break() -> None:
    driver = idle_session()
    driver.submit(settings_input("s1", system_prompt=""))
    driver.say("go on")
    assert list(driver.items[-1].turn.changes) == []


def test_a_prompt_is_written_once_and_named_by_each_turn() -> None:
    driver = idle_session()
    written = [source.blob for decision in driver.commits for source in decision.blobs]
    driver.say("go on")
    driver.answer(says("done"))
    assert [item.turn.prompt for item in driver.items if item.HasField("turn")] == written * 2


def test_tools_that_are_not_enabled_are_unknown() -> None:
    driver = idle_session()
    driver.submit(settings_input("s1", enabled_tools=session_pb2.ToolSelection(names=["ViewImage"])))
    driver.say("go on")
    driver.answer(calls("c1"))
    outcome, text = results(driver)["c1"]
    assert outcome == "REJECTED"
    assert "Available tools: ViewImage." in text


def test_a_call_of_a_turn_that_was_offered_the_tool_is_run() -> None:
    driver = asked_session()
    driver.submit(settings_input("s1", enabled_tools=session_pb2.ToolSelection(names=["ViewImage"])))
    driver.answer(calls("c1"))
    assert results(driver) == {}
    assert driver.dispatched()[-1] == driver.operation_of("c1")


def test_limits_are_replaced_as_a_whole() -> None:
    driver = idle_session(limits=session_pb2.SessionLimits(max_turns=5, max_tokens=7))
    driver.submit(settings_input("s1", limits=session_pb2.SessionLimits(max_turns=9)))
    assert driver.state.settings.limits == session_pb2.SessionLimits(max_turns=9)


def test_reasoning_is_left_out_whole_after_a_change_of_model() -> None:
    driver = asked_session()
    reasoning = llm_pb2.OutputItem(reasoning=llm_pb2.Reasoning(raw_json='{"a": 1}', wire_format="scripted"))
    driver.answer(reasoning, says("hm"))
    driver.submit(settings_input("s1", model="m2"))
    driver.say("go on")
    assert list(driver.items[-1].turn.changes) == [
        item_pb2.ContextChange(
            kind=item_pb2.CONTEXT_CHANGE_KIND_PREFIX_BREAK, reason="reasoning left out after the change of model to m2"
        )
    ]
    assert list(driver.state.context.submitted.entries[1].entry.assistant.items) == [says("hm")]


def test_replay_gives_the_settings_that_were_changed() -> None:
    driver = session_with_calls("c1")
    driver.submit(settings_input("s1", model="m2", system_prompt="be brief"))
    driver.restart()
    assert driver.state.settings == changed(model="m2", system_prompt="be brief")
    assert initial_state(driver.record).settings == changed()


def test_they_do_not_revive_a_failed_session() -> None:
    driver = asked_session()
    driver.fail(llm_pb2.ERROR_CLASS_QUOTA)
    decision = driver.submit(settings_input("s1", model="m2"))
    assert (decision.effects, standing(driver)[0]) == ((), "FAILED")
