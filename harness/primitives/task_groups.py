"""A group of tasks behind a context manager that is handed on to a caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def tasks_behind() -> AsyncIterator[asyncio.TaskGroup]:
    """Provide a task group whose block's own exception is raised as it is: `TaskGroup` would wrap it.

    For context managers that yield to a caller within a group. The block ends the tasks, also when it raises; they are
    waited for. What a task raises comes as `TaskGroup` raises it.
    """
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        try:
            yield tasks
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure
