"""A manager that no coordinator can dial: it dials them, and everything works as if it had been dialled."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from clients._rpc.channel import open_channel
from clients._rpc.status import from_rpc_error
from clients.operation_manager import ProxyOperationManager, links
from clients.operation_manager.attached_link import AttachedLink
from clients.session_store.remote_session_store import RemoteSessionStore
from harness.errors import HarnessError
from harness.primitives.streams import closing
from services._server.server import Server, ServerSettings, serve
from services.coordinator.gateway import gateway_service
from tests.support.eventually import eventually
from tests.support.manager_service import LOCAL, attached_manager
from tests.support.operations import OWNER, adding, end_of
from tests.support.operations import bash as bash_operation
from tests.support.stack import COORDINATOR, MANAGER, STORE, Stack, three_services
from tests.support.world import Script, bash, result_text
from unreal_agent.gateway.v1 import operation_manager_gateway_service_pb2 as gateway_pb2
from unreal_agent.gateway.v1 import operation_manager_gateway_service_pb2_grpc as gateway_grpc
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.server.v1 import server_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

ONE = (COORDINATOR,)

COUNTING: Script = [
    {"tool_calls": [bash("for n in 1 2 3 4 5 6; do echo $n; touch at-$n; sleep 0.3; done")]},
    {"expect": "1\\s2\\s3\\s4\\s5\\s6", "text": "It counted."},
]


@pytest.mark.parametrize("victim", [MANAGER, COORDINATOR])
async def test_a_command_outlives_either_end_of_the_stream(tmp_path: Path, victim: str) -> None:
    async with three_services(tmp_path, COUNTING, manager_attaches_to=ONE) as stack, stack.world() as world:
        await world.create()
        await world.say("count")
        await eventually((stack.workspace / "at-2").exists, within_s=20)
        await stack.kill(victim)
        await stack.start(victim)
        await world.until_rest()
        (result,) = (await world.results()).values()
        assert result_text(result).split()[:6] == ["1", "2", "3", "4", "5", "6"]
        assert (await world.items())[-1].model_response.output.items[0].message.text == "It counted."


async def test_a_manager_is_reached_by_every_coordinator_that_it_dials(tmp_path: Path) -> None:
    script: Script = [{"tool_calls": [bash("echo hello")]}, {"expect": "hello", "text": "done"}]
    async with three_services(tmp_path, script, manager_attaches_to=(COORDINATOR, "second")) as stack:
        await stack.add_coordinator("second")
        for name, session_id in ((COORDINATOR, "a"), ("second", "b")):
            async with stack.world(name) as world:
                await world.create(session_id)
                await world.run("go")
                assert [result_text(one).strip() for one in (await world.results()).values()] == ["hello"]


@asynccontextmanager
async def gateway(*names: str) -> AsyncIterator[Server]:
    links = {name: AttachedLink(name) for name in names}
    async with serve(ServerSettings(addresses=LOCAL), [gateway_service(links)]) as server:
        yield server


async def attach(server: Server, *frames: gateway_pb2.AttachRequest) -> str:
    """Send frames and return how the stream was refused."""

    async def requests() -> AsyncIterator[gateway_pb2.AttachRequest]:
        for frame in frames:
            yield frame
        await asyncio.Event().wait()

    return await attach_by(server, requests())


async def attach_by(server: Server, frames: AsyncIterator[gateway_pb2.AttachRequest]) -> str:
    """Send frames, without taking any of the coordinator's, and return how the stream was refused."""
    async with open_channel(server.addresses[0]) as channel:
        call = gateway_grpc.OperationManagerGatewayServiceStub(channel).Attach(frames, timeout=10)
        try:
            async for _ in call:
                pass
        except Exception as error:  # what gRPC raises is all that there can be
            return from_rpc_error(error).reason  # type: ignore[arg-type]
    return "accepted"


def hello(name: str) -> gateway_pb2.AttachRequest:
    return gateway_pb2.AttachRequest(hello=gateway_pb2.AttachHello(info=server_pb2.ServerInfo(name=name)))


async def test_who_attaches_must_say_hello_under_a_name_that_is_expected() -> None:
    async with gateway("sandbox") as server:
        assert await attach(server, hello("another")) == "MANAGER_NOT_EXPECTED"
        credit = gateway_pb2.AttachRequest(call_id=3, credit=gateway_pb2.Credit(bytes=1))
        assert await attach(server, credit) == "HELLO_MISSING"
        assert server.calls.bytes_in_hand == 0


async def test_a_manager_that_sends_beyond_its_credit_is_cut_off_and_fills_no_memory() -> None:
    link = AttachedLink("sandbox")
    served = serve(ServerSettings(addresses=LOCAL), [gateway_service({"sandbox": link})])
    async with served as server, ProxyOperationManager(link) as proxy, asyncio.TaskGroup() as tasks:
        piece = manager_pb2.ReadOutputResponse(data=b"x" * 100_000)
        flood = [gateway_pb2.AttachRequest(call_id=1, read_output=piece) for _ in range(50)]
        begun = asyncio.Event()

        async def frames() -> AsyncIterator[gateway_pb2.AttachRequest]:
            yield hello("sandbox")
            await begun.wait()
            for frame in flood:
                yield frame
            await asyncio.Event().wait()

        attached = tasks.create_task(attach_by(server, frames()))
        reading = proxy.read_output(manager_pb2.ReadOutputRequest(operation_id="o", limit_bytes=1))
        async with closing(reading) as pieces:
            first = tasks.create_task(_next(pieces))
            await eventually(lambda: link.attachment is not None)
            begun.set()
            assert len((await first).data) == 100_000
            # Nobody takes more.
            assert await attached == "CREDIT_EXCEEDED"


async def test_an_ending_that_is_none_fails_its_call_and_no_other() -> None:
    link = AttachedLink("sandbox")
    served = serve(ServerSettings(addresses=LOCAL), [gateway_service({"sandbox": link})])
    async with served as server, asyncio.TaskGroup() as tasks:
        asked = asyncio.Event()

        async def frames() -> AsyncIterator[gateway_pb2.AttachRequest]:
            yield hello("sandbox")
            await asked.wait()
            yield gateway_pb2.AttachRequest(call_id=1, end=gateway_pb2.CallEnd(error_status=b"\xff\xff"))
            await asyncio.Event().wait()

        attached = tasks.create_task(attach_by(server, frames()))
        await eventually(lambda: link.attachment is not None)
        stream = link.stream(links.READ_OUTPUT, manager_pb2.ReadOutputRequest(operation_id="o"))
        async with closing(stream) as pieces:
            reading = tasks.create_task(_reason_of(anext(aiter(pieces))))
            await asyncio.sleep(0)
            asked.set()
            assert await reading == "CONNECTION_LOST"
        assert not attached.done()
        attached.cancel()


async def _next(pieces: AsyncIterator[manager_pb2.ReadOutputResponse]) -> manager_pb2.ReadOutputResponse:
    return await anext(pieces)


async def _reason_of(waiting: Awaitable[object]) -> str:
    try:
        await waiting
    except HarnessError as error:
        return error.reason
    return ""


async def test_a_newer_manager_of_a_name_takes_over_and_the_older_one_is_told() -> None:
    async with gateway("sandbox") as server, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(attach(server, hello("sandbox")))
        await eventually(lambda: len(server.calls) == 1)
        second = tasks.create_task(attach(server, hello("sandbox")))
        assert await first == "MANAGER_REPLACED"
        assert not second.done()
        second.cancel()


def _is_logged(stack: Stack, reason: str) -> bool:
    return reason in stack.log(MANAGER)


async def test_a_token_opens_its_own_name_alone_and_no_session(tmp_path: Path) -> None:
    flags = {COORDINATOR: ("--authenticate", "tokens")}
    async with (
        three_services(tmp_path, COUNTING, manager_attaches_to=ONE, starts=False, flags=flags) as stack,
        RemoteSessionStore(stack.addresses[STORE]) as store,
    ):
        await stack.start(STORE)
        wish = store_pb2.Token(rights=[store_pb2.RIGHT_OPERATE], manager_name="local")
        made = await store.create_token(store_pb2.CreateTokenRequest(request_id=uuid.uuid4().hex, token=wish))
        wish.manager_name = "elsewhere"
        other = await store.create_token(store_pb2.CreateTokenRequest(request_id=uuid.uuid4().hex, token=wish))
        client = store_pb2.Token(rights=[store_pb2.RIGHT_READ, store_pb2.RIGHT_SUBMIT, store_pb2.RIGHT_CONTROL])
        user = await store.create_token(store_pb2.CreateTokenRequest(request_id=uuid.uuid4().hex, token=client))
        await stack.start(COORDINATOR)
        refused = {other.secret: "MANAGER_NOT_ALLOWED", user.secret: "RIGHT_MISSING", "": "TOKEN_MISSING"}
        for secret, reason in refused.items():
            stack.environment["UNREAL_AGENT_TOKEN"] = secret
            await stack.start(MANAGER)
            await eventually(partial(_is_logged, stack, reason), within_s=10)
            await stack.kill(MANAGER)
        stack.environment["UNREAL_AGENT_TOKEN"] = made.secret
        await stack.start(MANAGER)
        async with stack.world(token=user.secret) as world:
            await world.create()
            await world.say("count")
            await eventually((stack.workspace / "at-2").exists, within_s=20)
            # Revoked: the stream ends, the command does not.
            await store.revoke_token(store_pb2.RevokeTokenRequest(token_id=made.token.token_id))
            await eventually(lambda: "TOKEN_REVOKED" in stack.log(MANAGER), within_s=10)
            await eventually((stack.workspace / "at-6").exists, within_s=20)
        async with stack.world(token=other.secret) as thief:
            with pytest.raises(HarnessError, match="lacks the right 'read'"):
                await thief.items()


async def test_a_reader_that_is_slow_costs_the_manager_nothing_and_holds_up_no_update(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    async with attached_manager(tmp_path / "state") as (_, proxy):
        large = bash_operation("head -c 200000000 /dev/zero")
        await proxy.add_operations(adding([large], workspace))
        await end_of(proxy, large.operation_id)
        process = psutil.Process()
        request = manager_pb2.ReadOutputRequest(
            operation_id=large.operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT
        )
        async with closing(proxy.read_output(request)) as pieces:
            await anext(pieces)
            before = process.memory_info().rss
            small = bash_operation("echo hello")
            await proxy.add_operations(adding([small], workspace))
            await end_of(proxy, small.operation_id)
            assert process.memory_info().rss - before < 30_000_000


async def test_a_link_without_its_manager_waits_and_then_says_so() -> None:
    link = AttachedLink("sandbox", attach_patience_s=0.05)
    async with ProxyOperationManager(link) as proxy:
        with pytest.raises(HarnessError, match="'sandbox' is not attached"):
            await anext(aiter(proxy.watch_operations(manager_pb2.WatchOperationsRequest(owner=OWNER))))
