"""The types whose work is one computation: one course for all, and what each makes of its result."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from harness.operations.operations import Step
from harness.operations.registry import Machine
from harness.operations.types.inspect_workspace import InspectWorkspaceMachine
from harness.operations.types.skill_use import SkillUseMachine
from harness.operations.types.view_image import ViewImageMachine
from harness.primitives.image_pool import view_image
from harness.primitives.images import ImageFacts
from harness.primitives.primitives import (
    Begin,
    CancelRequested,
    Compute,
    ComputeCompleted,
    PrimitiveFailed,
    Recovered,
    TimerFired,
)
from harness.primitives.skills import SkillContent, use_skill
from harness.primitives.workspace_inspection import inspect_workspace
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2

Operation = operation_pb2.Operation

MACHINES: dict[str, Machine] = {
    "view_image": ViewImageMachine(),
    "skill_use": SkillUseMachine(),
    "inspect_workspace": InspectWorkspaceMachine(),
}

FACTS = ImageFacts(
    media_type="image/png",
    width=20,
    height=10,
    original_media_type="image/gif",
    original_width=200,
    original_height=100,
)
BLOB = llm_pb2.BlobRef(digest="0" * 64, size_bytes=3, media_type="image/png")
INSPECTION = operation_pb2.InspectWorkspaceState(workspace="/ws", exists=True)

RESULTS = {
    "view_image": ComputeCompleted(value=FACTS, attachments=(BLOB,)),
    "skill_use": ComputeCompleted(value=SkillContent(path="p/SKILL.md", content="text")),
    "inspect_workspace": ComputeCompleted(value=INSPECTION),
}

COMPUTATIONS = {
    "view_image": Compute(function=view_image, arguments=("/ws", "a.png", 2000, 2000, 3_750_000), timeout_s=45.0),
    "skill_use": Compute(function=use_skill, arguments=("/ws", "good"), timeout_s=60.0),
    "inspect_workspace": Compute(function=inspect_workspace, arguments=("/ws",), timeout_s=60.0),
}

COMPLETED: dict[str, Callable[[Operation], None]] = {
    "view_image": lambda operation: operation.view_image.MergeFrom(
        operation_pb2.ViewImageState(
            image=BLOB,
            width=20,
            height=10,
            original_media_type="image/gif",
            original_width=200,
            original_height=100,
        )
    ),
    "skill_use": lambda operation: operation.skill_use.MergeFrom(
        operation_pb2.SkillUseState(path="p/SKILL.md", content="text")
    ),
    "inspect_workspace": lambda operation: operation.inspect_workspace.CopyFrom(INSPECTION),
}


@pytest.fixture(params=sorted(MACHINES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ready(kind: str) -> Operation:
    operation = Operation(
        schema_version=1,
        operation_id="operation-1",
        session_id="session-1",
        type=kind,
        type_version=1,
        status=operation_pb2.OPERATION_STATUS_READY,
        step=1,
        effect_class=operation_pb2.EFFECT_CLASS_PURE,
    )
    if kind == "view_image":
        operation.view_image.path = "a.png"
    elif kind == "skill_use":
        operation.skill_use.name = "good"
    else:
        operation.inspect_workspace.SetInParent()
    return operation


def after(
    operation: Operation, status: operation_pb2.OperationStatus.ValueType, reason: str = "", message: str = ""
) -> Operation:
    """Return what an operation should be one step later."""
    expected = Operation()
    expected.CopyFrom(operation)
    expected.step += 1
    expected.status = status
    if reason:
        expected.error.CopyFrom(operation_pb2.OperationError(reason=reason, message=message))
    return expected


def awaiting(kind: str) -> Operation:
    return after(ready(kind), operation_pb2.OPERATION_STATUS_AWAITING)


def test_a_good_operation_is_valid(kind: str) -> None:
    machine = MACHINES[kind]
    assert (machine.operation_type, machine.type_version, machine.validate(ready(kind))) == (kind, 1, None)


def test_it_computes_once_it_begins(kind: str) -> None:
    operation = ready(kind)
    step = MACHINES[kind].advance(operation, Begin(workspace="/ws"))
    assert step == Step(operation=awaiting(kind), dispatches=(COMPUTATIONS[kind],))
    assert operation == ready(kind)


def test_it_computes_again_after_a_restart(kind: str) -> None:
    operation = awaiting(kind)
    step = MACHINES[kind].advance(operation, Recovered(workspace="/ws"))
    assert step == Step(operation=operation, dispatches=(COMPUTATIONS[kind],))


def test_the_result_completes_it(kind: str) -> None:
    operation = awaiting(kind)
    step = MACHINES[kind].advance(operation, RESULTS[kind])
    expected = after(awaiting(kind), operation_pb2.OPERATION_STATUS_COMPLETED)
    COMPLETED[kind](expected)
    assert step == Step(operation=expected)
    assert operation == awaiting(kind)


def test_a_failure_fails_it_with_its_words(kind: str) -> None:
    event = PrimitiveFailed(reason="FILE_NOT_FOUND", message="file 'a.png' does not exist")
    step = MACHINES[kind].advance(awaiting(kind), event)
    failed = operation_pb2.OPERATION_STATUS_FAILED
    assert step == Step(operation=after(awaiting(kind), failed, event.reason, event.message))


@pytest.mark.parametrize(("reason", "message"), [("", "canceled"), ("no longer needed", "canceled: no longer needed")])
def test_a_cancellation_ends_it_at_once_in_each_state(kind: str, reason: str, message: str) -> None:
    for operation in (ready(kind), awaiting(kind)):
        step = MACHINES[kind].advance(operation, CancelRequested(reason=reason))
        expected = after(operation, operation_pb2.OPERATION_STATUS_CANCELED, "CANCELED", message)
        assert step == Step(operation=expected)


def test_nothing_follows_the_end(kind: str) -> None:
    for event in (RESULTS[kind], Begin(workspace="/ws"), Recovered(workspace="/ws"), CancelRequested(reason="")):
        operation = after(awaiting(kind), operation_pb2.OPERATION_STATUS_CANCELED, "CANCELED", "canceled")
        assert MACHINES[kind].advance(operation, event) == Step(operation=operation)


def test_a_foreign_event_or_result_fails_it(kind: str) -> None:
    for event, reason in (
        (TimerFired(), "UNEXPECTED_EVENT"),
        (ComputeCompleted(value="something"), "COMPUTE_FAILED"),
        (ComputeCompleted(value=FACTS), "COMPUTE_FAILED"),
    ):
        step = MACHINES[kind].advance(awaiting(kind), event)
        assert (step.operation.status, step.operation.error.reason, list(step.dispatches)) == (
            operation_pb2.OPERATION_STATUS_FAILED,
            reason,
            [],
        )


def test_its_own_time_limit_counts_where_it_is_shorter(kind: str) -> None:
    operation = ready(kind)
    for limit_s, expected_s in ((3.0, 3.0), (10_000.0, COMPUTATIONS[kind].timeout_s)):
        operation.limits.timeout.FromTimedelta(timedelta(seconds=limit_s))
        assert MACHINES[kind].validate(operation) is None
        (dispatch,) = MACHINES[kind].advance(operation, Begin(workspace="/ws")).dispatches
        assert isinstance(dispatch, Compute) and dispatch.timeout_s == expected_s


def fault(operation: Operation) -> str:
    return MACHINES[operation.type].validate(operation) or ""


def test_what_does_not_fit_the_type_is_refused(kind: str) -> None:
    operation = ready(kind)
    operation.effect_class = operation_pb2.EFFECT_CLASS_AT_MOST_ONCE
    assert "EFFECT_CLASS_PURE" in fault(operation)
    operation = ready(kind)
    operation.value.value_json = "1"
    assert f"needs the state {kind!r}" in fault(operation)
    operation = ready(kind)
    operation.status = operation_pb2.OPERATION_STATUS_FAILED
    assert fault(operation) == "the operation is terminal"
    operation = ready(kind)
    operation.limits.timeout.CopyFrom(Duration(seconds=-1))
    assert fault(operation) == "limits.timeout is negative"
    operation.limits.timeout.CopyFrom(Duration(seconds=2**60))
    assert fault(operation) == "limits.timeout is out of range"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (operation_pb2.ViewImageState(path=" "), "blank"),
        (operation_pb2.ViewImageState(path="a\0b"), "NUL"),
        (operation_pb2.ViewImageState(path="ü" * 2049), "4,096"),
        (operation_pb2.ViewImageState(path="a", max_width=8001), "8,000"),
        (operation_pb2.ViewImageState(path="a", max_height=8001), "8,000"),
        (operation_pb2.ViewImageState(path="a", max_bytes=2**40), "max_bytes"),
    ],
)
def test_a_view_that_cannot_be_is_refused(state: operation_pb2.ViewImageState, words: str) -> None:
    operation = ready("view_image")
    operation.view_image.CopyFrom(state)
    assert words in fault(operation)


@pytest.mark.parametrize("name", ["", "  ", "a" * 65])
def test_a_skill_name_that_cannot_be_is_refused(name: str) -> None:
    operation = ready("skill_use")
    operation.skill_use.name = name
    assert "name" in fault(operation)


def test_a_view_asks_for_the_size_that_it_was_given() -> None:
    operation = ready("view_image")
    operation.view_image.MergeFrom(operation_pb2.ViewImageState(max_width=10, max_height=20, max_bytes=30))
    (dispatch,) = MACHINES["view_image"].advance(operation, Begin(workspace="/ws")).dispatches
    assert isinstance(dispatch, Compute) and dispatch.arguments == ("/ws", "a.png", 10, 20, 30)


def test_the_dispatched_functions_take_the_arguments_that_they_get(tmp_path: Path) -> None:
    skill = tmp_path / ".harness" / "skills" / "good" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text("---\nname: good\ndescription: x\n---\n")
    for kind in ("skill_use", "inspect_workspace"):
        machine = MACHINES[kind]
        begun = machine.advance(ready(kind), Begin(workspace=str(tmp_path)))
        (dispatch,) = begun.dispatches
        assert isinstance(dispatch, Compute)
        outcome = dispatch.function(*dispatch.arguments)
        ended = machine.advance(begun.operation, ComputeCompleted(value=outcome.value))
        assert ended.operation.status == operation_pb2.OPERATION_STATUS_COMPLETED
