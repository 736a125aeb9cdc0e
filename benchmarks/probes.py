"""A sound call of every RPC of every service, to be made any number of times.

A call that streams is over with its end; a watch, which has none, with its first message.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from benchmarks.deployment import Deployment
from benchmarks.histories import write_history
from clients.session_store import RemoteSessionStore
from harness.session_store import SessionStore
from tests.support.operations import adding, bash
from tests.support.session_records import (
    SETTINGS,
    VERSIONS,
    Author,
    blob_of,
    incarnation,
    new_session,
    text_input,
    working,
)
from tests.support.sound_requests import exported, sound_requests
from tests.support.stack import COORDINATOR, MANAGER, STORE
from tests.support.world import Script, World
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from unreal_agent.gateway.v1 import operation_manager_gateway_service_pb2 as gateway_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

OWNER = "benchmark"
ATTACHED = "attached"
"""Name under which managers may attach: the coordinator needs FLAGS."""

FLAGS = {COORDINATOR: ("--manager", f"{ATTACHED}=attached")}
SCRIPT: Script = [{"tool_calls": [{"name": "Bash", "arguments": {"command": "true"}}]}, {"text": "done"}]
"""What sessions play."""

CANCELS = 40
"""Operations that can be cancelled: fewer than a manager runs at once."""

MANY = 1_000_000
ENDLESS = frozenset({"Attach", "WatchSession", "WatchRunnable", "WatchTokens", "WatchOperations"})

Make = Callable[[int], Message]
"""Makes the n-th request."""

Prepare = Callable[[int], Awaitable[object]]
"""Makes ready what the n-th request needs; not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One RPC."""

    service: str
    name: str
    call: Callable[[int], Awaitable[object]]
    prepare: Prepare | None = None
    limit: int
    """Calls at most; their numbers count from 0."""


@asynccontextmanager
async def coordinator_probes(deployment: Deployment) -> AsyncIterator[Sequence[Probe]]:
    """Make ready what the requests are about, and give the probes of the coordinator and of its gateway."""
    scripts = deployment.stack.directory
    sleeps = [{"name": "Bash", "arguments": {"command": "sleep 600"}}] * CANCELS
    (scripts / "sleep.json").write_text(json.dumps({"responses": [{"tool_calls": sleeps}]}), encoding="utf-8")
    fails = {"error": {"class": "invalid_request"}}
    (scripts / "fail.json").write_text(json.dumps({"responses": [fails] * 3}), encoding="utf-8")
    async with deployment.stack.world() as world, deployment.channel(COORDINATOR) as channel:
        yield await _of_coordinator(world, channel, scripts)
        # Commands outlive the services.
        world.session_id = "sleepers"
        await world.stop()
        await world.until_rest()


@asynccontextmanager
async def store_probes(deployment: Deployment) -> AsyncIterator[Sequence[Probe]]:
    """Give the probes of the session store. No coordinator may run: it would take what is offered as runnable."""
    async with deployment.channel(STORE) as channel, RemoteSessionStore(deployment.channel(STORE)) as store:
        yield await _of_store(channel, store)


@asynccontextmanager
async def manager_probes(deployment: Deployment) -> AsyncIterator[Sequence[Probe]]:
    """Give the probes of the operation manager."""
    async with deployment.channel(MANAGER) as channel:
        yield await _of_manager(channel, deployment.stack.workspace)


async def _of_coordinator(world: World, channel: grpc.aio.Channel, scripts: Path) -> Sequence[Probe]:
    await world.create("sleepers", _settings(scripts / "sleep.json"))
    await world.say("sleep")
    await world.watch_until(lambda event: any(one.call_id for one in event.change.operations))
    sleeping = [one.operation_id for one in await world.operations()]
    await world.create("s1", _settings())
    await world.run("hi")
    requests = sound_requests(await exported(coordinator_grpc.CoordinatorServiceStub(channel)))

    async def victim(number: int) -> None:
        await world.create(f"victim-{number}", _settings())

    async def failed(number: int) -> None:
        await world.create(f"failed-{number}", _settings(scripts / "fail.json"))
        await world.run("fail")

    def made(name: str) -> Make:
        return lambda _: requests[name]()

    blob = store_pb2.PutBlobRequest(session_id="s1", blob=blob_of(b"x" * 1024), data=b"x" * 1024)
    makers: dict[str, Make] = {
        **{name: made(name) for name in requests},
        "CreateSession": lambda number: coordinator_pb2.CreateSessionRequest(
            session_id=f"made-{number}", settings=_WHOLE_SETTINGS
        ),
        "DeleteSession": lambda number: coordinator_pb2.DeleteSessionRequest(session_id=f"victim-{number}"),
        "CancelOperation": lambda number: coordinator_pb2.CancelOperationRequest(
            session_id="sleepers", input_id=f"cancel-{number}", operation_id=sleeping[number]
        ),
        "RetryTurn": lambda number: coordinator_pb2.RetryTurnRequest(
            session_id=f"failed-{number}", input_id=f"retry-{number}"
        ),
        "PutBlob": lambda _: coordinator_pb2.PutBlobRequest(request=blob),
    }
    service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
    prepared = {"DeleteSession": victim, "RetryTurn": failed}
    found = _probes(COORDINATOR, channel, service, makers, prepared, {"CancelOperation": CANCELS})
    gateway = gateway_pb2.DESCRIPTOR.services_by_name["OperationManagerGatewayService"]
    return [*found, *_probes("gateway", channel, gateway, {"Attach": _attach}, {})]


def _settings(script: Path | None = None) -> session_pb2.SessionSettings:
    return session_pb2.SessionSettings(manager_name="local", labels={"script": str(script)} if script else {})


_WHOLE_SETTINGS = session_pb2.SessionSettings(provider="scripted", model="m1", workspace="/tmp", manager_name="local")


def _attach(number: int) -> Message:
    hello = gateway_pb2.AttachHello(operation_types=["bash"])
    hello.info.name, hello.info.instance_id = ATTACHED, f"benchmark-{number}"
    return gateway_pb2.AttachRequest(hello=hello)


async def _of_store(channel: grpc.aio.Channel, store: SessionStore) -> Sequence[Probe]:
    author = await write_history(store, "bench", 100)
    blob = await author.put(b"x" * 1024)
    whole = store_pb2.ImportSessionRequest()
    async for part in store.export_session(store_pb2.ExportSessionRequest(session_id="bench")):
        whole.records.extend(part.records)
    authors: dict[int, Author] = {}
    tokens: dict[int, str] = {}

    async def writer(number: int) -> None:
        authors[number] = await new_session(store, f"commit-{uuid.uuid4()}")

    async def runnable(number: int) -> None:
        author = await new_session(store, f"working-{uuid.uuid4()}")
        await author.commit(text_input("i1"), rest=working())

    async def victim(number: int) -> None:
        await new_session(store, f"store-victim-{number}")

    async def token(number: int) -> None:
        request = store_pb2.CreateTokenRequest(request_id=f"t{uuid.uuid4()}", token=_token())
        tokens[number] = (await store.create_token(request)).token.token_id

    def commit(number: int) -> store_pb2.CommitRequest:
        author = authors[number]
        return author.request(text_input(f"i{number}", "x" * 800))

    def imported(number: int) -> Message:
        request = store_pb2.ImportSessionRequest()
        request.CopyFrom(whole)
        request.session_id = f"imported-{uuid.uuid4()}"
        return request

    made: dict[str, Make] = {
        **_store_reads(blob),
        "CreateSession": lambda _: store_pb2.CreateSessionRequest(
            session_id=f"made-{uuid.uuid4()}", requested_settings=SETTINGS, initial_settings=SETTINGS
        ),
        "DeleteSession": lambda number: store_pb2.DeleteSessionRequest(session_id=f"store-victim-{number}"),
        "ForkSession": lambda _: store_pb2.ForkSessionRequest(
            request_id=f"fork-{uuid.uuid4()}", parent_session_id="bench", session_id=f"fork-{uuid.uuid4()}"
        ),
        "Commit": commit,
        "CommitStream": lambda number: store_pb2.CommitStreamRequest(commits=[commit(number)]),
        "AcquireLease": lambda _: store_pb2.AcquireLeaseRequest(
            session_id="bench", incarnation=incarnation(OWNER), versions=VERSIONS, lease=Duration(seconds=60)
        ),
        "RenewLease": lambda _: store_pb2.RenewLeaseRequest(incarnation=incarnation(OWNER), lease=Duration(seconds=60)),
        "ReleaseLease": lambda _: store_pb2.ReleaseLeaseRequest(incarnation=incarnation(OWNER), session_id="bench"),
        "ImportSession": imported,
        "PutBlob": lambda _: store_pb2.PutBlobRequest(session_id="bench", blob=blob, data=b"x" * 1024),
        "CreateToken": lambda _: store_pb2.CreateTokenRequest(request_id=f"t{uuid.uuid4()}", token=_token()),
        "RevokeToken": lambda number: store_pb2.RevokeTokenRequest(token_id=tokens[number]),
    }
    prepared: dict[str, Prepare] = {"WatchRunnable": runnable, "Commit": writer, "CommitStream": writer}
    prepared |= {"DeleteSession": victim, "RevokeToken": token}
    service = store_pb2.DESCRIPTOR.services_by_name["SessionStoreService"]
    return _probes(STORE, channel, service, made, prepared)


def _store_reads(blob: llm_pb2.BlobRef) -> dict[str, Make]:
    return {
        "GetServerInfo": lambda _: store_pb2.GetServerInfoRequest(),
        "GetSession": lambda _: store_pb2.GetSessionRequest(session_id="bench"),
        "ListSessions": lambda _: store_pb2.ListSessionsRequest(page_size=100),
        "ListItems": lambda _: store_pb2.ListItemsRequest(session_id="bench", page_size=100),
        "ListOperations": lambda _: store_pb2.ListOperationsRequest(session_id="bench", page_size=100),
        "WatchSession": lambda _: store_pb2.WatchSessionRequest(session_id="bench", after_revision=1),
        "WatchRunnable": lambda number: store_pb2.WatchRunnableRequest(
            incarnation=incarnation(f"{OWNER}-runnable-{number}"), versions=VERSIONS, capacity=1
        ),
        "ExportSession": lambda _: store_pb2.ExportSessionRequest(session_id="bench"),
        "GetBlob": lambda _: store_pb2.GetBlobRequest(session_id="bench", digest=blob.digest),
        "ListTokens": lambda _: store_pb2.ListTokensRequest(page_size=100),
        "WatchTokens": lambda _: store_pb2.WatchTokensRequest(),
    }


def _token() -> store_pb2.Token:
    return store_pb2.Token(label="benchmark", session_prefix="b", rights=[store_pb2.RIGHT_READ])


async def _of_manager(channel: grpc.aio.Channel, workspace: Path) -> Sequence[Probe]:
    service = manager_pb2.DESCRIPTOR.services_by_name["OperationManagerService"]
    add = _caller(channel, service, "AddOperations")
    done = bash("echo hello", session_id="bench")
    await add(adding([done], workspace, owner=OWNER))
    acknowledged = manager_pb2.Acknowledgement(operation_id=done.operation_id, step=1)
    made: dict[str, Make] = {
        "GetServerInfo": lambda _: manager_pb2.GetServerInfoRequest(),
        "AddOperations": lambda _: adding([bash("true", session_id="bench")], workspace, owner=OWNER),
        "CancelOperation": lambda _: manager_pb2.CancelOperationRequest(
            operation_id=done.operation_id, fence=manager_pb2.Fence(session_id="bench", epoch=1), reason="benchmark"
        ),
        "GetOperation": lambda _: manager_pb2.GetOperationRequest(operation_id=done.operation_id),
        "ListOperations": lambda _: manager_pb2.ListOperationsRequest(session_id="bench", page_size=100),
        "WatchOperations": lambda _: manager_pb2.WatchOperationsRequest(owner=OWNER),
        "AcknowledgeUpdates": lambda _: manager_pb2.AcknowledgeUpdatesRequest(acknowledgements=[acknowledged]),
        "ReadOutput": lambda _: manager_pb2.ReadOutputRequest(
            operation_id=done.operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT
        ),
        "UploadWorkspace": lambda _: manager_pb2.UploadWorkspaceRequest(workspace=str(workspace)),
        "DownloadWorkspace": lambda _: manager_pb2.DownloadWorkspaceRequest(workspace=str(workspace)),
    }
    return _probes(MANAGER, channel, service, made, {})


def _probes(
    owner: str,
    channel: grpc.aio.Channel,
    service: ServiceDescriptor,
    made: Mapping[str, Make],
    prepared: Mapping[str, Prepare],
    limits: Mapping[str, int] | None = None,
) -> list[Probe]:
    names = [method.name for method in service.methods]
    if set(names) != set(made):
        raise ValueError(f"no call, or one of nothing: {sorted(set(names) ^ set(made))}")

    def probe(name: str) -> Probe:
        call, make = _caller(channel, service, name), made[name]
        return Probe(
            service=owner,
            name=name,
            call=lambda number: call(make(number)),
            prepare=prepared.get(name),
            limit=(limits or {}).get(name, MANY),
        )

    return [probe(name) for name in names]


def _caller(channel: grpc.aio.Channel, service: ServiceDescriptor, name: str) -> Callable[[Message], Awaitable[object]]:
    """Return what calls a method with one request, and ends when the call does."""
    method = service.methods_by_name[name]
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    request_type, response_type = (GetMessageClass(one) for one in (method.input_type, method.output_type))
    multi: Any = kinds[method.client_streaming, method.server_streaming](
        f"/{service.full_name}/{name}",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )

    async def call(request: Message) -> object:
        sent = multi(iter([request]) if method.client_streaming else request, timeout=30)
        if not method.server_streaming:
            return await sent
        try:
            async for response in sent:
                if name in ENDLESS:
                    return response
            return None
        finally:
            sent.cancel()

    return call
