"""Calls the host's own handlers of remote jobs, and keeps their faults to the one operation.

A handler is foreign code: what it raises, returns and yields is checked here for its form; whether it fits what was
reported before is the step machine's to judge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import TypeAlias

from harness.primitives.primitives import (
    CancelRemoteJob,
    PrimitiveFailed,
    RemoteJobEnded,
    RemoteJobHandler,
    RemoteJobUpdated,
    RunRemoteJob,
)

logger = logging.getLogger(__name__)

Report: TypeAlias = RemoteJobUpdated | RemoteJobEnded | PrimitiveFailed

CANCEL_TIMEOUT_S = 30.0


class RemoteJobHandlers:
    """The handlers of one manager, by plan type and version."""

    def __init__(self, handlers: Iterable[RemoteJobHandler]) -> None:
        """Keep the handlers; which one a plan has is decided anew for each plan."""
        self._handlers = tuple(handlers)

    async def run(self, operation_id: str, dispatch: RunRemoteJob) -> AsyncGenerator[Report, None]:
        """Yield what the handler reports; the last is one `RemoteJobEnded` or `PrimitiveFailed`.

        Closing the iterator, or cancelling who reads it, closes the handler's; the job goes on.
        """
        handler = self._find(dispatch.plan_type, dispatch.plan_version)
        if isinstance(handler, PrimitiveFailed):
            yield handler
            return
        name = f"the handler of {dispatch.plan_type!r} version {dispatch.plan_version}"
        try:
            reports = handler.run(
                operation_id=operation_id,
                plan_json=dispatch.plan_json,
                handle=dispatch.handle,
                idempotency_key=dispatch.idempotency_key,
            )
            async with aclosing(_checked(reports)) as checked:
                async for report in checked:
                    yield report
                    if not isinstance(report, RemoteJobUpdated):
                        return
        # Foreign code may raise anything, and concerns this operation only.
        except Exception as error:
            logger.warning("remote job handler failed", exc_info=True, extra={"operation_id": operation_id})
            message = f"{name} failed: {_one_line(error)}"
            yield PrimitiveFailed(reason="HANDLER_FAILED", message=message)
            return
        yield PrimitiveFailed(reason="HANDLER_STOPPED", message=f"{name} stopped without an end of the job")

    async def cancel(self, operation_id: str, dispatch: CancelRemoteJob) -> None:
        """Ask the handler for the job's end. A failure is logged: the end, or none, comes from `run`."""
        handler = self._find(dispatch.plan_type, dispatch.plan_version)
        if isinstance(handler, PrimitiveFailed):
            return
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await handler.cancel(operation_id=operation_id, handle=dispatch.handle, reason=dispatch.reason)
        # As above; TimeoutError among them.
        except Exception:
            logger.warning("remote job handler failed to cancel", exc_info=True, extra={"operation_id": operation_id})

    def _find(self, plan_type: str, plan_version: int) -> RemoteJobHandler | PrimitiveFailed:
        """Return the one handler of a plan."""
        fitting = [
            handler
            for handler in self._handlers
            if (handler.plan_type, handler.plan_version) == (plan_type, plan_version)
        ]
        if len(fitting) == 1:
            return fitting[0]
        known = ", ".join(sorted({f"{handler.plan_type}/{handler.plan_version}" for handler in self._handlers}))
        count = "no handler" if not fitting else f"{len(fitting)} handlers"
        message = f"{count} for plan {plan_type!r} version {plan_version}; there are: {known or 'none'}"
        return PrimitiveFailed(reason="UNSUPPORTED_PLAN", message=message)


async def _checked(reports: AsyncIterator[RemoteJobUpdated | RemoteJobEnded]) -> AsyncGenerator[Report, None]:
    """Yield reports until one has not the form of one; close the handler's iterator in the end."""
    try:
        async for report in reports:
            fault = _find_fault(report)
            yield report if fault is None else PrimitiveFailed(reason="INVALID_HANDLER_UPDATE", message=fault)
    finally:
        close = getattr(reports, "aclose", None)
        if close is not None:
            await close()


def _find_fault(report: object) -> str | None:
    match report:
        case RemoteJobUpdated():
            texts: Sequence[object] = (report.handle, report.progress)
        case RemoteJobEnded():
            texts = (report.result_json, report.reason, report.message)
            if not isinstance(report.status, int):
                return f"its status is a {type(report.status).__name__}"
        case _:
            return f"it reports a {type(report).__name__}"
    return None if all(_is_text(text) for text in texts) else "a text of its report is not valid Unicode text"


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _one_line(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return text.encode("utf-8", "replace").decode()
