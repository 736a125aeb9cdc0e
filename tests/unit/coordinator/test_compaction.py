"""A conversation that outgrows the model's window is summarised, and nothing of it is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.context_builder import rebased
from harness.context_builder.compaction import INSTRUCTION, request_entries
from harness.coordinator import CoordinatorConfig
from harness.coordinator.protocol import CancelRequest, SendRequest
from tests.support.histories import CheckedDriver, fork_of
from tests.support.session_driver import INSTANCE, calls, control_input, says, stop_input
from tests.support.session_scenes import CANCELED, HARD, nothing_happened, refusals, retry_input, standing
from tests.support.small_windows import (
    COMPACTION,
    answered_session,
    compaction_session,
    compactions,
    is_compacting,
    small_session,
    tool_round,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

OVERFLOW = llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW


def shown(driver: CheckedDriver) -> list[str]:
    """Return the texts of the conversation that was sent last."""
    return [text for _, text in driver.sent()]


def asked_for_summary(driver: CheckedDriver) -> list[llm_pb2.ContextEntry]:
    """Return the conversation of the compaction turn in flight."""
    turn = driver.state.latest_turn
    assert turn is not None
    base = rebased(driver.state.context, provider=turn.provider, model=turn.model, prompt_digest=turn.prompt.digest)
    return [one.entry for one in request_entries(base.entries, turn.changes)]


def test_an_overflow_is_answered_by_a_summary_and_then_the_same_question() -> None:
    driver = answered_session()
    driver.say("the newest question")
    decision = driver.fail_with_overflow()
    assert [item.WhichOneof("item") for item in decision.items] == ["turn_failure", "turn"]
    decision = driver.answer(says("they asked three questions"))
    kinds = [item.WhichOneof("item") for item in decision.items]
    assert kinds == ["model_response", "compaction", "turn"]
    (summary, question) = shown(driver)
    assert "they asked three questions" in summary
    assert question == "the newest question"
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_it_asks_with_what_was_sent_before_and_one_instruction() -> None:
    driver = answered_session()
    before = [placed.entry for placed in driver.state.context.submitted.entries]
    driver.say("the newest question")
    driver.fail_with_overflow()
    entries = asked_for_summary(driver)
    assert entries[:-1] == before, "the provider's cache holds what was sent before"
    assert entries[-1].user.parts[0].text.text == INSTRUCTION


def test_room_is_made_before_the_window_is_full() -> None:
    driver = small_session(16_000)
    for number in range(12):
        driver.say(f"question {number} " + "q" * 4_000)
        if is_compacting(driver):
            break
        driver.answer(says(f"answer {number} " + "a" * 4_000))
    assert is_compacting(driver)
    sizes = [item.turn.totals.estimated_tokens for item in driver.items if item.HasField("turn")]
    assert max(sizes) <= 0.8 * 16_000
    driver.answer(says("short"))
    assert driver.items[-1].turn.totals.estimated_tokens < 6_000


def test_where_room_is_made_can_be_configured() -> None:
    def turns_until_compaction(threshold: float) -> int:
        driver = small_session(16_000, config=CoordinatorConfig(compaction_threshold=threshold))
        for number in range(30):
            driver.say(f"question {number} " + "q" * 2_000)
            if is_compacting(driver):
                return number
            driver.answer(says("a" * 2_000))
        raise AssertionError("no summary was asked for")

    assert turns_until_compaction(0.3) < turns_until_compaction(0.6)


def test_the_latest_turns_stay_as_they_are() -> None:
    driver = small_session(64_000)
    number = 0
    while not is_compacting(driver):
        driver.say(f"question {number} " + "q" * 2_000)
        if not is_compacting(driver):
            driver.answer(says(f"answer {number} " + "a" * 6_000))
            number += 1
    driver.answer(says("short"))
    texts = shown(driver)
    assert "[Summary" in texts[0]
    # A tenth of the window: 6,400 tokens, three turns of 2,000.
    assert [text.split(" ")[0] for text in texts[1:]] == ["question", "answer"] * 3 + ["question"]
    assert texts[-2].startswith(f"answer {number - 1} ")


def test_an_undelivered_input_stays_as_it_is() -> None:
    driver = compaction_session()
    driver.say("while it is summarised")
    driver.say("and this", after_turn=True)
    assert is_compacting(driver), "an input does not cancel a request for a summary"
    driver.answer(says("a summary"))
    assert shown(driver)[1:] == ["the newest question", "while it is summarised", "and this"]
    driver.answer(says("done"))
    assert (standing(driver), driver.state.pending) == (("IDLE", ""), 0)


def test_an_input_during_it_has_no_effect_but_its_record() -> None:
    driver = compaction_session()
    decision = driver.say("while it is summarised")
    assert ([item.WhichOneof("item") for item in decision.items], decision.effects) == (["input"], ())


def test_a_hard_stop_cancels_it() -> None:
    driver = compaction_session()
    turn_id = driver.volatile.request_turn_id
    decision = driver.submit(stop_input("stop", HARD))
    assert decision.effects == (CancelRequest(turn_id=turn_id),)
    assert standing(driver)[0] == "STOPPED"
    driver.say("go on")
    assert is_compacting(driver), "there is still no room"
    driver.answer(says("a summary"))
    assert shown(driver)[1:] == ["the newest question", "go on"]


def test_a_call_that_still_runs_is_listed_and_its_result_comes_late() -> None:
    driver = small_session()
    driver.say("begin")
    command = "sleep 1000; " + "x" * 1_000
    driver.answer(calls("c-runs", arguments=f'{{"command": "{command}"}}'), calls("c-done"))
    driver.report(driver.operation_of("c-done"))
    driver.say("how is it?")
    driver.answer(says("it runs"))
    driver.say("and now?")
    driver.fail_with_overflow()
    driver.answer(says("a command was begun"))
    summary = shown(driver)[0]
    listed = summary.splitlines()[-1]
    assert listed.startswith('- call ID c-runs, tool Bash, arguments: {"command": "sleep 1000; xxx')
    assert len(listed.partition("arguments: ")[2]) == 500
    assert "c-done" not in summary
    driver.answer(says("waiting"))
    driver.report(driver.operation_of("c-runs"), text="it went well")
    (late,) = [text for text in shown(driver) if "it went well" in text]
    assert 'call_id="c-runs"' in late
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_a_result_that_comes_during_it_follows_as_a_late_result() -> None:
    driver = small_session()
    driver.say("begin")
    driver.answer(calls("c1"))
    driver.say("how is it?")
    driver.answer(says("it runs"))
    driver.say("and now?")
    driver.fail_with_overflow()
    driver.report(driver.operation_of("c1"), text="out")
    assert is_compacting(driver)
    driver.answer(says("a summary"))
    texts = shown(driver)
    assert "call ID c1" in texts[0]
    assert texts[1] == "and now?"
    assert "out" in texts[2]
    assert sum('call_id="c1"' in text for text in texts) == 1


def test_calls_and_their_results_are_never_parted() -> None:
    driver = small_session()
    driver.say("begin")
    for number in range(4):
        tool_round(driver, f"c{number}", f"result {number} " + "r" * 1_000)
    driver.fail_with_overflow()
    driver.answer(says("a summary"))
    # The latest response's result was not answered yet: both stay.
    texts = shown(driver)
    assert texts[-2:] == ["c3", f"c3: result 3 {'r' * 1_000}"]
    assert "begin" in texts, "the user's newest words stay"
    assert len(texts) == 4


def test_the_users_newest_words_stay_and_large_ones_do_not() -> None:
    for chars, stays in ((100, True), (20_000, False)):
        driver = small_session(32_000)
        driver.say("b" * chars)
        for number in range(3):
            tool_round(driver, f"c{number}", "out")
        driver.fail_with_overflow()
        driver.answer(says("a summary"))
        assert ("b" * chars in shown(driver)) is stays
        assert (compactions(driver)[0].kept_input_sequence == 1) is stays


def test_a_second_summary_replaces_the_first() -> None:
    driver = compaction_session()
    driver.answer(says("first summary"))
    driver.answer(says("an answer"))
    driver.say("more")
    driver.fail_with_overflow()
    driver.answer(says("second summary"))
    texts = shown(driver)
    assert ["summary" in text for text in texts].count(True) == 1
    assert "second summary" in texts[0]
    assert texts[-1] == "more"


def test_two_failures_in_a_row_fail_the_session_with_the_reason() -> None:
    driver = compaction_session()
    decision = driver.fail(llm_pb2.ERROR_CLASS_INVALID_REQUEST)
    assert [item.WhichOneof("item") for item in decision.items] == ["turn_failure", "turn"]
    assert is_compacting(driver)
    driver.fail(llm_pb2.ERROR_CLASS_INVALID_REQUEST)
    state, reason = standing(driver)
    assert state == "FAILED"
    assert reason.startswith("CONTEXT_OVERFLOW: the conversation does not fit the model's window")
    assert nothing_happened(driver.wait(10_000))


@pytest.mark.parametrize(
    "stop_reason", [llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS, llm_pb2.STOP_REASON_REFUSED, llm_pb2.STOP_REASON_COMPLETE]
)
def test_an_answer_that_is_no_summary_is_a_failure_and_counted(stop_reason: llm_pb2.StopReason.ValueType) -> None:
    driver = compaction_session()
    used = driver.state.usage.output_tokens
    for _ in range(2):
        assert is_compacting(driver)
        driver.answer(says("half a summ" if stop_reason != llm_pb2.STOP_REASON_COMPLETE else "  "), stop=stop_reason)
    assert standing(driver)[1].startswith("CONTEXT_OVERFLOW")
    assert driver.state.usage.output_tokens == used + 10, "what it cost counts"


def test_a_failed_session_is_not_dead() -> None:
    driver = compaction_session()
    for _ in range(2):
        driver.fail(llm_pb2.ERROR_CLASS_INVALID_REQUEST)
    driver.submit(retry_input("r1"))
    driver.fail_with_overflow()
    assert is_compacting(driver)
    driver.answer(says("a summary"))
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_a_second_attempt_shows_less() -> None:
    driver = small_session(64_000)
    driver.say("begin")
    for number in range(3):
        tool_round(driver, f"c{number}", "r" * 5_000)
    driver.fail_with_overflow()
    first = sum(len(entry.SerializeToString()) for entry in asked_for_summary(driver))
    driver.fail_with_overflow()
    second = sum(len(entry.SerializeToString()) for entry in asked_for_summary(driver))
    assert second < first / 2
    driver.answer(says("a summary"))
    assert "a summary" in shown(driver)[0]


def test_a_provider_that_asks_to_wait_is_waited_for_and_it_is_no_failure() -> None:
    driver = compaction_session()
    for _ in range(3):
        driver.fail(llm_pb2.ERROR_CLASS_RATE_LIMIT)
        assert standing(driver)[0] == "WAITING_FOR_PROVIDER"
        driver.wait(600)
        assert is_compacting(driver)
    driver.answer(says("a summary"))
    assert shown(driver)[-1] == "the newest question"


def test_a_wrong_key_is_told_as_such() -> None:
    driver = compaction_session()
    driver.fail(llm_pb2.ERROR_CLASS_AUTHENTICATION)
    assert standing(driver) == ("FAILED", "AUTHENTICATION: it failed")


def test_a_request_that_is_too_large_for_what_a_summary_leaves_fails_clearly() -> None:
    driver = compaction_session()
    driver.answer(says("a summary"))
    decision = driver.fail_with_overflow()
    assert [one for one in decision.effects if isinstance(one, SendRequest)] == [], "it is not sent again unchanged"
    assert standing(driver) == ("FAILED", "CONTEXT_OVERFLOW: it failed")


def test_with_nothing_to_summarise_an_overflow_is_a_failure() -> None:
    driver = small_session()
    driver.say("q" * 1_000)
    driver.fail_with_overflow()
    assert standing(driver) == ("FAILED", "CONTEXT_OVERFLOW: it failed")


@pytest.mark.parametrize("was_taken_over", [False, True])
def test_a_crash_in_the_middle_asks_for_the_same_summary_again(was_taken_over: bool) -> None:
    driver = compaction_session()
    before = asked_for_summary(driver)
    driver.restart(was_taken_over=was_taken_over)
    driver.connect(INSTANCE)
    assert is_compacting(driver)
    assert asked_for_summary(driver) == before
    driver.answer(says("a summary"))
    driver.restart(was_taken_over=was_taken_over)
    driver.connect(INSTANCE)
    assert shown(driver)[1:] == ["the newest question"]
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_a_proactive_one_survives_a_crash_too() -> None:
    driver = small_session(16_000)
    while not is_compacting(driver):
        driver.say("q" * 4_000)
        if not is_compacting(driver):
            driver.answer(says("a" * 4_000))
    driver.restart(was_taken_over=True)
    driver.connect(INSTANCE)
    assert is_compacting(driver)
    driver.answer(says("a summary"))
    assert shown(driver)[-1] == "q" * 4_000


def test_somebody_may_ask_for_one_while_the_session_rests() -> None:
    driver = answered_session()
    driver.submit(control_input("c1", item_pb2.Control(compact=item_pb2.Compact(reason="tidy up"))))
    assert is_compacting(driver)
    driver.answer(says("a summary"))
    assert standing(driver) == ("IDLE", "")
    driver.say("and?")
    assert len(shown(driver)) == 3, "the summary, the user's words before it, and the new ones"


def test_asking_for_one_is_refused_where_there_is_nothing_to_summarise() -> None:
    driver = small_session()
    driver.submit(control_input("c1", item_pb2.Control(compact=item_pb2.Compact())))
    assert refusals(driver) == ["NOTHING_TO_COMPACT"]


def test_a_summary_delivers_nothing_and_runs_no_call() -> None:
    driver = compaction_session()
    pending = driver.state.pending
    decision = driver.answer(says("a summary"), calls("c1"))
    assert (decision.operations, dict(driver.state.calls), driver.state.pending) == ((), {}, pending)


@pytest.mark.parametrize("character", ["s", "\N{GRINNING FACE}"])
def test_a_summary_that_is_none_is_cut(character: str) -> None:
    driver = compaction_session()
    driver.answer(says(character * 60_000))
    assert "[... the summary was cut here ...]" in shown(driver)[0]
    assert driver.items[-1].turn.totals.estimated_tokens < 16_000 / 2


def test_what_it_uses_counts_towards_the_limits() -> None:
    driver = compaction_session()
    used = driver.state.usage.output_tokens
    driver.answer(says("a summary"))
    assert driver.state.usage.output_tokens == used + 5


def test_running_operations_go_on_during_it_and_a_stop_ends_them() -> None:
    driver = small_session()
    driver.say("begin")
    driver.answer(calls("c1"))
    driver.say("how is it?")
    driver.answer(says("it runs"))
    driver.say("and now?")
    driver.fail_with_overflow()
    driver.submit(stop_input("stop", HARD))
    assert standing(driver)[0] == "STOPPING"
    driver.report(driver.operation_of("c1"), CANCELED)
    assert standing(driver)[0] == "STOPPED"


def test_a_smaller_model_is_given_a_summary_first() -> None:
    driver = answered_session(6, window=200_000, chars=8_000)
    driver.environment = replace(driver.environment, window_tokens=lambda _: 8_000)
    driver.say("now you")
    assert is_compacting(driver)
    turn = driver.state.latest_turn
    assert turn is not None
    assert turn.kind == COMPACTION
    assert turn.totals.estimated_tokens <= 8_000
    assert any(change.kind == item_pb2.CONTEXT_CHANGE_KIND_OMITTED for change in turn.changes)
    driver.answer(says("a summary"))
    assert shown(driver)[-1] == "now you"


def compacted_session() -> CheckedDriver:
    driver = compaction_session()
    driver.answer(says("a summary"))
    driver.answer(says("an answer to it"))
    return driver


def test_a_fork_behind_a_summary_goes_on_with_it() -> None:
    child = fork_of(compacted_session())
    child.say("elsewhere")
    texts = [text for _, text in child.sent()]
    assert "a summary" in texts[0]
    assert texts[1:] == ["the newest question", "an answer to it", "elsewhere"]


@pytest.mark.parametrize("behind", ["turn", "model_response"])
def test_a_fork_in_the_midst_of_one_has_the_whole_conversation(behind: str) -> None:
    driver = compacted_session()
    (compacted_at,) = [item.sequence for item in driver.items if item.HasField("compaction")]
    cut = compacted_at - (2 if behind == "turn" else 1)
    assert driver.items[cut - 1].WhichOneof("item") == behind
    child = fork_of(driver, cut_sequence=cut)
    child.say("elsewhere")
    texts = [text for _, text in child.sent()]
    assert [text.split(" ")[0] for text in texts] == ["question", "answer"] * 3 + ["the", "elsewhere"]
    child.answer(says("done"))
    assert standing(child)[0] == "IDLE"
