"""A final status holds the rendered result, cut to its share of the model's window, long texts as blobs."""

from __future__ import annotations

from dataclasses import replace

from harness.context_builder.entries import BYTES_PER_TOKEN
from harness.inbox import blob_ref
from tests.support.histories import CheckedDriver
from tests.support.session_driver import calls, says
from tests.support.session_scenes import asked_session, results, session_with_calls
from unreal_agent.session.v1 import item_pb2


def small_window_session(window_tokens: int, *call_ids: str) -> CheckedDriver:
    driver = asked_session()
    driver.environment = replace(driver.environment, window_tokens=lambda model: window_tokens if model == "m1" else 0)
    driver.answer(*(calls(call_id) for call_id in call_ids))
    return driver


def status(driver: CheckedDriver, call_id: str) -> item_pb2.ToolCallStatus:
    (found,) = (
        item.tool_call_status
        for item in driver.items
        if item.tool_call_status.call_id == call_id and item.tool_call_status.HasField("result")
    )
    return found


def test_a_final_status_names_the_operations_and_holds_what_the_model_is_shown() -> None:
    driver = session_with_calls("c1", "c2")
    driver.report(driver.operation_of("c1"), text="out")
    found = status(driver, "c1")
    assert (found.turn_id, list(found.operation_ids)) == (
        driver.items[1].turn.turn_id,
        [driver.operation_of("c1")],
    )
    assert results(driver) == {"c1": ("COMPLETED", "out")}
    assert list(driver.state.context.results[0].entry.tool_result.parts) == list(found.result.parts)


def test_a_result_is_cut_to_a_quarter_of_the_window_and_the_cut_is_recorded() -> None:
    window_tokens = 4_000
    driver = small_window_session(window_tokens, "c1")
    driver.report(driver.operation_of("c1"), text="x" * 100_000)
    found = status(driver, "c1").result
    shown = "".join(part.text.text for part in found.parts)
    assert len(shown) <= window_tokens * BYTES_PER_TOKEN // 4
    assert found.truncation.reason == "larger than a result's share of the model's window"
    assert found.truncation.omitted_bytes > 0
    assert list(driver.items[-1].turn.changes) == [
        item_pb2.ContextChange(
            kind=item_pb2.CONTEXT_CHANGE_KIND_TRUNCATED,
            source_sequence=driver.items[-2].sequence,
            call_id="c1",
            reason=found.truncation.reason,
            omitted_bytes=found.truncation.omitted_bytes,
        )
    ]


def test_all_results_of_a_response_share_half_of_the_window() -> None:
    window_tokens = 4_000
    driver = small_window_session(window_tokens, *(f"c{number}" for number in range(8)))
    for number in range(8):
        driver.report(driver.operation_of(f"c{number}"), text="x" * 100_000)
    lengths = [len(text) for _, text in results(driver).values()]
    assert sum(lengths) <= window_tokens * BYTES_PER_TOKEN // 2
    assert len(set(lengths)) == 1


def test_a_result_that_fits_is_not_cut() -> None:
    driver = small_window_session(4_000, "c1")
    driver.report(driver.operation_of("c1"), text="x" * 3_000)
    assert results(driver)["c1"] == ("COMPLETED", "x" * 3_000)
    assert not status(driver, "c1").result.HasField("truncation")
    assert list(driver.items[-1].turn.changes) == []


def test_a_long_result_is_a_blob_of_the_commit() -> None:
    driver = session_with_calls("c1")
    text = "x" * 70_000
    decision = driver.report(driver.operation_of("c1"), text=text)
    blob = blob_ref(text.encode(), "text/plain; charset=utf-8")
    (source,) = decision.blobs
    assert (source.blob, source.data) == (blob, text.encode())
    assert status(driver, "c1").result.parts[0].text.blob == blob


def test_it_is_never_made_again() -> None:
    driver = session_with_calls("c1")
    driver.report(driver.operation_of("c1"), text="out")
    before = status(driver, "c1")
    driver.environment = replace(driver.environment, window_tokens=lambda _: 1)
    driver.answer(says("done"))
    driver.restart()
    assert status(driver, "c1") == before
    assert ("tool_result", "c1: out") in driver.sent()
