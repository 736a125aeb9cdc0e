"""Releases that differ talk to each other while an upgrade is under way.

What changes something is refused where the receiver would not know all of it; answers and events may hold what their
reader does not know. The release to come is made at run time: tests/support/newer_schemas.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from clients._rpc.channel import open_channel
from clients._rpc.status import from_rpc_error
from clients.coordinator import CoordinatorClient
from harness.errors import FailedPreconditionError, HarnessError
from tests.support.cli import Cli
from tests.support.eventually import eventually
from tests.support.newer_schemas import NEW_FIELD, NEW_VALUE_NUMBER, NewerSchemas, messages_in
from tests.support.newer_server import adorn, newer_server
from tests.support.sound_requests import exported, sound_requests
from tests.support.stack import MANAGER, STORE, Stack, three_services
from tests.support.world import Script, World, bash, result_text, text_message
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.server.v1 import server_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

COORDINATOR_SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
STORE_SERVICE = store_pb2.DESCRIPTOR.services_by_name["SessionStoreService"]
MANAGER_SERVICE = manager_pb2.DESCRIPTOR.services_by_name["OperationManagerService"]

SCRIPT: Script = [
    {"text": "I'll look.", "tool_calls": [bash("echo 6 times 7 is $((6 * 7))")]},
    {"expect": "6 times 7 is 42", "text": "It is 42."},
]

READING = frozenset(
    {
        *("GetServerInfo", "WatchSession", "GetSession", "ListSessions", "BuildContext", "ListItems", "ListOperations"),
        *("ReadOutput", "GetBlob", "ExportSession", "DownloadWorkspace"),
    }
)
"""Methods of the coordinator that change nothing."""

INCARNATION = session_pb2.Incarnation(name="c", incarnation_id="i")
BLOB = llm_pb2.BlobRef(digest=hashlib.sha256(b"abc").hexdigest(), size_bytes=3, media_type="text/plain")
REST = session_pb2.Rest(state=session_pb2.REST_STATE_AT_REST, session_state=session_pb2.SESSION_STATE_IDLE)

STORE_REQUESTS: dict[str, Message] = {
    "CreateSession": store_pb2.CreateSessionRequest(
        session_id="new", requested_settings=session_pb2.SessionSettings(provider="p")
    ),
    "DeleteSession": store_pb2.DeleteSessionRequest(session_id="s1"),
    "ForkSession": store_pb2.ForkSessionRequest(request_id="r", parent_session_id="s1", session_id="new"),
    "Commit": store_pb2.CommitRequest(
        session_id="s1",
        commit_id="c",
        rest=REST,
        items=[
            item_pb2.Item(
                schema_version=1,
                input=item_pb2.Input(
                    schema_version=1,
                    input_id="i",
                    kind=item_pb2.INPUT_KIND_EXTERNAL,
                    content=text_message("i", "hi").content,
                ),
            )
        ],
        operations=[
            operation_pb2.Operation(schema_version=1, operation_id="o", timer=operation_pb2.TimerState()),
        ],
    ),
    "AcquireLease": store_pb2.AcquireLeaseRequest(
        session_id="s1",
        incarnation=INCARNATION,
        versions=server_pb2.ReaderVersions(session_format=1, item=1, operation=1),
    ),
    "RenewLease": store_pb2.RenewLeaseRequest(incarnation=INCARNATION),
    "ReleaseLease": store_pb2.ReleaseLeaseRequest(incarnation=INCARNATION, session_id="s1", epoch=1),
    "PutBlob": store_pb2.PutBlobRequest(session_id="s1", blob=BLOB, data=b"abc"),
    "ImportSession": store_pb2.ImportSessionRequest(
        session_id="new",
        records=[
            store_pb2.ExportRecord(
                header=store_pb2.ExportHeader(export_version=1, session=session_pb2.Session(format_version=1))
            )
        ],
    ),
    "CreateToken": store_pb2.CreateTokenRequest(
        request_id="r", token=store_pb2.Token(label="l", rights=[store_pb2.RIGHT_READ])
    ),
    "RevokeToken": store_pb2.RevokeTokenRequest(token_id="t"),
}

MANAGER_REQUESTS: dict[str, Message] = {
    "AddOperations": manager_pb2.AddOperationsRequest(owner="c", fences=[manager_pb2.Fence(session_id="s1", epoch=1)]),
    "CancelOperation": manager_pb2.CancelOperationRequest(
        operation_id="o", fence=manager_pb2.Fence(session_id="s1", epoch=1)
    ),
    "AcknowledgeUpdates": manager_pb2.AcknowledgeUpdatesRequest(
        acknowledgements=[manager_pb2.Acknowledgement(operation_id="o", step=1)]
    ),
    "UploadWorkspace": manager_pb2.UploadWorkspaceRequest(
        workspace="/tmp", entries=[manager_pb2.WorkspaceEntry(path="a", directory=manager_pb2.Directory())]
    ),
}


@pytest.fixture(scope="module")
def newer() -> NewerSchemas:
    return NewerSchemas()


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with three_services(tmp_path, SCRIPT) as stack:
        yield stack


async def did_main_job(world: World) -> None:
    """Ask, wait and look at everything that is remembered of it."""
    assert (await world.run("How much is 6 times 7?")).session_state == session_pb2.SESSION_STATE_IDLE
    (result,) = (await world.results()).values()
    assert "6 times 7 is 42" in result_text(result)
    assert (await world.items())[-1].model_response.output.items[0].message.text == "It is 42."
    assert len(await world.operations()) == 1
    assert (await world.context()).entries


def spoilt(request: Message) -> Iterator[tuple[str, Message]]:
    """Yield a newer request with something new in one of its messages: a field, or a value of an enum."""
    for index, part in enumerate(messages_in(request)):
        kinds = [field for field in part.DESCRIPTOR.fields if field.type == FieldDescriptor.TYPE_ENUM]
        for field in (part.DESCRIPTOR.fields_by_name[NEW_FIELD], *kinds):
            copy = type(request)()
            copy.CopyFrom(request)
            target = list(messages_in(copy))[index]
            value: object = "new" if field.name == NEW_FIELD else NEW_VALUE_NUMBER
            if field.is_repeated:
                getattr(target, field.name).append(value)
            else:
                setattr(target, field.name, value)
            yield f"{part.DESCRIPTOR.name}.{field.name}", copy


async def failure_of(
    channel: grpc.aio.Channel, service: ServiceDescriptor, name: str, request: Message
) -> HarnessError | None:
    """Return how a call fails; None where it is answered."""
    # The types would come from (de)serialisers; there are none.
    method: Any = channel.unary_stream(f"/{service.full_name}/{name}")
    call = method(request.SerializeToString(), timeout=10)
    try:
        async for _ in call:
            return None
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    finally:
        call.cancel()
    return None


@pytest.mark.slow
async def test_a_newer_client_changes_nothing_that_is_not_wholly_known(stack: Stack, newer: NewerSchemas) -> None:
    async with stack.world() as world, open_channel(stack.address) as channel:
        await world.create()
        await did_main_job(world)
        before = await world.items()
        export = await exported(coordinator_grpc.CoordinatorServiceStub(channel))
        accepted = []
        for name, make in sound_requests(export).items():
            if name in READING:
                error = await failure_of(channel, COORDINATOR_SERVICE, name, newer.adorned(make()))
                assert error is None, f"{name}: {error!r}"
                continue
            for label, request in spoilt(newer.newer(make())):
                error = await failure_of(channel, COORDINATOR_SERVICE, name, request)
                if error is None or error.reason != "UNKNOWN_FIELDS":
                    accepted.append(f"{name} with {label}: {error!r}")
        assert accepted == []
        assert await world.items() == before


@pytest.mark.parametrize(
    ("service", "requests"),
    [(STORE_SERVICE, STORE_REQUESTS), (MANAGER_SERVICE, MANAGER_REQUESTS)],
    ids=["session store", "operation manager"],
)
async def test_a_newer_service_changes_nothing_that_is_not_wholly_known(
    stack: Stack, newer: NewerSchemas, service: ServiceDescriptor, requests: dict[str, Message]
) -> None:
    address = stack.addresses[STORE if service is STORE_SERVICE else MANAGER]
    accepted = []
    async with stack.world() as world, open_channel(address) as channel:
        await world.create()
        for name, sound in requests.items():
            for label, request in spoilt(newer.newer(sound)):
                error = await failure_of(channel, service, name, request)
                if error is None or error.reason != "UNKNOWN_FIELDS":
                    accepted.append(f"{name} with {label}: {error!r}")
        assert accepted == []
        assert [item for item in await world.items() if item.HasField("input")] == []


async def test_answers_and_events_of_a_newer_coordinator_are_read(stack: Stack) -> None:
    async with newer_server(stack.address) as address, CoordinatorClient(address) as client:
        world = World(coordinator=client, workspace=stack.workspace)
        await world.create()
        await did_main_job(world)
        seen = [event async for event in client.watch_session(watching("s1"))]
    assert seen[-1].HasField("rest_reached")


def watching(session_id: str) -> coordinator_pb2.WatchSessionRequest:
    return coordinator_pb2.WatchSessionRequest(session_id=session_id, until_idle=True)


def with_unknown_values(message: Message) -> None:
    """Make each session's state, each call's outcome and the like one that came later."""
    for part in messages_in(message):
        for field, _ in part.ListFields():
            if field.type == FieldDescriptor.TYPE_ENUM and not field.is_repeated and field.name != "state":
                setattr(part, field.name, NEW_VALUE_NUMBER)


def with_unknown_items(message: Message) -> None:
    """Make each turn of a history an item of a kind that came later."""
    for part in messages_in(message):
        if part.DESCRIPTOR.full_name == "unreal_agent.session.v1.Item" and part.HasField("turn"):
            part.ClearField("turn")
            setattr(part, NEW_FIELD, "a kind that came later")


COMMANDS = (
    ("sessions", "list"),
    ("sessions", "show", "s1"),
    ("sessions", "show", "s1", "--output", "jsonl"),
    ("sessions", "watch", "s1"),
    ("sessions", "context", "s1"),
    ("operations", "list", "s1"),
)


@pytest.mark.slow
@pytest.mark.parametrize("change", [with_unknown_values, with_unknown_items, adorn])
async def test_the_command_line_shows_what_it_knows_of_a_newer_server(
    stack: Stack, tmp_path: Path, change: Any
) -> None:
    async with stack.world() as world:
        await world.create()
        await did_main_job(world)
    (tmp_path / "cli").mkdir()
    cli = Cli(tmp_path / "cli")
    async with newer_server(stack.address, change) as address:
        for command in COMMANDS:
            done = await asyncio.to_thread(cli.run, *command, "--server", address)
            assert (done.code, done.stderr) == (0, ""), command
            assert done.stdout


STORED = ("unreal_agent.session.v1.Item", "unreal_agent.operation.v1.Operation")
"""Types whose versions say what they hold: a new field comes with a new version."""


async def test_a_present_coordinator_works_with_a_newer_store_and_manager(tmp_path: Path) -> None:
    envelopes = partial(adorn, but=STORED)
    async with three_services(tmp_path, SCRIPT, starts=False) as stack:
        await stack.start(STORE)
        await stack.start(MANAGER)
        async with (
            newer_server(stack.addresses[STORE], envelopes) as store,
            newer_server(stack.addresses[MANAGER], envelopes) as manager,
        ):
            await stack.add_coordinator("present", "--session-store", store, "--manager", f"local={manager}")
            async with stack.world("present") as world:
                await world.create()
                await did_main_job(world)
            await stack.terminate("present")


async def test_a_report_that_is_not_wholly_known_waits_for_a_coordinator_that_knows_it(tmp_path: Path) -> None:
    async with three_services(tmp_path, SCRIPT, starts=False) as stack:
        await stack.start(STORE)
        await stack.start(MANAGER)
        async with newer_server(stack.addresses[MANAGER]) as manager:
            await stack.add_coordinator("present", "--manager", f"local={manager}")
            async with stack.world("present") as world:
                await world.create()
                await world.say("How much is 6 times 7?")
                await eventually(lambda: "left with its manager" in stack.log("present"), within_s=10.0)
                # The session waits for its operation, and listens meanwhile.
                assert (await world.say("Take your time.", after_turn=True)).sequence == 2
            await stack.terminate("present")
        await stack.start("coordinator")
        async with stack.world() as world:
            assert (await world.until_rest()).session_state == session_pb2.SESSION_STATE_IDLE
            (result,) = (await world.results()).values()
            assert "6 times 7 is 42" in result_text(result)


async def test_a_record_with_something_new_is_not_gone_on_with(stack: Stack) -> None:
    async with stack.world() as world:
        await world.create()
        await did_main_job(world)
        before = await world.items()
    await stack.terminate("coordinator")
    async with newer_server(stack.addresses[STORE], with_unknown_items) as store:
        await stack.add_coordinator("present", "--session-store", store)
        async with stack.world("present") as world:
            with pytest.raises(FailedPreconditionError) as refused:
                await world.say("go on", input_id=f"i-{uuid.uuid4()}")
        assert refused.value.reason == "UNKNOWN_FIELDS"
        await stack.terminate("present")
    # The newer release can go on: nothing was changed.
    await stack.start("coordinator")
    async with stack.world() as world:
        assert await world.items() == before
        await world.run("go on")
