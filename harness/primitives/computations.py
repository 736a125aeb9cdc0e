"""Computations as a primitive: calls functions in threads and stores what they attach."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from asyncio import TaskGroup
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.primitives.primitives import Attachment, Compute, ComputeCompleted, ComputeError, Event, PrimitiveFailed
from unreal_agent.llm.v1 import llm_pb2

logger = logging.getLogger(__name__)

THREADS = 4


class Computations:
    """Every computation of one manager."""

    def __init__(self, report: Callable[[str, Event], None], tasks: TaskGroup) -> None:
        """`report(operation_id, event)` is called on the loop; `tasks` owns what runs."""
        self._report = report
        self._tasks = tasks
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="computation")
        self._current: dict[str, asyncio.Task[None]] = {}

    def start(self, operation_id: str, attachments: Path, dispatch: Compute) -> None:
        """Call a function; its attachments are put into a directory that is made where needed."""
        task = self._tasks.create_task(self._run(operation_id, attachments, dispatch), name=f"compute {operation_id}")
        self._current[operation_id] = task

    def drop(self, operation_id: str) -> None:
        """Stop waiting for an operation's computation; harmless where there is none."""
        task = self._current.pop(operation_id, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Let no more functions start; those that run end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, operation_id: str, attachments: Path, dispatch: Compute) -> None:
        event = await self._call(attachments, dispatch)
        self._current.pop(operation_id, None)
        self._report(operation_id, event)

    async def _call(self, attachments: Path, dispatch: Compute) -> ComputeCompleted | PrimitiveFailed:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(dispatch.timeout_s):
                return await loop.run_in_executor(self._threads, _compute, attachments, dispatch)
        except ComputeError as error:
            return PrimitiveFailed(reason=error.reason, message=error.message)
        except TimeoutError:
            message = f"it was not done after {dispatch.timeout_s:g} s"
            return PrimitiveFailed(reason="COMPUTE_TIMEOUT", message=message)
        # A function of any operation type may raise anything; that is this operation's failure and no other's.
        except Exception as error:
            logger.exception("computation failed")
            return PrimitiveFailed(reason="COMPUTE_FAILED", message=f"internal error: {type(error).__name__}")


def _compute(attachments: Path, dispatch: Compute) -> ComputeCompleted:
    outcome = dispatch.function(*dispatch.arguments)
    refs = tuple(_store(attachments, attachment) for attachment in outcome.attachments)
    return ComputeCompleted(value=outcome.value, attachments=refs)


def _store(directory: Path, attachment: Attachment) -> llm_pb2.BlobRef:
    """Write an attachment so that it is whole or not there, on stable storage before anybody names it."""
    digest = hashlib.sha256(attachment.data).hexdigest()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = directory / f".{digest}.{os.getpid()}"
    with temporary.open("wb") as file:
        file.write(attachment.data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / digest)
    return llm_pb2.BlobRef(digest=digest, size_bytes=len(attachment.data), media_type=attachment.media_type)
