"""`CoordinatorService` over any coordinator: a method passes a message on, to a session's owner where need be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import grpc

from harness.coordinator import Coordinator
from harness.errors import UnavailableError
from harness.primitives.streams import closing
from services._server.server import Service
from services._server.validation import MIB, MethodRules
from services.coordinator.forwarding import Forwarder
from services.coordinator.session_scope import named, named_import, narrowed
from services.coordinator.watch_route import watch_anywhere
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc

SERVICE_NAME: Final = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

RULES: Final = MethodRules(
    max_request_bytes={
        # Images may come within an input; see the limits of the schema's comments.
        "SubmitInput": 16 * MIB,
        "PutBlob": 1 * MIB,
        # One record holds one item, of any size that a commit may have.
        "ImportSession": 34 * MIB,
        "UploadWorkspace": 1 * MIB,
    },
    strict=frozenset(
        {
            "CreateSession",
            "SubmitInput",
            "DeleteSession",
            "ForkSession",
            "StopSession",
            "CancelOperation",
            "UpdateSettings",
            "RetryTurn",
            "PutBlob",
            "ImportSession",
            "UploadWorkspace",
        }
    ),
    # Output is resumed from its offset as a watch is from its revision.
    endless=frozenset({"WatchSession", "ReadOutput"}),
    conversations=frozenset({"UploadWorkspace"}),
)


def service_of(coordinator: Coordinator, providers: Sequence[str], forwarder: Forwarder) -> Service:
    """Return what a server has to know to serve a coordinator whose environment sets up these providers."""
    servicer = CoordinatorServicer(coordinator, providers, forwarder)
    return Service(
        name=SERVICE_NAME,
        register=lambda server: coordinator_grpc.add_CoordinatorServiceServicer_to_server(servicer, server),
        rules=RULES,
    )


class CoordinatorServicer(coordinator_grpc.CoordinatorServiceServicer):
    """Serves one coordinator."""

    def __init__(self, coordinator: Coordinator, providers: Sequence[str], forwarder: Forwarder) -> None:
        """Take the coordinator and the forwarder; both stay the caller's to close, after the server."""
        self._coordinator = coordinator
        self._providers = tuple(providers)
        self._forwarder = forwarder

    async def GetServerInfo(
        self, request: coordinator_pb2.GetServerInfoRequest, context: Context
    ) -> coordinator_pb2.GetServerInfoResponse:
        response = coordinator_pb2.GetServerInfoResponse()
        response.CopyFrom(await self._coordinator.get_server_info(request))
        response.providers.extend(self._providers)
        return response

    async def CreateSession(
        self, request: coordinator_pb2.CreateSessionRequest, context: Context
    ) -> coordinator_pb2.CreateSessionResponse:
        return await self._coordinator.create_session(named(request))

    async def SubmitInput(
        self, request: coordinator_pb2.SubmitInputRequest, context: Context
    ) -> coordinator_pb2.SubmitInputResponse:
        return await self._by_owner("SubmitInput", self._coordinator.submit_input, request, context)

    async def WatchSession(
        self, request: coordinator_pb2.WatchSessionRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.WatchSessionResponse]:
        async with closing(watch_anywhere(self._coordinator, self._forwarder, request, context)) as responses:
            async for response in responses:
                yield response

    async def GetSession(
        self, request: coordinator_pb2.GetSessionRequest, context: Context
    ) -> coordinator_pb2.GetSessionResponse:
        return await self._coordinator.get_session(request)

    async def ListSessions(
        self, request: coordinator_pb2.ListSessionsRequest, context: Context
    ) -> coordinator_pb2.ListSessionsResponse:
        seen = narrowed(request)
        return coordinator_pb2.ListSessionsResponse() if seen is None else await self._coordinator.list_sessions(seen)

    async def DeleteSession(
        self, request: coordinator_pb2.DeleteSessionRequest, context: Context
    ) -> coordinator_pb2.DeleteSessionResponse:
        return await self._by_owner("DeleteSession", self._coordinator.delete_session, request, context)

    async def ForkSession(
        self, request: coordinator_pb2.ForkSessionRequest, context: Context
    ) -> coordinator_pb2.ForkSessionResponse:
        return await self._coordinator.fork_session(named(request))

    async def StopSession(
        self, request: coordinator_pb2.StopSessionRequest, context: Context
    ) -> coordinator_pb2.StopSessionResponse:
        return await self._by_owner("StopSession", self._coordinator.stop_session, request, context)

    async def CancelOperation(
        self, request: coordinator_pb2.CancelOperationRequest, context: Context
    ) -> coordinator_pb2.CancelOperationResponse:
        return await self._by_owner("CancelOperation", self._coordinator.cancel_operation, request, context)

    async def UpdateSettings(
        self, request: coordinator_pb2.UpdateSettingsRequest, context: Context
    ) -> coordinator_pb2.UpdateSettingsResponse:
        return await self._by_owner("UpdateSettings", self._coordinator.update_settings, request, context)

    async def RetryTurn(
        self, request: coordinator_pb2.RetryTurnRequest, context: Context
    ) -> coordinator_pb2.RetryTurnResponse:
        return await self._by_owner("RetryTurn", self._coordinator.retry_turn, request, context)

    async def BuildContext(
        self, request: coordinator_pb2.BuildContextRequest, context: Context
    ) -> coordinator_pb2.BuildContextResponse:
        return await self._coordinator.build_context(request)

    async def ListItems(
        self, request: coordinator_pb2.ListItemsRequest, context: Context
    ) -> coordinator_pb2.ListItemsResponse:
        return await self._coordinator.list_items(request)

    async def ListOperations(
        self, request: coordinator_pb2.ListOperationsRequest, context: Context
    ) -> coordinator_pb2.ListOperationsResponse:
        return await self._coordinator.list_operations(request)

    def ReadOutput(
        self, request: coordinator_pb2.ReadOutputRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.ReadOutputResponse]:
        return self._coordinator.read_output(request)

    async def PutBlob(
        self, request_iterator: AsyncIterator[coordinator_pb2.PutBlobRequest], context: Context
    ) -> coordinator_pb2.PutBlobResponse:
        return await self._coordinator.put_blob(request_iterator)

    def GetBlob(
        self, request: coordinator_pb2.GetBlobRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.GetBlobResponse]:
        return self._coordinator.get_blob(request)

    def ExportSession(
        self, request: coordinator_pb2.ExportSessionRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.ExportSessionResponse]:
        return self._coordinator.export_session(request)

    async def ImportSession(
        self, request_iterator: AsyncIterator[coordinator_pb2.ImportSessionRequest], context: Context
    ) -> coordinator_pb2.ImportSessionResponse:
        return await self._coordinator.import_session(named_import(request_iterator))

    def UploadWorkspace(
        self, request_iterator: AsyncIterator[coordinator_pb2.UploadWorkspaceRequest], context: Context
    ) -> AsyncIterator[coordinator_pb2.UploadWorkspaceResponse]:
        return self._coordinator.upload_workspace(request_iterator)

    def DownloadWorkspace(
        self, request: coordinator_pb2.DownloadWorkspaceRequest, context: Context
    ) -> AsyncIterator[coordinator_pb2.DownloadWorkspaceResponse]:
        return self._coordinator.download_workspace(request)

    async def _by_owner(
        self, name: str, method: Callable[[RequestT], Awaitable[ResponseT]], request: RequestT, context: Context
    ) -> ResponseT:
        """Answer a call, or let the coordinator that owns the session do it."""
        try:
            return await method(request)
        except UnavailableError as error:
            owner = self._forwarder.owner(error, context)
            if owner is None:
                raise
            response: ResponseT = await self._forwarder.call(owner, name, request, context, error)
            return response
