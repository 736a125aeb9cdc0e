"""Remote jobs as a primitive: one task for each job passes on what the host's handler reports."""

from __future__ import annotations

import asyncio
from asyncio import TaskGroup
from collections.abc import Callable, Iterable
from contextlib import aclosing

from harness.primitives.primitives import CancelRemoteJob, Event, RemoteJobHandler, RemoteJobUpdated, RunRemoteJob
from harness.primitives.remote_job_handlers import RemoteJobHandlers


class RemoteJobs:
    """Every remote job of one manager."""

    def __init__(
        self, handlers: Iterable[RemoteJobHandler], report: Callable[[str, Event], None], tasks: TaskGroup
    ) -> None:
        """Take the host's handlers; `report(operation_id, event)` is called on the loop; `tasks` owns what runs."""
        self._handlers = RemoteJobHandlers(handlers)
        self._report = report
        self._tasks = tasks
        self._current: dict[str, asyncio.Task[None]] = {}

    def start(self, operation_id: str, dispatch: RunRemoteJob) -> None:
        """Start a job or pick it up."""
        task = self._tasks.create_task(self._run(operation_id, dispatch), name=f"remote job {operation_id}")
        self._current[operation_id] = task

    def cancel(self, operation_id: str, dispatch: CancelRemoteJob) -> None:
        """Tell the handler to end the job."""
        self._tasks.create_task(self._handlers.cancel(operation_id, dispatch), name=f"cancel remote job {operation_id}")

    def drop(self, operation_id: str) -> None:
        """Stop listening to a job; it goes on. Harmless where there is none."""
        task = self._current.pop(operation_id, None)
        if task is not None:
            task.cancel()

    async def _run(self, operation_id: str, dispatch: RunRemoteJob) -> None:
        async with aclosing(self._handlers.run(operation_id, dispatch)) as reports:
            async for report in reports:
                if not isinstance(report, RemoteJobUpdated):
                    self._current.pop(operation_id, None)
                self._report(operation_id, report)
