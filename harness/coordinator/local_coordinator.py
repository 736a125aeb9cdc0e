"""A coordinator in this process: loads sessions on demand, answers calls, routes reports to sessions."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from weakref import WeakValueDictionary

from harness.clock import Clock
from harness.coordinator.coordinator import CoordinatorConfig
from harness.coordinator.ephemeral import EphemeralHub
from harness.coordinator.fenced_adapter import FencedAdapter
from harness.coordinator.lease_keeper import LeaseKeeper
from harness.coordinator.manager_link import ManagerLink
from harness.coordinator.model_requests import ModelRequests
from harness.coordinator.protocol import Environment, OperationReported, Stimulus
from harness.coordinator.queries import Queries
from harness.coordinator.report_resolver import ReportResolver
from harness.coordinator.session_actor import Accepted, ActorServices, SessionActor
from harness.coordinator.settings import check_patch, check_settings, with_defaults
from harness.coordinator.watching import SessionWatch
from harness.errors import (
    DataLossError,
    FailedPreconditionError,
    HarnessError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from harness.inbox import externalise, image_digests, normalise_input, validate_input, with_image_facts
from harness.llm import LLMAdapter
from harness.operations import OperationManager, is_terminal
from harness.primitives.streams import closing
from harness.session_store import SessionStore, get_blob_bytes
from harness.tools.registry import ToolRegistry
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

logger = logging.getLogger(__name__)

LOAD_RETRY_S = 0.2

FIRST_RELOAD_S = 0.05
MAX_RELOAD_S = 5.0
"""Bounds of the growing pause before a session is loaded again whose commits conflict each time."""

CLOSE_S = 5.0
"""What commits in flight may take at the end. A store that does not answer until then must not hold up the process:
whoever goes on with a session finds out what became of its last commit."""

LOAD_ATTEMPTS = 3


class LocalCoordinator(Queries):
    """Runs sessions in this process. Opened by `harness.app.open_coordinator`, which owns its tasks and closes it."""

    def __init__(
        self,
        *,
        store: SessionStore,
        managers: Mapping[str, OperationManager],
        open_adapter: Callable[[str], LLMAdapter],
        tools: ToolRegistry,
        window_tokens: Callable[[str], int],
        on_replaced: Callable[[], None],
        config: CoordinatorConfig,
        clock: Clock,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Keep the dependencies; they stay the caller's to close."""
        self._config = config
        self._tasks = tasks
        self._tools = tools
        self._hub = EphemeralHub()
        self._open_adapter = open_adapter
        self._resolver = ReportResolver(store)
        self.links = {
            name: ManagerLink(name, manager, owner=config.name, deliver=self._deliver, drop_session=self._drop_session)
            for name, manager in managers.items()
        }
        self.leases = LeaseKeeper(store, config, clock, on_replaced=self._give_up, on_lapse=self._look_after_lapse)
        environment = Environment(config=config, tools=tools, window_tokens=window_tokens)
        self._services = ActorServices(
            store=store,
            environment=environment,
            clock=clock,
            links=self.links,
            resolver=self._resolver,
        )
        self._actors: dict[str, SessionActor] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._resolving: set[asyncio.Task[None]] = set()
        self._reload_pauses_s: dict[str, float] = {}
        self._loading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._is_closing = False
        self._on_replaced = on_replaced
        super().__init__(store, self.links, self._services, self._loaded_actor)

    async def get_server_info(
        self, request: coordinator_pb2.GetServerInfoRequest
    ) -> coordinator_pb2.GetServerInfoResponse:
        """Say who answers."""
        return coordinator_pb2.GetServerInfoResponse(
            info=self.leases.server_info(), tools=self._tools.names, managers=sorted(self.links)
        )

    async def create_session(
        self, request: coordinator_pb2.CreateSessionRequest
    ) -> coordinator_pb2.CreateSessionResponse:
        """Make a session; idempotent by session ID."""
        settings = with_defaults(request.settings, self._config.default_settings, list(self.links))
        check_settings(settings, self._tools, list(self.links), self._open_adapter)
        response = await self._store.create_session(
            store_pb2.CreateSessionRequest(
                session_id=request.session_id, requested_settings=request.settings, initial_settings=settings
            )
        )
        return coordinator_pb2.CreateSessionResponse(session=response.session, duplicate=response.duplicate)

    async def submit_input(self, request: coordinator_pb2.SubmitInputRequest) -> coordinator_pb2.SubmitInputResponse:
        """Accept an EXTERNAL input; returns once it is durable."""
        message = item_pb2.Input()
        message.CopyFrom(request.input)
        if message.kind == item_pb2.INPUT_KIND_UNSPECIFIED and message.HasField("content"):
            message.kind = item_pb2.INPUT_KIND_EXTERNAL
        validate_input(message)
        if message.kind != item_pb2.INPUT_KIND_EXTERNAL:
            raise InvalidArgumentError(
                f"input {message.input_id!r} is not EXTERNAL; use the call that is named after what it asks for",
                reason="INVALID_INPUT_KIND",
            )
        accepted = await self._submit(request.session_id, message)
        return coordinator_pb2.SubmitInputResponse(
            sequence=accepted.sequence, duplicate=accepted.is_duplicate, revision=accepted.revision
        )

    async def stop_session(self, request: coordinator_pb2.StopSessionRequest) -> coordinator_pb2.StopSessionResponse:
        """Record a stop; its end is watched."""
        stop = item_pb2.Stop(mode=request.mode, reason=request.reason)
        if request.HasField("abandon_after"):
            stop.abandon_after.CopyFrom(request.abandon_after)
        accepted = await self._control(request.session_id, request.input_id, item_pb2.Control(stop=stop))
        return coordinator_pb2.StopSessionResponse(
            sequence=accepted.sequence, duplicate=accepted.is_duplicate, revision=accepted.revision
        )

    async def cancel_operation(
        self, request: coordinator_pb2.CancelOperationRequest
    ) -> coordinator_pb2.CancelOperationResponse:
        """Record the cancellation or abandonment of one operation; its end is watched."""
        if request.abandon:
            abandonment = item_pb2.AbandonOperation(operation_id=request.operation_id, reason=request.reason)
            control = item_pb2.Control(abandon_operation=abandonment)
        else:
            cancellation = item_pb2.CancelOperation(operation_id=request.operation_id, reason=request.reason)
            if request.HasField("abandon_after"):
                cancellation.abandon_after.CopyFrom(request.abandon_after)
            control = item_pb2.Control(cancel_operation=cancellation)
        try:
            accepted = await self._control(request.session_id, request.input_id, control)
        except FailedPreconditionError as error:
            if error.reason == "OPERATION_TERMINAL":
                await self._check_operation_exists(request.session_id, request.operation_id)
            raise
        return coordinator_pb2.CancelOperationResponse(
            sequence=accepted.sequence, duplicate=accepted.is_duplicate, revision=accepted.revision
        )

    async def update_settings(
        self, request: coordinator_pb2.UpdateSettingsRequest
    ) -> coordinator_pb2.UpdateSettingsResponse:
        """Record a change of settings."""
        check_patch(request.patch, self._tools, self._open_adapter)
        control = item_pb2.Control(settings=request.patch)
        accepted = await self._control(request.session_id, request.input_id, control)
        return coordinator_pb2.UpdateSettingsResponse(
            sequence=accepted.sequence, duplicate=accepted.is_duplicate, revision=accepted.revision
        )

    async def retry_turn(self, request: coordinator_pb2.RetryTurnRequest) -> coordinator_pb2.RetryTurnResponse:
        """Try the failed turn again."""
        control = item_pb2.Control(retry_turn=item_pb2.RetryTurn(omit_new=request.omit_new))
        accepted = await self._control(request.session_id, request.input_id, control)
        return coordinator_pb2.RetryTurnResponse(
            sequence=accepted.sequence, duplicate=accepted.is_duplicate, revision=accepted.revision
        )

    async def watch_session(
        self, request: coordinator_pb2.WatchSessionRequest
    ) -> AsyncIterator[coordinator_pb2.WatchSessionResponse]:
        """Yield every change after a revision, then new ones; with `until_idle` it ends at rest."""
        session = (await self._store.get_session(store_pb2.GetSessionRequest(session_id=request.session_id))).session
        if session.rest.state in {session_pb2.REST_STATE_WORKING, session_pb2.REST_STATE_WAITING_UNTIL}:
            await self._loaded_actor(request.session_id)
        watch = SessionWatch(self._store, self._hub, self.links, self._tasks, request)
        async with closing(watch.events()) as events:
            async for event in events:
                yield event
                if request.include_deltas and event.HasField("change"):
                    await self._check_deltas_are_here(request.session_id, event.change)

    async def delete_session(
        self, request: coordinator_pb2.DeleteSessionRequest
    ) -> coordinator_pb2.DeleteSessionResponse:
        """Delete a session; with force, after a HARD stop that the history records."""
        session_id = request.session_id
        try:
            session = (await self._store.get_session(store_pb2.GetSessionRequest(session_id=session_id))).session
        except FailedPreconditionError as error:
            if error.reason != "SESSION_DELETED":
                raise
            return coordinator_pb2.DeleteSessionResponse()
        is_working = session.rest.state in {session_pb2.REST_STATE_WORKING, session_pb2.REST_STATE_WAITING_UNTIL}
        if is_working and not request.force:
            raise FailedPreconditionError(
                f"session {session_id!r} is not at rest; stop it first, or delete it with force",
                reason="SESSION_NOT_AT_REST",
            )
        try:
            epoch = (
                await self._stop_for_deletion(session_id)
                if is_working
                else (await self._loaded_actor(session_id)).epoch
            )
        except DataLossError:
            if not request.force:
                raise
            # What can't be read can't be stopped either, and must not stay for ever.
            epoch = await self._epoch_of_damaged(session_id)
        await self._store.delete_session(
            store_pb2.DeleteSessionRequest(session_id=session_id, force=request.force, epoch=epoch)
        )
        self._drop_session(session_id)
        return coordinator_pb2.DeleteSessionResponse()

    async def resume(self, session_id: str) -> None:
        """Load a session so that it goes on with what it has in hand."""
        await self._loaded_actor(session_id)

    async def aclose(self) -> None:
        """End every session after its commit in flight and give the leases back; what runs, runs on."""
        self._is_closing = True
        for actor in self._actors.values():
            actor.close()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=CLOSE_S)
        for task in (*self._running.values(), *self._resolving):
            task.cancel()
        await self.leases.release_all()

    async def _control(self, session_id: str, input_id: str, control: item_pb2.Control) -> Accepted:
        message = item_pb2.Input(input_id=input_id, kind=item_pb2.INPUT_KIND_CONTROL, control=control)
        validate_input(message)
        return await self._submit(session_id, message)

    async def _submit(self, session_id: str, message: item_pb2.Input) -> Accepted:
        stored, blobs = externalise(await self._with_known_images(session_id, normalise_input(message)))
        for attempt in range(LOAD_ATTEMPTS):
            actor = await self._loaded_actor(session_id)
            try:
                accepted = await actor.submit(stored, blobs)
                return await self._as_first_accepted(actor, message) if accepted.is_duplicate else accepted
            except UnavailableError as error:
                if error.reason != "NOT_OWNER" or self._is_closing or attempt == LOAD_ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _as_first_accepted(self, actor: SessionActor, message: item_pb2.Input) -> Accepted:
        """Return what the first submission of a duplicate was told."""
        page = await self._store.list_items(
            store_pb2.ListItemsRequest(session_id=actor.session_id, input_id=message.input_id)
        )
        (item,) = page.items
        return Accepted(sequence=item.sequence, revision=item.revision, is_duplicate=True)

    async def _with_known_images(self, session_id: str, message: item_pb2.Input) -> item_pb2.Input:
        """Return an input whose images that were uploaded before are looked at: no garbage may enter a history."""
        digests = image_digests(message)
        if not digests:
            return message
        contents = {digest: await get_blob_bytes(self._store, session_id, digest) for digest in digests}
        return with_image_facts(message, contents)

    async def _check_operation_exists(self, session_id: str, operation_id: str) -> None:
        page = await self._store.list_operations(
            store_pb2.ListOperationsRequest(session_id=session_id, operation_id=operation_id)
        )
        if not page.operations:
            raise NotFoundError(
                f"session {session_id!r} has no operation {operation_id!r}", reason="OPERATION_NOT_FOUND"
            )

    async def _stop_for_deletion(self, session_id: str) -> int:
        actor = await self._loaded_actor(session_id)
        stop = item_pb2.Stop(mode=item_pb2.STOP_MODE_HARD, reason="the session is deleted", is_deletion=True)
        await self._control(session_id, f"delete-{uuid.uuid4()}", item_pb2.Control(stop=stop))
        watch = coordinator_pb2.WatchSessionRequest(session_id=session_id, until_idle=True)
        async with closing(self.watch_session(watch)) as events:
            async for _ in events:
                pass
        return actor.epoch

    async def _epoch_of_damaged(self, session_id: str) -> int:
        session = (await self._store.get_session(store_pb2.GetSessionRequest(session_id=session_id))).session
        is_ours = session.owner.incarnation_id == self.leases.incarnation.incarnation_id
        return session.epoch if is_ours else 0

    async def _loaded_actor(self, session_id: str) -> SessionActor:
        """Return the session's actor, loading it under a new lease where it isn't here."""
        async with self._loading.setdefault(session_id, asyncio.Lock()):
            known = self._actors.get(session_id)
            actor = await self._load(session_id) if known is None or known.has_ended else known
        await actor.wait_loaded()
        return actor

    async def _load(self, session_id: str) -> SessionActor:
        if self._is_closing:
            raise UnavailableError("the coordinator is shutting down", reason="DRAINING", retry_after_s=1.0)
        lease = await self.leases.acquire(session_id)
        held = self.leases.hold(session_id, lease.session.epoch)
        requests = ModelRequests(
            self._store, lambda provider: FencedAdapter(self._open_adapter(provider), held.confirm), self._hub
        )
        actor = SessionActor(self._services, lease.session, requests, held, was_taken_over=lease.was_taken_over)
        self._actors[session_id] = actor
        self._running[session_id] = self._tasks.create_task(self._run(session_id, actor))
        logger.info("session loaded", extra={"session_id": session_id, "epoch": actor.epoch})
        return actor

    async def _run(self, session_id: str, actor: SessionActor) -> None:
        began_s = self._services.clock.monotonic_s()
        try:
            await actor.run()
            if actor.is_passivated:
                await self._give_back(session_id, actor)
        finally:
            if self._actors.get(session_id) is actor:
                del self._actors[session_id]
                del self._running[session_id]
        pause_s = self._reload_pauses_s.pop(session_id, 0.0)
        if actor.is_outdated:
            has_got_on = self._services.clock.monotonic_s() - began_s > MAX_RELOAD_S
            await self._load_again(session_id, 0.0 if has_got_on else pause_s)

    async def _load_again(self, session_id: str, pause_s: float) -> None:
        """Load a session that is still this coordinator's: nobody else would go on with it."""
        self._reload_pauses_s[session_id] = min(max(2 * pause_s, FIRST_RELOAD_S), MAX_RELOAD_S)
        await asyncio.sleep(pause_s)
        while not self._is_closing:
            try:
                await self._loaded_actor(session_id)
                return
            except HarnessError as error:
                logger.warning(
                    "session could not be loaded again", extra={"session_id": session_id, "reason": error.reason}
                )
                if not isinstance(error, UnavailableError) or error.reason in ("NOT_OWNER", "DRAINING"):
                    return
                await asyncio.sleep(error.retry_after_s or LOAD_RETRY_S)

    async def _give_back(self, session_id: str, actor: SessionActor) -> None:
        """Release a session that left memory, unless it was loaded again: that one holds it under the same epoch."""
        async with self._loading.setdefault(session_id, asyncio.Lock()):
            if self._actors.get(session_id) is actor:
                await actor.release()

    async def _check_deltas_are_here(self, session_id: str, change: store_pb2.WatchSessionResponse) -> None:
        """Raise NOT_OWNER where a watched session is run by a coordinator that can be asked: the deltas are there."""
        known = self._actors.get(session_id)
        is_here = known is not None and not known.has_ended
        if is_here or not self._config.address or not change.is_current:
            return
        if change.rest.state != session_pb2.REST_STATE_WORKING:
            return
        session = (await self._store.get_session(store_pb2.GetSessionRequest(session_id=session_id))).session
        owner = session.owner
        if owner.incarnation_id != self.leases.incarnation.incarnation_id and owner.address:
            raise UnavailableError(
                f"session {session_id!r} is owned by {owner.name!r}",
                reason="NOT_OWNER",
                metadata={
                    "owner_name": owner.name,
                    "owner_incarnation_id": owner.incarnation_id,
                    "owner_address": owner.address,
                    "epoch": str(session.epoch),
                },
                retry_after_s=1.0,
            )

    def _deliver(self, session_id: str, stimulus: Stimulus) -> None:
        if not session_id:
            for every in self._actors.values():
                every.post(stimulus)
            return
        actor = self._actors.get(session_id)
        if actor is not None and not actor.has_ended:
            actor.post(stimulus)
        elif isinstance(stimulus, OperationReported) and is_terminal(stimulus.operation) and not self._is_closing:
            # Cancelled at the end: what was not acknowledged is reported again.
            task = self._tasks.create_task(self._resolve(stimulus))
            self._resolving.add(task)
            task.add_done_callback(self._resolving.discard)

    async def _resolve(self, report: OperationReported) -> None:
        """Acknowledge a report that came when its session was not here, or load the session that it is news to."""
        operation = report.operation
        link = self.links.get(operation.manager_name)
        if link is None:
            return
        try:
            outgoing = await self._resolver.resolve(operation)
            if outgoing is None and self._config.takes_runnable_sessions:
                await self._loaded_actor(operation.session_id)
        except HarnessError as error:
            logger.warning(
                "report was not resolved",
                extra={"operation_id": operation.operation_id, "reason": error.reason},
            )
            return
        if outgoing is not None:
            link.send(outgoing)

    def _drop_session(self, session_id: str) -> None:
        task = self._running.get(session_id)
        if task is not None:
            task.cancel()

    def _look_after_lapse(self) -> None:
        """Drop what others have taken meanwhile, before it is found out by a commit that is refused."""
        held = {session_id: actor.epoch for session_id, actor in self._actors.items() if not actor.has_ended}
        task = self._tasks.create_task(self._drop_lost(held))
        self._resolving.add(task)
        task.add_done_callback(self._resolving.discard)

    async def _drop_lost(self, held: Mapping[str, int]) -> None:
        for session_id, epoch in held.items():
            actor = self._actors.get(session_id)
            if actor is None or actor.epoch != epoch:
                continue
            try:
                is_lost = await self.leases.owner_epoch(session_id) != epoch
            except HarnessError:
                is_lost = True  # deleted, say; the next load tells
            if is_lost and self._actors.get(session_id) is actor:
                logger.warning("session was taken by another", extra={"session_id": session_id, "epoch": epoch})
                self._drop_session(session_id)

    def _give_up(self) -> None:
        self._on_replaced()
        for task in self._running.values():
            task.cancel()
