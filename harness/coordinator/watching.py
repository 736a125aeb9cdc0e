"""A session's watch: durable changes from the store, ephemeral deltas and live output between them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Mapping

from harness.coordinator.ephemeral import EphemeralHub, EphemeralQueue
from harness.coordinator.manager_link import ManagerLink
from harness.errors import HarnessError, UnavailableError
from harness.operations import is_terminal
from harness.primitives.streams import closing
from harness.session_store import SessionStore
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

MAX_OUTPUT_DELTA_BYTES = 16 * 1024
ACCEPT_TIMEOUT_S = 30.0

_FOLLOW_PAUSE_S = 1.0
"""Between two readings of output whose manager is out of reach; a manager that is far away waits by itself, longer."""

_STREAMS = (operation_pb2.OUTPUT_STREAM_STDOUT, operation_pb2.OUTPUT_STREAM_STDERR)


class SessionWatch:
    """One watcher. Its tasks belong to the group that it is given and end with it."""

    def __init__(
        self,
        store: SessionStore,
        hub: EphemeralHub,
        links: Mapping[str, ManagerLink],
        tasks: asyncio.TaskGroup,
        request: coordinator_pb2.WatchSessionRequest,
    ) -> None:
        """Prepare; `events` runs it."""
        self._store = store
        self._hub = hub
        self._links = links
        self._tasks = tasks
        self._request = request
        self._change: store_pb2.WatchSessionResponse | None = None
        self._error: BaseException | None = None
        self._is_change_taken = asyncio.Event()
        self._followers: dict[str, list[asyncio.Task[None]]] = {}
        self._last_readers: set[asyncio.Task[None]] = set()
        """Followers of commands that have ended; they end with the watch at the latest."""

    async def events(self) -> AsyncIterator[coordinator_pb2.WatchSessionResponse]:
        """Yield the watch's messages. The store is read no faster than they are taken; deltas are lost instead."""
        with self._hub.subscription(self._request.session_id) as queue:
            readers = [self._tasks.create_task(self._read_changes(queue))]
            if self._request.include_output and self._request.after_revision:
                readers.append(self._tasks.create_task(self._follow_known(queue)))
            try:
                async for event in self._merged(queue):
                    yield event
            finally:
                for task in itertools.chain(readers, self._last_readers, *self._followers.values()):
                    task.cancel()

    async def _merged(self, queue: EphemeralQueue) -> AsyncIterator[coordinator_pb2.WatchSessionResponse]:
        while True:
            await queue.changed.wait()
            queue.changed.clear()
            # No more than there are now: a flood of them must not hold up what is recorded.
            for _ in range(len(queue.events)):
                event = queue.events.popleft()
                if self._request.include_deltas or event.WhichOneof("event") != "model_delta":
                    yield event
            change = self._change
            if change is not None:
                self._change = None
                self._is_change_taken.set()
                yield coordinator_pb2.WatchSessionResponse(change=change)
                if self._request.include_output:
                    self._follow_outputs(change.operations, queue)
                if self._ends_at(change):
                    rest = coordinator_pb2.RestReached(revision=change.revision, rest=change.rest)
                    if not change.is_deleted:
                        yield coordinator_pb2.WatchSessionResponse(rest_reached=rest)
                    return
            if self._error is not None:
                raise self._error
            if queue.events:
                queue.changed.set()

    def _ends_at(self, change: store_pb2.WatchSessionResponse) -> bool:
        if change.is_deleted:
            return True
        at_rest = change.rest.state in {session_pb2.REST_STATE_AT_REST, session_pb2.REST_STATE_UNSPECIFIED}
        return self._request.until_idle and change.is_current and at_rest

    async def _read_changes(self, queue: EphemeralQueue) -> None:
        """Hand over one change at a time."""
        request = store_pb2.WatchSessionRequest(
            session_id=self._request.session_id, after_revision=self._request.after_revision
        )
        try:
            async with closing(self._store.watch_session(request)) as changes:
                async for change in changes:
                    self._change = change
                    queue.changed.set()
                    await self._is_change_taken.wait()
                    self._is_change_taken.clear()
        except HarnessError as error:
            self._error = error
            queue.changed.set()

    async def _follow_known(self, queue: EphemeralQueue) -> None:
        """Follow commands that began before the revision where this watch goes on: no change will tell of them."""
        request = store_pb2.ListOperationsRequest(
            session_id=self._request.session_id, filter=store_pb2.OPERATION_FILTER_UNSETTLED
        )
        try:
            while True:
                page = await self._store.list_operations(request)
                self._follow_outputs(page.operations, queue)
                if not page.next_page_token:
                    return
                request.page_token = page.next_page_token
        except HarnessError:
            return  # the reader of changes meets it too, and tells

    def _follow_outputs(self, operations: Iterable[operation_pb2.Operation], queue: EphemeralQueue) -> None:
        """Follow the output of each command that runs; a follower ends by itself with its command."""
        for operation in operations:
            if is_terminal(operation):
                for task in self._followers.pop(operation.operation_id, ()):
                    self._last_readers.add(task)
                    task.add_done_callback(self._last_readers.discard)
            elif (
                operation.type == "bash"
                and operation.instance_id
                and operation.operation_id not in self._followers
                and operation.manager_name in self._links
            ):
                link = self._links[operation.manager_name]
                self._followers[operation.operation_id] = [
                    self._tasks.create_task(self._follow(link, operation.operation_id, stream, queue))
                    for stream in _STREAMS
                ]

    async def _follow(
        self,
        link: ManagerLink,
        operation_id: str,
        stream: operation_pb2.OutputStream.ValueType,
        queue: EphemeralQueue,
    ) -> None:
        """Hand over a command's output, across cuts of any length while the command is not known to have ended."""
        request = manager_pb2.ReadOutputRequest(operation_id=operation_id, stream=stream, follow=True)
        while True:
            is_running = operation_id in self._followers
            try:
                await _read(link, request, queue)
                return
            except UnavailableError:
                # What ended meanwhile has had its last reading.
                if not is_running:
                    return
            except (HarnessError, TimeoutError):
                return  # ephemeral: the recorded result holds what matters
            await asyncio.sleep(_FOLLOW_PAUSE_S)


async def _read(link: ManagerLink, request: manager_pb2.ReadOutputRequest, queue: EphemeralQueue) -> None:
    """Hand over output; the request moves on with what was."""
    async with asyncio.timeout(ACCEPT_TIMEOUT_S):
        await link.wait_accepted(request.operation_id)
    async for piece in link.manager.read_output(request):
        for start in range(0, len(piece.data), MAX_OUTPUT_DELTA_BYTES):
            delta = coordinator_pb2.OutputDelta(
                operation_id=request.operation_id,
                stream=request.stream,
                offset=piece.offset + start,
                data=piece.data[start : start + MAX_OUTPUT_DELTA_BYTES],
            )
            queue.put(coordinator_pb2.WatchSessionResponse(output_delta=delta))
        request.offset = piece.offset + len(piece.data)
