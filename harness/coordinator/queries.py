"""The coordinator's answers that change nothing of a session that runs: reads, and what the store or a manager does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from harness import context_builder
from harness.clock import timestamp
from harness.context_builder.entries import Totals
from harness.context_builder.prompt import build_prompt, decode_prompt, encode_prompt
from harness.coordinator.loading import load_state
from harness.coordinator.manager_link import ManagerLink
from harness.coordinator.session_actor import ActorServices, SessionActor
from harness.coordinator.settings import asked_model
from harness.coordinator.state import SessionState
from harness.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from harness.session_store import SessionStore, get_blob_bytes
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


class Queries:
    """The reading half of a coordinator in this process."""

    def __init__(
        self,
        store: SessionStore,
        links: Mapping[str, ManagerLink],
        services: ActorServices,
        load_actor: Callable[[str], Awaitable[SessionActor]],
    ) -> None:
        """Keep the dependencies; they stay the caller's."""
        self._store = store
        self._links = links
        self._environment = services.environment
        self._clock = services.clock
        self._load_actor = load_actor

    async def get_session(self, request: coordinator_pb2.GetSessionRequest) -> coordinator_pb2.GetSessionResponse:
        """Return a session, its settings and what it has used."""
        state, session = await self._read_state(request.session_id)
        response = coordinator_pb2.GetSessionResponse(
            session=session, settings=state.settings, turns=state.turns, usage=state.usage
        )
        if request.with_storage:
            wish = store_pb2.GetSessionRequest(session_id=request.session_id, with_storage=True)
            response.storage.CopyFrom((await self._store.get_session(wish)).storage)
        return response

    async def list_sessions(self, request: coordinator_pb2.ListSessionsRequest) -> coordinator_pb2.ListSessionsResponse:
        """Return a page of sessions."""
        page = await self._store.list_sessions(
            store_pb2.ListSessionsRequest(
                page_size=request.page_size,
                page_token=request.page_token,
                id_prefix=request.id_prefix,
                states=request.states,
            )
        )
        return coordinator_pb2.ListSessionsResponse(sessions=page.sessions, next_page_token=page.next_page_token)

    async def fork_session(self, request: coordinator_pb2.ForkSessionRequest) -> coordinator_pb2.ForkSessionResponse:
        """Make a fork; idempotent."""
        response = await self._store.fork_session(
            store_pb2.ForkSessionRequest(
                request_id=request.request_id,
                parent_session_id=request.parent_session_id,
                session_id=request.session_id,
                cut_sequence=request.cut_sequence,
            )
        )
        return coordinator_pb2.ForkSessionResponse(session=response.session, duplicate=response.duplicate)

    async def build_context(self, request: coordinator_pb2.BuildContextRequest) -> coordinator_pb2.BuildContextResponse:
        """Return what the model would be sent now, with the report. Changes nothing and calls nobody."""
        state, _ = await self._read_state(request.session_id)
        prompt, blob = await self._prompt(state)
        settings = state.settings
        provider, model = asked_model(state)
        built = context_builder.next_request(state.context, provider=provider, model=model, prompt_digest=blob.digest)
        tokens = context_builder.estimated_tokens(state.context, built, blob)
        response = coordinator_pb2.BuildContextResponse(
            entries=built.entries,
            totals=context_builder.totals_with_prompt(built, blob).message(tokens),
            changes=[*state.context.recorded_changes, *built.changes],
            context_digest=built.digest,
            window_tokens=self._environment.window_tokens(model),
            settings=settings,
            build_time=timestamp(self._clock.now()),
        )
        if prompt is not None:
            response.prompt.CopyFrom(prompt)
            response.report.append(_prompt_entry(blob))
        for placed in built.prefix.entries:
            totals = placed.totals
            response.report.add(
                source_sequence=placed.entry.source_sequence,
                kind=placed.kind,
                call_id=placed.call_id,
                text_bytes=totals.text_bytes,
                images=totals.images,
                estimated_tokens=totals.estimated_tokens,
            )
        return response

    async def list_items(self, request: coordinator_pb2.ListItemsRequest) -> coordinator_pb2.ListItemsResponse:
        """Return a page of items."""
        return coordinator_pb2.ListItemsResponse(page=await self._store.list_items(request.request))

    async def list_operations(
        self, request: coordinator_pb2.ListOperationsRequest
    ) -> coordinator_pb2.ListOperationsResponse:
        """Return a page of operations in their newest recorded state."""
        return coordinator_pb2.ListOperationsResponse(page=await self._store.list_operations(request.request))

    async def read_output(
        self, request: coordinator_pb2.ReadOutputRequest
    ) -> AsyncIterator[coordinator_pb2.ReadOutputResponse]:
        """Yield an operation's output in pieces."""
        page = await self._store.list_operations(
            store_pb2.ListOperationsRequest(session_id=request.session_id, operation_id=request.request.operation_id)
        )
        if not page.operations:
            raise NotFoundError(
                f"session {request.session_id!r} has no operation {request.request.operation_id!r}",
                reason="OPERATION_NOT_FOUND",
            )
        link = self._link(page.operations[0].manager_name)
        async for piece in link.manager.read_output(request.request):
            yield coordinator_pb2.ReadOutputResponse(piece=piece)

    async def put_blob(
        self, requests: AsyncIterator[coordinator_pb2.PutBlobRequest]
    ) -> coordinator_pb2.PutBlobResponse:
        """Store a blob for a session."""

        async def frames() -> AsyncIterator[store_pb2.PutBlobRequest]:
            async for request in requests:
                yield request.request

        return coordinator_pb2.PutBlobResponse(blob=(await self._store.put_blob(frames())).blob)

    async def get_blob(self, request: coordinator_pb2.GetBlobRequest) -> AsyncIterator[coordinator_pb2.GetBlobResponse]:
        """Yield a blob in pieces."""
        async for piece in self._store.get_blob(request.request):
            yield coordinator_pb2.GetBlobResponse(piece=piece)

    async def export_session(
        self, request: coordinator_pb2.ExportSessionRequest
    ) -> AsyncIterator[coordinator_pb2.ExportSessionResponse]:
        """Yield one consistent revision of a session."""
        exported = self._store.export_session(store_pb2.ExportSessionRequest(session_id=request.session_id))
        async for response in exported:
            yield coordinator_pb2.ExportSessionResponse(records=response.records)

    async def import_session(
        self, requests: AsyncIterator[coordinator_pb2.ImportSessionRequest]
    ) -> coordinator_pb2.ImportSessionResponse:
        """Make a session from an export."""

        async def frames() -> AsyncIterator[store_pb2.ImportSessionRequest]:
            async for request in requests:
                yield store_pb2.ImportSessionRequest(session_id=request.session_id, records=request.records)

        response = await self._store.import_session(frames())
        return coordinator_pb2.ImportSessionResponse(session=response.session)

    async def upload_workspace(
        self, requests: AsyncIterator[coordinator_pb2.UploadWorkspaceRequest]
    ) -> AsyncIterator[coordinator_pb2.UploadWorkspaceResponse]:
        """Put files into a session's workspace."""
        first = await anext(requests, None)
        if first is None or not first.session_id:
            raise InvalidArgumentError("the first message must name the session", reason="SESSION_REQUIRED")
        state, _ = await self._read_state(first.session_id)

        async def frames() -> AsyncIterator[manager_pb2.UploadWorkspaceRequest]:
            begin = manager_pb2.UploadWorkspaceRequest()
            begin.CopyFrom(first.request)
            begin.workspace = state.settings.workspace
            yield begin
            async for request in requests:
                yield request.request

        link = self._link(state.settings.manager_name)
        async for progress in link.manager.upload_workspace(frames()):
            yield coordinator_pb2.UploadWorkspaceResponse(progress=progress)

    async def download_workspace(
        self, request: coordinator_pb2.DownloadWorkspaceRequest
    ) -> AsyncIterator[coordinator_pb2.DownloadWorkspaceResponse]:
        """Yield the files of a session's workspace."""
        state, _ = await self._read_state(request.session_id)
        wanted = manager_pb2.DownloadWorkspaceRequest()
        wanted.CopyFrom(request.request)
        wanted.workspace = state.settings.workspace
        link = self._link(state.settings.manager_name)
        async for part in link.manager.download_workspace(wanted):
            yield coordinator_pb2.DownloadWorkspaceResponse(part=part)

    async def _read_state(self, session_id: str) -> tuple[SessionState, session_pb2.Session]:
        """Return a session as it stands, without taking its lease: a read must not start anything."""
        session = (await self._store.get_session(store_pb2.GetSessionRequest(session_id=session_id))).session
        return await load_state(self._store, session), session

    async def _prompt(self, state: SessionState) -> tuple[llm_pb2.Prompt | None, llm_pb2.BlobRef]:
        """Return the prompt that the next turn would send, and its blob; None before the workspace was inspected."""
        if state.prompt is not None:
            data = await get_blob_bytes(self._store, state.session_id, state.prompt.digest)
            return decode_prompt(data), state.prompt
        inspection = state.inspection
        if inspection is None:
            return None, llm_pb2.BlobRef()
        prompt = build_prompt(
            system_prompt=state.settings.system_prompt,
            tools=self._environment.tools.offered(state.settings.enabled_tools, inspection),
            inspection=inspection,
            heartbeat_interval_s=self._environment.config.heartbeat_interval_s,
        )
        return prompt, encode_prompt(prompt)[0]

    def _link(self, manager_name: str) -> ManagerLink:
        link = self._links.get(manager_name)
        if link is None:
            raise FailedPreconditionError(
                f"operation manager {manager_name!r} is not connected to this coordinator", reason="UNKNOWN_MANAGER"
            )
        return link


def _prompt_entry(blob: llm_pb2.BlobRef) -> coordinator_pb2.ContextReportEntry:
    totals = Totals(text_bytes=blob.size_bytes)
    return coordinator_pb2.ContextReportEntry(
        kind="prompt", text_bytes=totals.text_bytes, estimated_tokens=totals.estimated_tokens
    )
