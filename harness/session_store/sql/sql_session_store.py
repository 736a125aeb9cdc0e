"""`SqlSessionStore`: what every session store over SQL does with a call, whichever the engine.

Checks requests, runs the functions of the modules of statements through the engine's writer and readers, and wakes who
watches. Everything that decides is elsewhere: what a history must satisfy in `invariants`, what each call does in
the modules beside this one, whose statements both engines run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

from google.protobuf.message import Message

from harness.clock import Clock
from harness.session_store import (
    ITEM_SCHEMA_VERSION,
    OPERATION_SCHEMA_VERSION,
    SESSION_FORMAT_VERSION,
    records,
    validation,
)
from harness.session_store.sql import (
    blobs,
    commits,
    exports,
    forks,
    imports,
    leases,
    reads,
    retention,
    rows,
    sessions,
    storage_report,
    tokens,
    watches,
)
from harness.session_store.sql.runnable import RunnableSessions
from harness.session_store.sql.sql import Connection, Reader, Writer
from unreal_agent.server.v1 import server_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

_MAX_EXPORTS: Final = 4
"""Exports at once: each holds a state of the store, whose log can't be cut meanwhile."""


def _random_id() -> str:
    return secrets.token_hex(10)


def _random_secret() -> str:
    return f"ua_{secrets.token_urlsafe(32)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store is opened."""

    name: str = "session-store"
    """What it calls itself."""

    release: str = ""
    """Release that it says it is."""

    max_size_bytes: int | None = None
    """Bound of the database file; beyond it writes fail with STORAGE_FULL. None: the disk's."""

    make_id: Callable[[], str] = _random_id
    """Makes session UIDs and token IDs, unique for ever."""

    make_secret: Callable[[], str] = _random_secret
    """Makes secrets of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a store has done since it was opened, and what it has in hand."""

    transactions: int
    """Durable transactions; with many writers far fewer than changes."""

    changes: int
    waiting: int
    """Changes that wait for the next transaction."""

    watchers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a store runs on. Its owner starts and ends the tasks of the parts."""

    store_id: str
    readers: Reader
    writer: Writer

    once_writer: Writer
    """For changes that can't be told from a repetition: they are never run again once they may be durable."""

    snapshot: Callable[[], AbstractAsyncContextManager[Reader]]
    """Holds one state of the store for several reads."""

    leases_of: Callable[[Connection], leases.Leases]
    """The leases as a transaction sees them."""

    hub: watches.Hub
    runnable: RunnableSessions
    retention: retention.Retention


class SqlSessionStore:
    """The calls of a session store over an engine. Its subclasses open and close it."""

    def __init__(self, engine: Engine, clock: Clock, options: StoreOptions) -> None:
        self._clock = clock
        self._options = options
        self._store_id = engine.store_id
        self._readers = engine.readers
        self._writer = engine.writer
        self._once_writer = engine.once_writer
        self._snapshot = engine.snapshot
        self._leases_of = engine.leases_of
        self._hub = engine.hub
        self._runnable = engine.runnable
        self._retention = engine.retention
        self._exports = asyncio.Semaphore(_MAX_EXPORTS)

    async def get_server_info(self, request: store_pb2.GetServerInfoRequest) -> store_pb2.GetServerInfoResponse:
        versions = {
            "session_format": SESSION_FORMAT_VERSION,
            "item": ITEM_SCHEMA_VERSION,
            "operation": OPERATION_SCHEMA_VERSION,
            "export": exports.EXPORT_VERSION,
        }
        info = server_pb2.ServerInfo(
            component="session-store",
            name=self._options.name,
            instance_id=self._store_id,
            release=self._options.release,
            versions=[
                server_pb2.VersionRange(kind=kind, min_read=1, max_read=version, write=version)
                for kind, version in versions.items()
            ],
        )
        return store_pb2.GetServerInfoResponse(info=info)

    async def create_session(self, request: store_pb2.CreateSessionRequest) -> store_pb2.CreateSessionResponse:
        _check_known(request)
        session_uid = self._options.make_id()
        if not request.session_id:
            named = store_pb2.CreateSessionRequest()
            named.CopyFrom(request)
            named.session_id = session_uid
            request = named
        validation.check_session_id(request.session_id)
        return await self._writer.write(
            lambda connection: sessions.create(
                connection, request, session_uid, self._clock.now(), self._is_alive(connection)
            )
        )

    async def get_session(self, request: store_pb2.GetSessionRequest) -> store_pb2.GetSessionResponse:
        session = await self._readers.read(
            lambda connection: sessions.get(connection, request.session_id, self._is_alive(connection))
        )
        response = store_pb2.GetSessionResponse(session=session)
        if request.with_storage:
            report = partial(storage_report.report, session_id=request.session_id)
            response.storage.CopyFrom(await self._readers.read(report))
        return response

    async def list_sessions(self, request: store_pb2.ListSessionsRequest) -> store_pb2.ListSessionsResponse:
        return await self._readers.read(
            lambda connection: sessions.list_page(connection, request, self._is_alive(connection))
        )

    async def delete_session(self, request: store_pb2.DeleteSessionRequest) -> store_pb2.DeleteSessionResponse:
        _check_known(request)

        def tell(_: None) -> None:
            self._hub.notify(request.session_id)
            self._retention.notify()
            self._runnable_changed()

        await self._writer.write(
            lambda connection: sessions.delete(connection, request, self._clock.now(), self._is_alive(connection)), tell
        )
        return store_pb2.DeleteSessionResponse()

    async def fork_session(self, request: store_pb2.ForkSessionRequest) -> store_pb2.ForkSessionResponse:
        _check_known(request)
        validation.check_request_id(request.request_id, "request_id")
        if request.session_id:
            validation.check_session_id(request.session_id)
        session_uid = self._options.make_id()
        return await self._writer.write(
            lambda connection: forks.fork(
                connection, request, session_uid, self._clock.now(), self._is_alive(connection)
            )
        )

    async def commit(self, request: store_pb2.CommitRequest) -> store_pb2.CommitResponse:
        validation.check_commit(request)

        def tell(response: store_pb2.CommitResponse) -> None:
            self._hub.notify(request.session_id)
            if not request.epoch:
                # An owner goes on by itself; a session that nobody owns may need a coordinator now.
                self._runnable_changed()

        return await self._writer.write(
            lambda connection: commits.commit(connection, request, self._clock.now(), self._is_alive(connection)), tell
        )

    async def list_items(self, request: store_pb2.ListItemsRequest) -> store_pb2.ListItemsResponse:
        return await self._readers.read(partial(reads.list_items, request=request))

    async def list_operations(self, request: store_pb2.ListOperationsRequest) -> store_pb2.ListOperationsResponse:
        return await self._readers.read(partial(reads.list_operations, request=request))

    def watch_session(self, request: store_pb2.WatchSessionRequest) -> AsyncIterator[store_pb2.WatchSessionResponse]:
        return watches.watch_session(self._readers, self._hub, request)

    async def watch_runnable(
        self, request: store_pb2.WatchRunnableRequest
    ) -> AsyncIterator[store_pb2.WatchRunnableResponse]:
        validation.check_incarnation(request.incarnation)
        if request.capacity == 0:
            validation.refuse("INVALID_CAPACITY", "capacity", "must be positive")
        register = partial(self._register, request.incarnation, leases.DEFAULT_LEASE_S)
        async with aclosing(self._runnable.watch(request, register)) as offers:
            async for response in offers:
                yield response

    async def acquire_lease(self, request: store_pb2.AcquireLeaseRequest) -> store_pb2.AcquireLeaseResponse:
        _check_known(request)
        validation.check_incarnation(request.incarnation)

        def tell(outcome: tuple[store_pb2.AcquireLeaseResponse, leases.Registered]) -> None:
            self._runnable.acquired(request.session_id, outcome[1].replaced_id)
            if outcome[1].replaced_id:
                self._runnable_changed()

        response, _ = await self._writer.write(
            lambda connection: leases.acquire(connection, self._leases_of(connection), request, self._now_us()), tell
        )
        return response

    async def renew_lease(self, request: store_pb2.RenewLeaseRequest) -> store_pb2.RenewLeaseResponse:
        _check_known(request)
        validation.check_incarnation(request.incarnation)
        lease_s = leases.lease_seconds(request.lease if request.HasField("lease") else None)
        await self._register(request.incarnation, lease_s)
        response = store_pb2.RenewLeaseResponse()
        response.lease.FromMicroseconds(round(lease_s * 1e6))
        return response

    async def release_lease(self, request: store_pb2.ReleaseLeaseRequest) -> store_pb2.ReleaseLeaseResponse:
        _check_known(request)
        validation.check_incarnation(request.incarnation)
        validation.check_integer(request.epoch, "epoch")

        def tell(_: None) -> None:
            if not request.session_id:
                self._runnable.replaced(request.incarnation.incarnation_id)
            self._runnable_changed()

        await self._writer.write(
            lambda connection: leases.release(connection, self._leases_of(connection), request, self._now_us()), tell
        )
        return store_pb2.ReleaseLeaseResponse()

    async def export_session(
        self, request: store_pb2.ExportSessionRequest
    ) -> AsyncIterator[store_pb2.ExportSessionResponse]:
        async with (
            self._exports,
            self._snapshot() as state,
            aclosing(exports.export(state, request.session_id, self._is_alive)) as responses,
        ):
            async for response in responses:
                yield response

    async def import_session(
        self, requests: AsyncIterator[store_pb2.ImportSessionRequest]
    ) -> store_pb2.ImportSessionResponse:
        try:
            session_id = await imports.import_session(self._once_writer, self._clock, self._options.make_id(), requests)
        finally:
            self._retention.notify()
        found = await self.get_session(store_pb2.GetSessionRequest(session_id=session_id))
        return store_pb2.ImportSessionResponse(session=found.session)

    async def put_blob(self, requests: AsyncIterator[store_pb2.PutBlobRequest]) -> store_pb2.PutBlobResponse:
        upload = await blobs.receive(requests)
        await self._writer.write(lambda connection: blobs.put(connection, upload, self._now_us()))
        return store_pb2.PutBlobResponse(blob=upload.blob)

    def get_blob(self, request: store_pb2.GetBlobRequest) -> AsyncIterator[store_pb2.GetBlobResponse]:
        return blobs.stream(self._readers, request.session_id, request.digest)

    async def create_token(self, request: store_pb2.CreateTokenRequest) -> store_pb2.CreateTokenResponse:
        _check_known(request)
        tokens.check(request)
        token_id, secret = self._options.make_id(), self._options.make_secret()
        return await self._once_writer.write(
            lambda connection: tokens.create(connection, request, token_id, secret, self._clock.now()),
            lambda _: self._hub.notify(tokens.TOPIC),
        )

    async def list_tokens(self, request: store_pb2.ListTokensRequest) -> store_pb2.ListTokensResponse:
        return await self._readers.read(partial(tokens.list_page, request=request))

    async def revoke_token(self, request: store_pb2.RevokeTokenRequest) -> store_pb2.RevokeTokenResponse:
        _check_known(request)
        return await self._writer.write(
            lambda connection: tokens.revoke(connection, request.token_id, self._clock.now()),
            lambda _: self._hub.notify(tokens.TOPIC),
        )

    def watch_tokens(self, request: store_pb2.WatchTokensRequest) -> AsyncIterator[store_pb2.WatchTokensResponse]:
        return tokens.watch(self._readers, self._hub, self._clock.now())

    async def _register(self, incarnation: session_pb2.Incarnation, lease_s: float) -> None:
        def tell(registered: leases.Registered) -> None:
            if registered.replaced_id:
                self._runnable.replaced(registered.replaced_id)
                self._runnable_changed()

        await self._writer.write(
            lambda connection: leases.register(
                connection, self._leases_of(connection), incarnation, lease_s, self._now_us()
            ),
            tell,
        )

    def _now_us(self) -> int:
        return rows.microseconds(self._clock.now())

    def _is_alive(self, connection: Connection) -> rows.OwnerCheck:
        return self._leases_of(connection).is_alive

    def _runnable_changed(self) -> None:
        self._runnable.notify()
        self._hub.notify(watches.RUNNABLE)


def _check_known(request: Message) -> None:
    records.check_fields_known(request, "the request")
