"""One `CommitStream`: commits of many sessions at once, answered in any order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from google.protobuf.unknown_fields import UnknownFieldSet

from clients._rpc.status import to_status
from harness.errors import HarnessError, InvalidArgumentError
from harness.session_store import SessionStore
from services._server.interceptor import request_id_var
from services._server.validation import MIB
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

logger = logging.getLogger(__name__)

MAX_COMMITS_IN_HAND: Final = 1024
MAX_BYTES_IN_HAND: Final = 64 * MIB
"""Of one stream; beyond either, no more requests are read until some commits are answered."""

_MAX_ANSWERS_PER_MESSAGE: Final = 512


class CommitConversation:
    """The commits of one stream.

    They go on where the stream breaks: the caller repeats what is unanswered with the same ID.
    """

    def __init__(self, store: SessionStore, tasks: asyncio.TaskGroup) -> None:
        self._store = store
        self._tasks = tasks
        self._answers: list[store_pb2.CommitStreamResult] = []
        self._commits_in_hand = 0
        self._bytes_in_hand = 0
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_read = False
        self._failure: Exception | None = None

    async def run(
        self, requests: AsyncIterator[store_pb2.CommitStreamRequest]
    ) -> AsyncIterator[store_pb2.CommitStreamResponse]:
        """Yield answers until the requests end and all are answered."""
        reading = self._tasks.create_task(self._read(requests))
        try:
            while True:
                await self._has_news.wait()
                self._has_news.clear()
                while self._answers:
                    results = self._answers[:_MAX_ANSWERS_PER_MESSAGE]
                    del self._answers[:_MAX_ANSWERS_PER_MESSAGE]
                    yield store_pb2.CommitStreamResponse(results=results)
                if self._is_read and not self._commits_in_hand and not self._answers:
                    break
            if self._failure is not None:
                raise self._failure
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[store_pb2.CommitStreamRequest]) -> None:
        try:
            async for request in requests:
                if len(UnknownFieldSet(request)):
                    raise InvalidArgumentError(
                        "the request has fields that this release does not know",
                        reason="UNKNOWN_FIELDS",
                        metadata={"field": "commits"},
                    )
                for commit in request.commits:
                    await self._wait_for_room()
                    self._commits_in_hand += 1
                    self._bytes_in_hand += commit.ByteSize()
                    self._tasks.create_task(self._commit(commit))
        except Exception as error:
            # The task belongs to the service: what goes wrong in one stream is told in that stream.
            self._failure = error
        finally:
            self._is_read = True
            self._has_news.set()

    async def _wait_for_room(self) -> None:
        while self._commits_in_hand >= MAX_COMMITS_IN_HAND or self._bytes_in_hand >= MAX_BYTES_IN_HAND:
            self._has_room.clear()
            await self._has_room.wait()

    async def _commit(self, commit: store_pb2.CommitRequest) -> None:
        result = store_pb2.CommitStreamResult(session_id=commit.session_id, commit_id=commit.commit_id)
        try:
            result.response.CopyFrom(await self._store.commit(commit))
        except Exception as error:
            if not isinstance(error, HarnessError):
                logger.error("commit failed by a fault", exc_info=error, extra={"session_id": commit.session_id})
            result.error_status = to_status(error, request_id=request_id_var.get()).SerializeToString()
        finally:
            self._commits_in_hand -= 1
            self._bytes_in_hand -= commit.ByteSize()
            self._has_room.set()
        self._answers.append(result)
        self._has_news.set()
