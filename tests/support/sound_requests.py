"""A sound request of each method of the coordinator, for tests that spoil one."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from google.protobuf.message import Message

from tests.support.world import text_message
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


def sound_requests(export: coordinator_pb2.ImportSessionRequest) -> dict[str, Callable[[], Message]]:
    """Return what makes a sound request of each method, under fresh IDs."""

    def fresh() -> str:
        return f"id-{uuid.uuid4()}"

    def imported() -> Message:
        request = coordinator_pb2.ImportSessionRequest()
        request.CopyFrom(export)
        request.session_id = fresh()
        return request

    operation_id = next(record.operation.operation_id for record in export.records if record.operation.call_id)
    digest = next(record.blob_chunk.blob.digest for record in export.records if record.HasField("blob_chunk"))
    settings = session_pb2.SessionSettings(provider="scripted", model="m1", workspace="/tmp")
    page = store_pb2.ListItemsRequest(session_id="s1")
    operations = store_pb2.ListOperationsRequest(session_id="s1")
    blob = store_pb2.PutBlobRequest(
        session_id="s1", blob=llm_pb2.BlobRef(digest="0" * 64, size_bytes=3, media_type="text/plain"), data=b"abc"
    )
    download = manager_pb2.DownloadWorkspaceRequest()
    return {
        "GetServerInfo": coordinator_pb2.GetServerInfoRequest,
        "CreateSession": lambda: coordinator_pb2.CreateSessionRequest(session_id=fresh(), settings=settings),
        "SubmitInput": lambda: coordinator_pb2.SubmitInputRequest(session_id="s1", input=text_message(fresh(), "hi")),
        "WatchSession": lambda: coordinator_pb2.WatchSessionRequest(session_id="s1"),
        "GetSession": lambda: coordinator_pb2.GetSessionRequest(session_id="s1"),
        "ListSessions": coordinator_pb2.ListSessionsRequest,
        "DeleteSession": lambda: coordinator_pb2.DeleteSessionRequest(session_id="victim"),
        "ForkSession": lambda: coordinator_pb2.ForkSessionRequest(
            request_id=fresh(), session_id=fresh(), parent_session_id="s1"
        ),
        "StopSession": lambda: coordinator_pb2.StopSessionRequest(
            session_id="s1", input_id=fresh(), mode=item_pb2.STOP_MODE_WHEN_IDLE
        ),
        "CancelOperation": lambda: coordinator_pb2.CancelOperationRequest(
            session_id="s1", input_id=fresh(), operation_id=operation_id
        ),
        "UpdateSettings": lambda: coordinator_pb2.UpdateSettingsRequest(
            session_id="s1", input_id=fresh(), patch=session_pb2.SettingsPatch(effort="low")
        ),
        "RetryTurn": lambda: coordinator_pb2.RetryTurnRequest(session_id="s1", input_id=fresh()),
        "BuildContext": lambda: coordinator_pb2.BuildContextRequest(session_id="s1"),
        "ListItems": lambda: coordinator_pb2.ListItemsRequest(request=page),
        "ListOperations": lambda: coordinator_pb2.ListOperationsRequest(request=operations),
        "ReadOutput": lambda: coordinator_pb2.ReadOutputRequest(
            session_id="s1",
            request=manager_pb2.ReadOutputRequest(operation_id=operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT),
        ),
        "PutBlob": lambda: coordinator_pb2.PutBlobRequest(request=blob),
        "GetBlob": lambda: coordinator_pb2.GetBlobRequest(
            request=store_pb2.GetBlobRequest(session_id="s1", digest=digest)
        ),
        "ExportSession": lambda: coordinator_pb2.ExportSessionRequest(session_id="s1"),
        "ImportSession": imported,
        "UploadWorkspace": lambda: coordinator_pb2.UploadWorkspaceRequest(
            session_id="s1", request=manager_pb2.UploadWorkspaceRequest()
        ),
        "DownloadWorkspace": lambda: coordinator_pb2.DownloadWorkspaceRequest(session_id="s1", request=download),
    }


async def exported(stub: coordinator_grpc.CoordinatorServiceAsyncStub) -> coordinator_pb2.ImportSessionRequest:
    whole = coordinator_pb2.ImportSessionRequest()
    async for response in stub.ExportSession(coordinator_pb2.ExportSessionRequest(session_id="s1")):
        whole.records.extend(response.records)
    return whole
