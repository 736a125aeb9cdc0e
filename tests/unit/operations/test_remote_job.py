"""Remote jobs: routing, the handle over restarts, cancellation, and handlers that break their contract or down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import pytest
from google.protobuf.duration_pb2 import Duration

from harness.operations.operations import Step
from harness.operations.types.remote_job import RemoteJobMachine
from harness.primitives.primitives import (
    Begin,
    CancelRemoteJob,
    CancelRequested,
    Dispatch,
    Event,
    PrimitiveFailed,
    Recovered,
    RemoteJobEnded,
    RemoteJobUpdated,
    RunRemoteJob,
    TimerFired,
)
from harness.primitives.remote_job_handlers import RemoteJobHandlers, Report
from unreal_agent.operation.v1 import operation_pb2

Operation = operation_pb2.Operation
Status: TypeAlias = operation_pb2.OperationStatus.ValueType
HandlerReport = RemoteJobUpdated | RemoteJobEnded

READY = operation_pb2.OPERATION_STATUS_READY
AWAITING = operation_pb2.OPERATION_STATUS_AWAITING
CANCELING = operation_pb2.OPERATION_STATUS_CANCELING
COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
FAILED = operation_pb2.OPERATION_STATUS_FAILED
CANCELED = operation_pb2.OPERATION_STATUS_CANCELED
UNKNOWN = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN

MACHINE = RemoteJobMachine()
DONE = RemoteJobEnded(status=COMPLETED, result_json='{"ok": true}')


def job(status: Status = READY, step: int = 1, handle: str = "", progress: str = "", result: str = "") -> Operation:
    return Operation(
        operation_id="operation-1",
        type="remote_job",
        type_version=1,
        status=status,
        step=step,
        effect_class=operation_pb2.EFFECT_CLASS_PROBEABLE,
        remote_job=operation_pb2.RemoteJobState(
            plan_type="deploy", plan_version=2, plan_json="{}", handle=handle, progress=progress, result_json=result
        ),
    )


def run(handle: str = "") -> RunRemoteJob:
    return RunRemoteJob(plan_type="deploy", plan_version=2, plan_json="{}", handle=handle)


def cancel(handle: str = "", reason: str = "") -> CancelRemoteJob:
    return CancelRemoteJob(plan_type="deploy", plan_version=2, handle=handle, reason=reason)


def step(operation: Operation, *dispatches: Dispatch) -> Step[Dispatch]:
    return Step(operation=operation, dispatches=dispatches)


@pytest.mark.parametrize(
    ("before", "event", "expected"),
    [
        (job(), Begin(workspace="/ws"), step(job(AWAITING, 2), run())),
        (job(AWAITING, 2), RemoteJobUpdated(handle="h", progress=""), step(job(AWAITING, 3, "h"))),
        (
            job(AWAITING, 3, "h"),
            RemoteJobUpdated(handle="h", progress="half\n done "),
            step(job(AWAITING, 4, "h", "half done")),
        ),
        (
            job(AWAITING, 4, "h", "half done"),
            RemoteJobUpdated(handle="h", progress="half done"),
            step(job(AWAITING, 4, "h", "half done")),
        ),
        (job(AWAITING, 3, "h"), DONE, step(job(COMPLETED, 4, "h", result='{"ok": true}'))),
        (job(AWAITING, 2), DONE, step(job(COMPLETED, 3, result='{"ok": true}'))),
        (job(AWAITING, 2), Recovered(workspace="/ws"), step(job(AWAITING, 2), run())),
        (job(AWAITING, 3, "h"), Recovered(workspace="/ws"), step(job(AWAITING, 3, "h"), run("h"))),
        (job(AWAITING, 3, "h"), CancelRequested(reason="why"), step(job(CANCELING, 4, "h"), cancel("h", "why"))),
        (job(AWAITING, 2), CancelRequested(reason="why"), step(job(CANCELING, 3), cancel("", "why"))),
        (job(CANCELING, 4, "h"), CancelRequested(reason="x"), step(job(CANCELING, 4, "h"), cancel("h", "x"))),
        (
            job(CANCELING, 4, "h"),
            Recovered(workspace="/ws"),
            step(job(CANCELING, 4, "h"), run("h"), cancel("h", "canceled before a restart")),
        ),
        (
            job(CANCELING, 3),
            RemoteJobUpdated(handle="h", progress=""),
            step(job(CANCELING, 4, "h"), cancel("h", "canceled before a restart")),
        ),
        (job(CANCELING, 4, "h"), RemoteJobUpdated(handle="h", progress="p"), step(job(CANCELING, 5, "h", "p"))),
        (job(CANCELING, 4, "h"), DONE, step(job(COMPLETED, 5, "h", result='{"ok": true}'))),
    ],
)
def test_the_course_of_a_job(before: Operation, event: Event, expected: Step[Dispatch]) -> None:
    given = Operation()
    given.CopyFrom(before)
    assert MACHINE.advance(before, event) == expected
    assert before == given


@pytest.mark.parametrize(
    ("event", "status", "reason", "message"),
    [
        (RemoteJobEnded(status=CANCELED), CANCELED, "CANCELED", "the handler gave no message"),
        (RemoteJobEnded(status=FAILED, reason="QUOTA", message="none left"), FAILED, "QUOTA", "none left"),
        (RemoteJobEnded(status=UNKNOWN), UNKNOWN, "OUTCOME_UNKNOWN", "the handler gave no message"),
    ],
)
@pytest.mark.parametrize("before", [AWAITING, CANCELING])
def test_a_job_ends_as_its_handler_says(
    before: Status, event: RemoteJobEnded, status: Status, reason: str, message: str
) -> None:
    expected = job(status, 4, "h")
    expected.error.CopyFrom(operation_pb2.OperationError(reason=reason, message=message))
    assert MACHINE.advance(job(before, 3, "h"), event) == step(expected)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (RemoteJobUpdated(handle="other", progress=""), "reports on the job 'other', but was given 'h'"),
        (RemoteJobUpdated(handle="", progress="x"), "its handle must have"),
        (RemoteJobUpdated(handle="h" * 2000, progress=""), "its handle must have"),
        (RemoteJobEnded(status=AWAITING), "status 2, which is none"),
        (RemoteJobEnded(status=cast(Status, 99)), "status 99, which is none"),
        (RemoteJobEnded(status=COMPLETED), "result_json is not JSON"),
        (PrimitiveFailed(reason="INVALID_HANDLER_UPDATE", message="it reports a str"), "it reports a str"),
    ],
)
def test_an_invalid_or_foreign_report_fails_the_operation_and_ends_the_job(event: Event, words: str) -> None:
    ended = MACHINE.advance(job(AWAITING, 3, "h"), event)
    assert (ended.operation.status, ended.operation.error.reason) == (FAILED, "INVALID_HANDLER_UPDATE")
    assert words in ended.operation.error.message
    (dispatch,) = ended.dispatches
    assert isinstance(dispatch, CancelRemoteJob) and dispatch.handle == "h"


@pytest.mark.parametrize(
    ("before", "reason", "status"),
    [
        (job(AWAITING, 2), "UNSUPPORTED_PLAN", FAILED),
        (job(AWAITING, 3, "h"), "UNSUPPORTED_PLAN", UNKNOWN),
        (job(AWAITING, 2), "HANDLER_FAILED", UNKNOWN),
        (job(AWAITING, 3, "h"), "HANDLER_FAILED", UNKNOWN),
        (job(AWAITING, 2), "HANDLER_STOPPED", UNKNOWN),
    ],
)
def test_what_a_broken_handler_leaves_is_unknown_unless_nothing_was_started(
    before: Operation, reason: str, status: Status
) -> None:
    ended = MACHINE.advance(before, PrimitiveFailed(reason=reason, message="m"))
    assert (ended.operation.status, ended.operation.error.reason) == (status, reason)
    assert list(ended.dispatches) == ([] if status == FAILED else [cancel(before.remote_job.handle, "m")])


def test_nothing_follows_the_end() -> None:
    ended = job(COMPLETED, 4, "h", result="1")
    for event in (DONE, RemoteJobUpdated(handle="h", progress="late"), CancelRequested(reason="")):
        assert MACHINE.advance(ended, event) == step(ended)


def test_a_job_that_never_began_is_canceled_at_once() -> None:
    ended = MACHINE.advance(job(), CancelRequested(reason="why"))
    assert (ended.operation.status, list(ended.dispatches)) == (CANCELED, [])


def test_a_foreign_event_fails_the_operation() -> None:
    ended = MACHINE.advance(job(AWAITING, 3, "h"), TimerFired())
    assert ended.operation.error.reason == "UNEXPECTED_EVENT"
    assert list(ended.dispatches) == [cancel("h")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda operation: operation.remote_job.ClearField("plan_type"), "plan_type"),
        (lambda operation: operation.remote_job.ClearField("plan_version"), "plan_version"),
        (lambda operation: operation.remote_job.ClearField("plan_json"), "plan_json is not JSON"),
        (lambda operation: operation.limits.timeout.CopyFrom(Duration(seconds=1)), "belongs into its plan"),
        (lambda operation: operation.ClearField("effect_class"), "EFFECT_CLASS_PROBEABLE"),
        (lambda operation: operation.ClearField("remote_job"), "needs the state"),
    ],
)
def test_a_job_that_cannot_be_is_refused(change: Callable[[Operation], object], words: str) -> None:
    operation = job()
    assert MACHINE.validate(operation) is None
    change(operation)
    assert words in (MACHINE.validate(operation) or "")


@dataclass(kw_only=True)
class ScriptedHandler:
    """Reports what it was given; `hold` makes it wait for ever at the end."""

    plan_type: str = "deploy"
    plan_version: int = 2
    reports: Sequence[object] = (RemoteJobUpdated(handle="h", progress=""), DONE)
    error: Exception | None = None
    cancel_error: Exception | None = None
    is_holding: bool = False
    calls: list[tuple[str, ...]] = field(default_factory=list)

    async def run(
        self, *, operation_id: str, plan_json: str, handle: str, idempotency_key: str
    ) -> AsyncIterator[HandlerReport]:
        self.calls.append(("run", operation_id, plan_json, handle))
        try:
            for report in self.reports:
                yield cast(HandlerReport, report)
            if self.error is not None:
                raise self.error
            if self.is_holding:
                await asyncio.Event().wait()
        finally:
            self.calls.append(("closed",))

    async def cancel(self, *, operation_id: str, handle: str, reason: str) -> None:
        self.calls.append(("cancel", operation_id, handle, reason))
        if self.cancel_error is not None:
            raise self.cancel_error


async def reports_of(*handlers: ScriptedHandler, dispatch: RunRemoteJob | None = None) -> list[Report]:
    async with aclosing(RemoteJobHandlers(handlers).run("operation-1", dispatch or run())) as reports:
        return [report async for report in reports]


async def test_a_plan_goes_to_the_handler_of_its_type_and_version() -> None:
    others = [ScriptedHandler(plan_version=1), ScriptedHandler(plan_type="build")]
    handler = ScriptedHandler()
    assert await reports_of(*others, handler, dispatch=run("h")) == list(handler.reports)
    assert handler.calls == [("run", "operation-1", "{}", "h"), ("closed",)]
    assert [other.calls for other in others] == [[], []]


@pytest.mark.parametrize(
    ("handlers", "message"),
    [
        ([], "no handler for plan 'deploy' version 2; there are: none"),
        ([ScriptedHandler(plan_version=1)], "no handler for plan 'deploy' version 2; there are: deploy/1"),
        ([ScriptedHandler(), ScriptedHandler()], "2 handlers for plan 'deploy' version 2; there are: deploy/2"),
    ],
)
async def test_exactly_one_handler_must_fit(handlers: list[ScriptedHandler], message: str) -> None:
    assert await reports_of(*handlers) == [PrimitiveFailed(reason="UNSUPPORTED_PLAN", message=message)]
    assert [handler.calls for handler in handlers] == [[] for _ in handlers]


async def test_nothing_follows_the_end_that_a_handler_reports() -> None:
    handler = ScriptedHandler(reports=(DONE, DONE), error=RuntimeError("late"))
    assert await reports_of(handler) == [DONE]
    assert handler.calls[-1] == ("closed",)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ("done", "it reports a str"),
        (None, "it reports a NoneType"),
        (RemoteJobUpdated(handle=cast(str, 7), progress=""), "not valid Unicode text"),
        (RemoteJobUpdated(handle="h\ud800", progress=""), "not valid Unicode text"),
        (RemoteJobEnded(status=cast(Status, "COMPLETED")), "its status is a str"),
    ],
)
async def test_a_report_that_is_none_ends_the_watching(report: object, words: str) -> None:
    handler = ScriptedHandler(reports=(report, DONE))
    (failed,) = await reports_of(handler)
    assert isinstance(failed, PrimitiveFailed)
    assert (failed.reason, words in failed.message) == ("INVALID_HANDLER_UPDATE", True)
    assert handler.calls[-1] == ("closed",)


async def test_a_handler_that_raises_or_stops_concerns_one_operation_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    known = RemoteJobUpdated(handle="h", progress="")
    assert await reports_of(ScriptedHandler(reports=(known,), error=OSError("no\nroute"))) == [
        known,
        PrimitiveFailed(reason="HANDLER_FAILED", message="the handler of 'deploy' version 2 failed: OSError: no route"),
    ]
    assert await reports_of(ScriptedHandler(reports=(known,))) == [
        known,
        PrimitiveFailed(
            reason="HANDLER_STOPPED", message="the handler of 'deploy' version 2 stopped without an end of the job"
        ),
    ]


async def test_closing_the_watch_closes_the_handlers_and_not_the_job() -> None:
    handler = ScriptedHandler(reports=(RemoteJobUpdated(handle="h", progress=""),), is_holding=True)
    async with aclosing(RemoteJobHandlers([handler]).run("operation-1", run())) as reports:
        await anext(reports)
    assert [call[0] for call in handler.calls] == ["run", "closed"]


async def test_cancelling_the_watcher_closes_the_handlers() -> None:
    handler = ScriptedHandler(reports=(), is_holding=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await reports_of(handler)
    assert [call[0] for call in handler.calls] == ["run", "closed"]


async def test_a_cancellation_reaches_the_handler_with_its_reason() -> None:
    handler = ScriptedHandler()
    await RemoteJobHandlers([handler]).cancel("operation-1", cancel("h", "why"))
    assert handler.calls == [("cancel", "operation-1", "h", "why")]


async def test_a_cancellation_that_fails_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    jobs = RemoteJobHandlers([ScriptedHandler(cancel_error=RuntimeError("no"))])
    await jobs.cancel("operation-1", cancel("h"))
    assert [record.message for record in caplog.records] == ["remote job handler failed to cancel"]
    await RemoteJobHandlers([]).cancel("operation-1", cancel("h"))


async def test_a_job_runs_from_its_begin_to_its_end() -> None:
    jobs = RemoteJobHandlers([ScriptedHandler()])
    begun = MACHINE.advance(job(), Begin(workspace="/ws"))
    operation = begun.operation
    (dispatch,) = begun.dispatches
    assert isinstance(dispatch, RunRemoteJob)
    async with aclosing(jobs.run(operation.operation_id, dispatch)) as reports:
        async for report in reports:
            operation = MACHINE.advance(operation, report).operation
    assert operation == job(COMPLETED, 4, "h", result='{"ok": true}')
