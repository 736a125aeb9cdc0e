"""Reports of terminal states are recorded at once, intermediate ones ride along, stale ones are ignored."""

from __future__ import annotations

from dataclasses import replace

from harness.coordinator.protocol import Acknowledge, BlobSource, InputArrived, OperationReported, ResolveReport
from harness.inbox import blob_ref
from tests.support.histories import CheckedDriver
from tests.support.session_driver import MANAGER, calls, says
from tests.support.session_scenes import (
    AWAITING,
    CANCELED,
    COMPLETED,
    OUTCOME_UNKNOWN,
    abandon_input,
    asked_session,
    nothing_happened,
    results,
    session_with_calls,
    standing,
)
from unreal_agent.operation.v1 import operation_pb2


def stepped(report: OperationReported, steps: int) -> OperationReported:
    operation = operation_pb2.Operation()
    operation.CopyFrom(report.operation)
    operation.step += steps
    return OperationReported(operation=operation)


def test_a_terminal_state_its_final_status_and_the_turn_are_one_commit() -> None:
    driver = session_with_calls("c1")
    operation_id = driver.operation_of("c1")
    decision = driver.report(operation_id)
    assert [item.WhichOneof("item") for item in decision.items] == ["tool_call_status", "turn"]
    assert [one.operation_id for one in decision.operations] == [operation_id]
    assert [type(one).__name__ for one in decision.effects] == ["Acknowledge", "SendRequest"]


def test_a_terminal_state_waits_for_no_turn() -> None:
    driver = session_with_calls("c1", "c2")
    driver.say("more")
    decision = driver.report(driver.operation_of("c1"))
    assert [item.WhichOneof("item") for item in decision.items] == ["tool_call_status"]
    step = driver.operations[driver.operation_of("c1")].step
    assert decision.effects == (Acknowledge(manager_name=MANAGER, operation_id=driver.operation_of("c1"), step=step),)


def test_what_is_recorded_is_what_was_reported() -> None:
    driver = session_with_calls("c1", "c2")
    report = driver.reported(driver.operation_of("c1"), COMPLETED, text="out")
    driver.step(report)
    assert driver.operations[driver.operation_of("c1")] == report.operation


def test_a_report_cannot_change_what_only_the_coordinator_may_say() -> None:
    driver = session_with_calls("c1", "c2")
    report = driver.reported(driver.operation_of("c1"), COMPLETED)
    report.operation.call_id = "c2"
    report.operation.manager_name = "other"
    report.operation.instance_id = "other"
    driver.step(report)
    recorded = driver.operations[driver.operation_of("c1")]
    assert (recorded.call_id, recorded.manager_name, recorded.instance_id) == ("c1", MANAGER, "instance-1")


def test_an_intermediate_state_waits_for_a_commit_and_then_rides_on_it() -> None:
    driver = session_with_calls("c1", "c2")
    first = driver.reported(driver.operation_of("c1"), AWAITING)
    decision = driver.step(first)
    assert (decision.has_commit, decision.wake_s) == (False, driver.monotonic_s + 0.5)
    decision = driver.report(driver.operation_of("c2"))
    assert [one.operation_id for one in decision.operations] == [driver.operation_of("c2"), driver.operation_of("c1")]
    assert decision.operations[1] == first.operation


def test_an_intermediate_state_gets_a_commit_of_its_own_after_a_while() -> None:
    driver = session_with_calls("c1")
    report = driver.reported(driver.operation_of("c1"), AWAITING)
    driver.step(report)
    assert not driver.wait(0.4).has_commit
    decision = driver.wait(0.1)
    assert (decision.items, decision.operations) == ((), (report.operation,))
    assert not driver.wait(10.0).operations


def test_an_intermediate_state_that_is_overtaken_is_not_written() -> None:
    driver = session_with_calls("c1")
    awaiting = driver.reported(driver.operation_of("c1"), AWAITING)
    driver.step(awaiting)
    done = stepped(driver.reported(driver.operation_of("c1"), COMPLETED), 1)
    decision = driver.step(done)
    assert decision.operations == (done.operation,)


def test_an_older_intermediate_state_does_not_replace_a_newer_one() -> None:
    driver = session_with_calls("c1")
    older = driver.reported(driver.operation_of("c1"), AWAITING)
    newer = stepped(older, 3)
    driver.step(newer)
    driver.step(older)
    assert driver.wait(0.6).operations == (newer.operation,)


def test_stale_reports_change_nothing() -> None:
    driver = session_with_calls("c1", "c2")
    stale = OperationReported(operation=driver.operations[driver.operation_of("c1")])
    assert nothing_happened(driver.step(stale))
    assert nothing_happened(driver.step(stepped(stale, -1)))


def test_a_repeated_terminal_report_is_acknowledged_and_counts_once() -> None:
    driver = session_with_calls("c1")
    report = driver.reported(driver.operation_of("c1"), COMPLETED)
    decision = driver.step(report, report)
    assert len(decision.operations) == 1
    step = report.operation.step
    once = Acknowledge(manager_name=MANAGER, operation_id=driver.operation_of("c1"), step=step)
    assert decision.effects[:2] == (once, once)
    assert driver.state.available == 2


def test_a_report_of_a_settled_operation_is_looked_up() -> None:
    driver = session_with_calls("c1")
    report = driver.reported(driver.operation_of("c1"), COMPLETED)
    driver.step(report)
    assert driver.step(report).effects == (ResolveReport(operation=report.operation),)


def test_a_report_that_loses_against_an_abandonment_is_discarded() -> None:
    driver = session_with_calls("c1", "c2")
    operation_id = driver.operation_of("c1")
    step = driver.operations[operation_id].step
    report = driver.reported(operation_id, COMPLETED)
    decision = driver.step(InputArrived(ticket=9, message=abandon_input("x1", operation_id)), report)
    discarded = Acknowledge(manager_name=MANAGER, operation_id=operation_id, step=step, is_discarded=True)
    assert decision.effects == (discarded, replace(discarded, step=step + 1))
    assert decision.operations[0].status == OUTCOME_UNKNOWN


def test_a_tombstone_keeps_what_is_known() -> None:
    driver = session_with_calls("c1", "c2")
    operation_id = driver.operation_of("c1")
    known = driver.operations[operation_id]
    tombstone = operation_pb2.Operation(
        operation_id=operation_id, status=CANCELED, step=known.step + 3, error=operation_pb2.OperationError(reason="X")
    )
    driver.step(OperationReported(operation=tombstone))
    expected = operation_pb2.Operation()
    expected.CopyFrom(known)
    expected.status, expected.step, expected.error.reason = CANCELED, known.step + 3, "X"
    assert driver.operations[operation_id] == expected


def picture_session() -> CheckedDriver:
    driver = asked_session()
    driver.answer(calls("p1", "ViewImage", '{"path": "a.png"}'))
    return driver


def test_an_image_that_came_with_its_report_goes_into_the_commit() -> None:
    driver = picture_session()
    blob = blob_ref(b"PNG", "image/png")
    report = driver.reported(driver.operation_of("p1"), COMPLETED)
    report.operation.view_image.image.CopyFrom(blob)
    decision = driver.step(OperationReported(operation=report.operation, attachments={blob.digest: b"PNG"}))
    recorded = driver.operations[driver.operation_of("p1")]
    assert decision.blobs == (BlobSource(blob=blob, data=b"PNG", operation=recorded),)


def test_an_image_that_did_not_come_is_fetched_before_the_commit() -> None:
    driver = picture_session()
    blob = blob_ref(b"PNG", "image/png")
    report = driver.reported(driver.operation_of("p1"), COMPLETED)
    report.operation.view_image.image.CopyFrom(blob)
    (source,) = driver.step(report).blobs
    assert (source.data, source.operation) == (None, driver.operations[driver.operation_of("p1")])


def test_a_call_ends_only_when_its_operation_has() -> None:
    driver = session_with_calls("c1")
    driver.report(driver.operation_of("c1"), AWAITING)
    driver.wait(1.1)
    assert results(driver) == {}
    driver.report(driver.operation_of("c1"))
    assert results(driver) == {"c1": ("COMPLETED", "done")}
    driver.answer(says("done"))
    assert standing(driver) == ("IDLE", "")


def test_a_report_of_another_operation_of_the_same_name_is_not_taken_for_its_own() -> None:
    """An older copy of the store comes to names that its manager has given away."""
    driver = session_with_calls("c1")
    operation_id = driver.operation_of("c1")
    report = driver.reported(operation_id, COMPLETED, text="another's")
    report.operation.create_time.FromSeconds(1)
    decision = driver.step(report)
    assert driver.operations[operation_id].status == operation_pb2.OPERATION_STATUS_FAILED
    assert driver.operations[operation_id].error.reason == "NAME_TAKEN"
    assert "another's" not in str(decision.items)
    acknowledged = decision.effects[0]
    assert isinstance(acknowledged, Acknowledge)
    assert acknowledged.is_discarded
