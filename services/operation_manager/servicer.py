"""OperationManagerService over any operation manager: each method passes a message on. Owns no state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from harness.errors import InvalidArgumentError
from harness.operations import OperationManager
from harness.primitives.messages import find_unknown_field
from services._server.server import Service
from services._server.validation import MIB, MethodRules
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2_grpc as manager_grpc

Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME: Final = manager_pb2.DESCRIPTOR.services_by_name["OperationManagerService"].full_name

RULES: Final = MethodRules(
    # A command may be as large as the commit that holds it. A client halves an add that is refused for its size.
    max_request_bytes={"AddOperations": 48 * MIB},
    strict=frozenset({"CancelOperation", "AcknowledgeUpdates", "UploadWorkspace"}),
    # Output is resumed from its offset as a watch is from what is unsettled.
    endless=frozenset({"WatchOperations", "ReadOutput"}),
    conversations=frozenset({"UploadWorkspace"}),
)


class OperationManagerServicer(manager_grpc.OperationManagerServiceServicer):
    """Serves one manager."""

    def __init__(self, manager: OperationManager) -> None:
        """Take the manager; it stays the caller's to close, after the server."""
        self._manager = manager

    async def GetServerInfo(
        self, request: manager_pb2.GetServerInfoRequest, context: Context
    ) -> manager_pb2.GetServerInfoResponse:
        return await self._manager.get_server_info(request)

    async def AddOperations(
        self, request: manager_pb2.AddOperationsRequest, context: Context
    ) -> manager_pb2.AddOperationsResponse:
        # Inside an assignment it is the refusal of that one, by the manager; here it concerns them all.
        path = find_unknown_field(request)
        if path is not None and not path.startswith("assignments["):
            raise InvalidArgumentError(
                f"the request has {path}, which this release does not know",
                reason="UNKNOWN_FIELDS",
                metadata={"field": path},
            )
        return await self._manager.add_operations(request)

    async def CancelOperation(
        self, request: manager_pb2.CancelOperationRequest, context: Context
    ) -> manager_pb2.CancelOperationResponse:
        return await self._manager.cancel_operation(request)

    async def GetOperation(
        self, request: manager_pb2.GetOperationRequest, context: Context
    ) -> manager_pb2.GetOperationResponse:
        return await self._manager.get_operation(request)

    async def ListOperations(
        self, request: manager_pb2.ListOperationsRequest, context: Context
    ) -> manager_pb2.ListOperationsResponse:
        return await self._manager.list_operations(request)

    def WatchOperations(
        self, request: manager_pb2.WatchOperationsRequest, context: Context
    ) -> AsyncIterator[manager_pb2.WatchOperationsResponse]:
        return self._manager.watch_operations(request)

    async def AcknowledgeUpdates(
        self, request: manager_pb2.AcknowledgeUpdatesRequest, context: Context
    ) -> manager_pb2.AcknowledgeUpdatesResponse:
        return await self._manager.acknowledge_updates(request)

    def ReadOutput(
        self, request: manager_pb2.ReadOutputRequest, context: Context
    ) -> AsyncIterator[manager_pb2.ReadOutputResponse]:
        return self._manager.read_output(request)

    def UploadWorkspace(
        self, request_iterator: AsyncIterator[manager_pb2.UploadWorkspaceRequest], context: Context
    ) -> AsyncIterator[manager_pb2.UploadWorkspaceResponse]:
        return self._manager.upload_workspace(request_iterator)

    def DownloadWorkspace(
        self, request: manager_pb2.DownloadWorkspaceRequest, context: Context
    ) -> AsyncIterator[manager_pb2.DownloadWorkspaceResponse]:
        return self._manager.download_workspace(request)


def manager_service(manager: OperationManager) -> Service:
    """Return the service of a manager, for `serve`."""
    servicer = OperationManagerServicer(manager)
    return Service(
        name=SERVICE_NAME,
        register=lambda server: manager_grpc.add_OperationManagerServiceServicer_to_server(servicer, server),
        rules=RULES,
    )
