"""Old tool output and images make room before anything is summarised, by rule and on record."""

from __future__ import annotations

from harness.context_builder.pruning import KEPT_IMAGES, MAX_IMAGES
from harness.tools.presentation import LATE_RESULT_TAG
from tests.support.histories import CheckedDriver
from tests.support.session_driver import calls, says
from tests.support.session_scenes import COMPLETED
from tests.support.small_windows import compactions, is_compacting, small_session, tool_round
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

PRUNED = item_pb2.CONTEXT_CHANGE_KIND_PRUNED
PREFIX_BREAK = item_pb2.CONTEXT_CHANGE_KIND_PREFIX_BREAK


def turns(driver: CheckedDriver) -> list[item_pb2.Turn]:
    return [item.turn for item in driver.items if item.HasField("turn")]


def pruning_turn(driver: CheckedDriver) -> item_pb2.Turn:
    (turn,) = [one for one in turns(driver) if any(change.kind == PRUNED for change in one.changes)]
    return turn


def session_with_old_output(rounds: int = 7) -> CheckedDriver:
    driver = small_session(16_000)
    driver.say("begin")
    for number in range(rounds):
        tool_round(driver, f"c{number}", f"head {number} " + "r" * 7_900 + f" tail {number}")
    return driver


def test_old_output_is_shown_by_its_ends() -> None:
    driver = session_with_old_output()
    texts = [text for role, text in driver.sent() if role == "tool_result"]
    first, latest = texts[0], texts[-1]
    assert first.startswith("c0: head 0 rrr")
    assert first.endswith("rrr tail 0")
    assert "bytes of this old output were left out to make room" in first
    assert len(first) < 1_200
    assert len(latest) > 7_900
    assert not compactions(driver)


def test_it_is_recorded_with_the_turn_and_its_reason() -> None:
    turn = pruning_turn(session_with_old_output())
    pruned = [change for change in turn.changes if change.kind == PRUNED]
    assert [change.call_id for change in pruned] == [f"c{number}" for number in range(len(pruned))]
    assert all(change.omitted_bytes > 6_000 and "outgrown its room" in change.reason for change in pruned)
    assert [change.reason for change in turn.changes if change.kind == PREFIX_BREAK] == [
        "old tool output or images were pruned"
    ]


def test_afterwards_the_prefix_stays_put_again() -> None:
    driver = session_with_old_output()
    at = turns(driver).index(pruning_turn(driver))
    tool_round(driver, "more", "short")
    assert not any(turn.changes for turn in turns(driver)[at + 1 :])


def test_another_process_and_a_replay_show_the_same() -> None:
    driver = session_with_old_output()
    sent = driver.sent()
    driver.restart()
    assert driver.sent() == sent


def test_what_the_user_and_the_model_said_is_never_pruned() -> None:
    driver = small_session(32_000)
    driver.say("u" * 4_000)
    driver.answer(says("m" * 4_000), calls("c0"))
    driver.report(driver.operation_of("c0"), text="r" * 15_000)
    for number in range(1, 8):
        tool_round(driver, f"c{number}", "r" * 15_000)
        assert ("user", "u" * 4_000) in driver.sent()
        assert any(text.startswith("m" * 4_000) for _, text in driver.sent())
    pruning_turn(driver)


def test_a_late_result_keeps_its_fence() -> None:
    driver = small_session(16_000)
    driver.say("begin")
    driver.answer(calls("slow"))
    driver.say("go on meanwhile")
    driver.answer(says("I do"))
    driver.report(driver.operation_of("slow"), text="s" * 7_900)
    driver.answer(calls("c0"))
    driver.report(driver.operation_of("c0"), text="r" * 7_900)
    for number in range(1, 6):
        tool_round(driver, f"c{number}", "r" * 7_900)
    (late,) = [text for role, text in driver.sent() if role == "user" and LATE_RESULT_TAG in text]
    assert len(late) < 1_500
    assert late.startswith(f"<{LATE_RESULT_TAG} tool=")
    assert late.splitlines()[-1].startswith(f"</{LATE_RESULT_TAG} mark=")
    pruning_turn(driver)


def test_a_summary_is_made_once_pruning_gives_too_little() -> None:
    driver = small_session(16_000)
    driver.say("begin")
    for number in range(40):
        if is_compacting(driver):
            break
        tool_round(driver, f"c{number}", f"{number}" + "r" * 7_900)
    assert is_compacting(driver)
    assert any(change.kind == PRUNED for turn in turns(driver) for change in turn.changes)


def test_results_that_do_not_fit_together_are_shortened_before_they_are_sent() -> None:
    driver = small_session(16_000)
    for number in range(6):
        driver.say(f"begin {number}")
        driver.answer(calls(f"c{number}"))
    driver.say("what else?")
    driver.answer(says("I wait"))
    # Each call that was shown as running brings a quarter of the window, all of them at once.
    driver.step(
        *(driver.reported(driver.operation_of(f"c{number}"), COMPLETED, text="r" * 50_000) for number in range(6))
    )
    while is_compacting(driver):
        driver.answer(says("a summary"))
    assert driver.volatile.request_turn_id
    assert sum("rrr" in text for _, text in driver.sent()) == 6
    assert max(turn.totals.estimated_tokens for turn in turns(driver)) <= 0.8 * 16_000
    pruning_turn(driver)


def image_input(number: int, *, width: int = 100) -> item_pb2.Input:
    blob = llm_pb2.BlobRef(digest=f"{number:064x}", size_bytes=3, media_type="image/png")
    image = llm_pb2.ImagePart(blob=blob, media_type="image/png", width=width, height=width)
    words = llm_pb2.ContentPart(text=llm_pb2.TextPart(text=f"picture {number}"))
    content = item_pb2.Content(parts=[words, llm_pb2.ContentPart(image=image)])
    return item_pb2.Input(
        schema_version=1,
        input_id=f"picture-{number}",
        kind=item_pb2.INPUT_KIND_EXTERNAL,
        delivery=item_pb2.DELIVERY_INTERRUPT,
        content=content,
    )


def images_sent(driver: CheckedDriver) -> int:
    return sum(one.totals.images for one in driver.state.context.submitted.entries)


def test_no_request_holds_more_images_than_providers_take() -> None:
    driver = small_session(0)
    most = 0
    for number in range(MAX_IMAGES + 5):
        driver.submit(image_input(number))
        driver.finish_inspection()
        most = max(most, images_sent(driver))
        driver.answer(says("a nice picture"))
    assert most == MAX_IMAGES
    assert images_sent(driver) == KEPT_IMAGES + 4
    assert [text for role, text in driver.sent() if role == "user"][0] == (
        "picture 0[An image stood here; it was left out to make room.]"
    )


def test_a_large_image_counts_for_more_than_a_small_one() -> None:
    sizes = []
    for width in (100, 1_000, 2_000):
        driver = small_session(0)
        driver.submit(image_input(1, width=width))
        driver.finish_inspection()
        sizes.append(driver.items[-1].turn.totals.estimated_tokens)
    assert sizes[0] < sizes[1] < sizes[2] < sizes[0] + 3_000


def test_a_summary_is_asked_for_without_images_where_they_do_not_fit() -> None:
    driver = small_session(16_000)
    for number in range(4):
        driver.submit(image_input(number, width=1_200))
        driver.finish_inspection()
        driver.answer(says("a nice picture"))
    driver.say("and now?")
    driver.fail_with_overflow()
    driver.fail_with_overflow()
    turn = driver.state.latest_turn
    assert turn is not None
    assert [change.source_sequence for change in turn.changes if change.kind == PRUNED] != []
    assert turn.totals.images == 0
