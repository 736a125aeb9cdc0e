"""Commits of many sessions over one stream, repeated with the same ID until they are answered."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc
from google.rpc import status_pb2

from clients._rpc.calls import pauses_s
from clients._rpc.status import CONNECTION_LOST, SERVER_BUSY, from_rpc_error, from_status
from harness.errors import (
    FailedPreconditionError,
    HarnessError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""Of what is sent together; a single commit may be larger."""

_MAX_MESSAGE_COMMITS: Final = 256

# What will be the same next time. Everything else says nothing of the commits that were sent.
_REFUSALS: Final = (UnauthenticatedError, PermissionDeniedError, InvalidArgumentError, FailedPreconditionError)

_Key = tuple[str, str]


class _Pending:
    """A commit that waits for its answer."""

    def __init__(self, request: store_pb2.CommitRequest) -> None:
        self.request = request
        self.size_bytes = request.ByteSize()
        self.key: _Key = (request.session_id, request.commit_id)
        self.answer: asyncio.Future[store_pb2.CommitResponse] = asyncio.get_running_loop().create_future()


class CommitPipe:
    """Sends commits that came together in one message; one task, `run`, owns the stream."""

    def __init__(self, commit_stream: Callable[..., Any]) -> None:
        self._commit_stream = commit_stream
        self._waiting: deque[_Pending] = deque()
        """Not sent yet."""
        self._sent: dict[_Key, deque[_Pending]] = {}
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._in_hand = 0
        self._was_answered = False
        """Whether the current stream brought anything."""

    async def commit(self, request: store_pb2.CommitRequest, *, timeout_s: float) -> store_pb2.CommitResponse:
        """Return the answer to a commit.

        Raises:
            UnavailableError: CONNECTION_LOST: not answered in time, the outcome is unknown.
            HarnessError: As the store refused it.
        """
        pending = _Pending(request)
        self._in_hand += 1
        self._is_idle.clear()
        self._waiting.append(pending)
        self._has_work.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await pending.answer
        except TimeoutError:
            raise UnavailableError(
                f"the session store did not answer within {timeout_s:.0f} s", reason=CONNECTION_LOST
            ) from None
        finally:
            # A caller that gave up must not have its commit sent later, behind its back.
            pending.answer.cancel()
            self._in_hand -= 1
            if not self._in_hand:
                self._is_idle.set()

    async def wait_until_idle(self) -> None:
        """Wait until no caller waits for an answer."""
        await self._is_idle.wait()

    def fail_all(self, error: HarnessError) -> None:
        """Give every caller that waits an error."""
        for pending in self._take_sent():
            _fail(pending, error)
        while self._waiting:
            _fail(self._waiting.popleft(), error)

    async def run(self) -> None:
        """Keep the stream for ever; it is opened by the first commit, and again after a break where work waits."""
        pauses = pauses_s()
        while True:
            await self._has_work.wait()
            self._was_answered = False
            error = await self._converse()
            if self._was_answered:
                pauses = pauses_s()
            pause_s = next(pauses)
            if isinstance(error, _REFUSALS):
                logger.error("commit stream was refused", extra={"reason": error.reason, "error": error.message})
                self.fail_all(error)
            else:
                # The outcome of what was sent is unknown. It comes first, in its old order.
                self._waiting.extendleft(reversed(self._take_sent()))
                logger.warning(
                    "commit stream broke",
                    extra={"reason": error.reason, "error": error.message, "repeated": len(self._waiting)},
                )
                if error.reason == SERVER_BUSY:
                    pause_s = max(pause_s, error.retry_after_s or 0)
            self._note_work()
            await asyncio.sleep(pause_s)

    async def _converse(self) -> HarnessError:
        """Send and receive until the stream breaks, and return why."""
        call = self._commit_stream(wait_for_ready=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                writing = tasks.create_task(self._write(call))
                try:
                    return await self._read(call)
                finally:
                    writing.cancel()
        finally:
            call.cancel()

    async def _read(self, call: Any) -> HarnessError:
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._was_answered = True
                self._resolve(response.results)
        except grpc.aio.AioRpcError as err:
            return from_rpc_error(err)
        return UnavailableError("the server ended the stream", reason=CONNECTION_LOST)

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._has_work.wait()
                batch = self._next_batch()
                self._note_work()
                if batch:
                    await call.write(store_pb2.CommitStreamRequest(commits=[pending.request for pending in batch]))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader learns why

    def _next_batch(self) -> list[_Pending]:
        """Take what waits and fits into one message, and note it as sent."""
        batch: list[_Pending] = []
        size_bytes = 0
        while self._waiting and len(batch) < _MAX_MESSAGE_COMMITS:
            if batch and size_bytes + self._waiting[0].size_bytes > _MAX_MESSAGE_BYTES:
                break
            pending = self._waiting.popleft()
            if pending.answer.done():
                continue
            size_bytes += pending.size_bytes
            batch.append(pending)
            self._sent.setdefault(pending.key, deque()).append(pending)
        return batch

    def _resolve(self, results: Iterable[store_pb2.CommitStreamResult]) -> None:
        for result in results:
            key = (result.session_id, result.commit_id)
            sent = self._sent.get(key)
            if not sent:
                logger.warning("answer to no commit", extra={"session_id": key[0], "commit_id": key[1]})
                continue
            pending = sent.popleft()
            if not sent:
                del self._sent[key]
            if pending.answer.done():
                continue
            match result.WhichOneof("result"):
                case "response":
                    pending.answer.set_result(result.response)
                case "error_status":
                    _fail(pending, from_status(status_pb2.Status.FromString(result.error_status)))
                case _:
                    _fail(pending, UnavailableError("the answer to a commit was empty", reason=CONNECTION_LOST))

    def _take_sent(self) -> list[_Pending]:
        sent = [pending for of_key in self._sent.values() for pending in of_key]
        self._sent.clear()
        return sent

    def _note_work(self) -> None:
        if self._waiting:
            self._has_work.set()
        else:
            self._has_work.clear()


def _fail(pending: _Pending, error: HarnessError) -> None:
    if not pending.answer.done():
        # Each caller its own exception: one shared by many would gather all their tracebacks.
        pending.answer.set_exception(
            type(error)(error.message, reason=error.reason, metadata=error.metadata, retry_after_s=error.retry_after_s)
        )
