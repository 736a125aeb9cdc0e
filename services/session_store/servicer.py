"""`SessionStoreService` over any session store; a thin skin that decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from harness.session_store import SessionStore
from services._server.server import Service
from services._server.validation import MIB, MethodRules
from services.session_store.commit_conversation import CommitConversation
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2_grpc as store_grpc

SERVICE_NAME: Final = store_pb2.DESCRIPTOR.services_by_name["SessionStoreService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]

# The store itself refuses unknown fields and versions, so no method is named strict here. A commit has at most 32 MiB,
# with some room for what says so; one message of the stream may carry one of that size.
RULES: Final = MethodRules(
    max_request_bytes={
        "Commit": 33 * MIB,
        "CommitStream": 34 * MIB,
        "CreateSession": 16 * MIB,
        # A single item of any size may have been committed, and is imported as one record.
        "ImportSession": 34 * MIB,
        "PutBlob": 1 * MIB,
    },
    endless=frozenset({"WatchSession", "WatchRunnable", "WatchTokens"}),
    conversations=frozenset({"CommitStream"}),
)


class SessionStoreServicer(store_grpc.SessionStoreServiceServicer):
    """Answers calls from a store."""

    def __init__(self, store: SessionStore, tasks: asyncio.TaskGroup) -> None:
        self._store = store
        self._tasks = tasks

    async def GetServerInfo(
        self, request: store_pb2.GetServerInfoRequest, context: Context
    ) -> store_pb2.GetServerInfoResponse:
        return await self._store.get_server_info(request)

    async def CreateSession(
        self, request: store_pb2.CreateSessionRequest, context: Context
    ) -> store_pb2.CreateSessionResponse:
        return await self._store.create_session(request)

    async def GetSession(self, request: store_pb2.GetSessionRequest, context: Context) -> store_pb2.GetSessionResponse:
        return await self._store.get_session(request)

    async def ListSessions(
        self, request: store_pb2.ListSessionsRequest, context: Context
    ) -> store_pb2.ListSessionsResponse:
        return await self._store.list_sessions(request)

    async def DeleteSession(
        self, request: store_pb2.DeleteSessionRequest, context: Context
    ) -> store_pb2.DeleteSessionResponse:
        return await self._store.delete_session(request)

    async def ForkSession(
        self, request: store_pb2.ForkSessionRequest, context: Context
    ) -> store_pb2.ForkSessionResponse:
        return await self._store.fork_session(request)

    async def Commit(self, request: store_pb2.CommitRequest, context: Context) -> store_pb2.CommitResponse:
        return await self._store.commit(request)

    def CommitStream(
        self, request_iterator: AsyncIterator[store_pb2.CommitStreamRequest], context: Context
    ) -> AsyncIterator[store_pb2.CommitStreamResponse]:
        return CommitConversation(self._store, self._tasks).run(request_iterator)

    async def ListItems(self, request: store_pb2.ListItemsRequest, context: Context) -> store_pb2.ListItemsResponse:
        return await self._store.list_items(request)

    async def ListOperations(
        self, request: store_pb2.ListOperationsRequest, context: Context
    ) -> store_pb2.ListOperationsResponse:
        return await self._store.list_operations(request)

    def WatchSession(
        self, request: store_pb2.WatchSessionRequest, context: Context
    ) -> AsyncIterator[store_pb2.WatchSessionResponse]:
        return self._store.watch_session(request)

    def WatchRunnable(
        self, request: store_pb2.WatchRunnableRequest, context: Context
    ) -> AsyncIterator[store_pb2.WatchRunnableResponse]:
        return self._store.watch_runnable(request)

    async def AcquireLease(
        self, request: store_pb2.AcquireLeaseRequest, context: Context
    ) -> store_pb2.AcquireLeaseResponse:
        return await self._store.acquire_lease(request)

    async def RenewLease(self, request: store_pb2.RenewLeaseRequest, context: Context) -> store_pb2.RenewLeaseResponse:
        return await self._store.renew_lease(request)

    async def ReleaseLease(
        self, request: store_pb2.ReleaseLeaseRequest, context: Context
    ) -> store_pb2.ReleaseLeaseResponse:
        return await self._store.release_lease(request)

    def ExportSession(
        self, request: store_pb2.ExportSessionRequest, context: Context
    ) -> AsyncIterator[store_pb2.ExportSessionResponse]:
        return self._store.export_session(request)

    async def ImportSession(
        self, request_iterator: AsyncIterator[store_pb2.ImportSessionRequest], context: Context
    ) -> store_pb2.ImportSessionResponse:
        return await self._store.import_session(request_iterator)

    async def PutBlob(
        self, request_iterator: AsyncIterator[store_pb2.PutBlobRequest], context: Context
    ) -> store_pb2.PutBlobResponse:
        return await self._store.put_blob(request_iterator)

    def GetBlob(self, request: store_pb2.GetBlobRequest, context: Context) -> AsyncIterator[store_pb2.GetBlobResponse]:
        return self._store.get_blob(request)

    async def CreateToken(
        self, request: store_pb2.CreateTokenRequest, context: Context
    ) -> store_pb2.CreateTokenResponse:
        return await self._store.create_token(request)

    async def ListTokens(self, request: store_pb2.ListTokensRequest, context: Context) -> store_pb2.ListTokensResponse:
        return await self._store.list_tokens(request)

    async def RevokeToken(
        self, request: store_pb2.RevokeTokenRequest, context: Context
    ) -> store_pb2.RevokeTokenResponse:
        return await self._store.revoke_token(request)

    def WatchTokens(
        self, request: store_pb2.WatchTokensRequest, context: Context
    ) -> AsyncIterator[store_pb2.WatchTokensResponse]:
        return self._store.watch_tokens(request)


@asynccontextmanager
async def store_service(store: SessionStore) -> AsyncIterator[Service]:
    """Yield the service over a store; commits that streams left behind are waited for at the end."""
    async with asyncio.TaskGroup() as tasks:
        servicer = SessionStoreServicer(store, tasks)
        yield Service(
            name=SERVICE_NAME,
            register=lambda server: store_grpc.add_SessionStoreServiceServicer_to_server(servicer, server),
            rules=RULES,
        )
