"""What every server does around its calls, over real gRPC: errors, deadlines, bounds, health, clean-up, addresses."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from clients._rpc import calls
from clients._rpc.channel import open_channel
from harness.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    HarnessError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from services._server.identity import Caller, CallFacts, CertifiedCaller, IdentityHook, caller_var
from services._server.interceptor import request_id_var
from services._server.metrics import serve_metrics
from services._server.server import Server, ServerSettings, Service, serve
from services._server.validation import MethodRules
from tests.support.eventually import eventually
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2_grpc as store_grpc

NAME = store_pb2.DESCRIPTOR.services_by_name["SessionStoreService"].full_name

Behaviour = Callable[[], Awaitable[None]]


class Scripted(store_grpc.SessionStoreServiceServicer):
    """A servicer that does what a test says, in each of the shapes of calls that occur."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour

    async def GetSession(self, request: store_pb2.GetSessionRequest, context: Any) -> store_pb2.GetSessionResponse:
        await self._behaviour()
        return store_pb2.GetSessionResponse()

    async def WatchSession(
        self, request: store_pb2.WatchSessionRequest, context: Any
    ) -> AsyncIterator[store_pb2.WatchSessionResponse]:
        yield store_pb2.WatchSessionResponse(revision=1)
        await self._behaviour()

    async def PutBlob(
        self, request_iterator: AsyncIterator[store_pb2.PutBlobRequest], context: Any
    ) -> store_pb2.PutBlobResponse:
        async for _ in request_iterator:
            await self._behaviour()
        return store_pb2.PutBlobResponse()

    async def CommitStream(
        self, request_iterator: AsyncIterator[store_pb2.CommitStreamRequest], context: Any
    ) -> AsyncIterator[store_pb2.CommitStreamResponse]:
        async for _ in request_iterator:
            yield store_pb2.CommitStreamResponse()
            await self._behaviour()


@asynccontextmanager
async def running(
    behaviour: Behaviour,
    *,
    rules: MethodRules | None = None,
    identify: IdentityHook | None = None,
    max_bytes_in_hand: int = 1000,
) -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    # What it does not have is not called.
    servicer = Scripted(behaviour)  # type: ignore[abstract]
    service = Service(
        name=NAME,
        register=lambda server: store_grpc.add_SessionStoreServiceServicer_to_server(servicer, server),
        rules=rules or MethodRules(),
    )
    settings = ServerSettings(addresses=("127.0.0.1:0",), max_bytes_in_hand=max_bytes_in_hand)
    async with (
        serve(settings, [service], identify=identify) as server,
        open_channel(server.addresses[0], token="t1") as channel,
    ):
        yield server, channel


async def get(channel: grpc.aio.Channel, request: Message | None = None, *, timeout_s: float = 10.0) -> None:
    stub = store_grpc.SessionStoreServiceStub(channel)
    await calls.unary(
        stub.GetSession, request or store_pb2.GetSessionRequest(), timeout_s=timeout_s, is_idempotent=False
    )


async def watch(channel: grpc.aio.Channel) -> None:
    stub = store_grpc.SessionStoreServiceStub(channel)
    async for _ in calls.server_stream(stub.WatchSession, store_pb2.WatchSessionRequest(), timeout_s=10):
        pass


async def put(channel: grpc.aio.Channel) -> None:
    async def frames() -> AsyncIterator[store_pb2.PutBlobRequest]:
        yield store_pb2.PutBlobRequest(data=b"x")

    stub = store_grpc.SessionStoreServiceStub(channel)
    await calls.unary(stub.PutBlob, frames, timeout_s=10, is_idempotent=False)


async def put_much(channel: grpc.aio.Channel) -> None:
    async def frames() -> AsyncIterator[store_pb2.PutBlobRequest]:
        for _ in range(100):
            yield store_pb2.PutBlobRequest(data=b"x" * 100_000)

    stub = store_grpc.SessionStoreServiceStub(channel)
    await calls.unary(stub.PutBlob, frames, timeout_s=10, is_idempotent=False)


async def commit_much(channel: grpc.aio.Channel) -> None:
    async def frames() -> AsyncIterator[store_pb2.CommitStreamRequest]:
        for _ in range(100):
            commit = store_pb2.CommitRequest(session_id="s" * 100_000)
            yield store_pb2.CommitStreamRequest(commits=[commit])

    stub = store_grpc.SessionStoreServiceStub(channel)
    async for _ in calls.server_stream(stub.CommitStream, frames, timeout_s=10):
        pass


def health_of(channel: grpc.aio.Channel) -> Any:  # the package's stubs are typed for threads only
    return health_pb2_grpc.HealthStub(channel)


async def nothing() -> None:
    return


def raising(error: BaseException) -> Behaviour:
    async def behaviour() -> None:
        raise error

    return behaviour


ERRORS = [one for one in HarnessError.__subclasses__() if one is not UnavailableError] + [UnsupportedError]


@pytest.mark.parametrize("call", [get, watch, put])
@pytest.mark.parametrize("error_class", ERRORS, ids=lambda one: one.__name__)
async def test_an_error_reaches_the_caller_as_it_was_raised(
    call: Callable[[grpc.aio.Channel], Awaitable[None]], error_class: type[HarnessError]
) -> None:
    raised = error_class("what 'ü'", reason="UNSUPPORTED_X", metadata={"field": "f"}, retry_after_s=0.5)
    if error_class is FailedPreconditionError:
        raised = error_class("what", reason="PLAIN")
    async with running(raising(raised)) as (_, channel):
        with pytest.raises(HarnessError) as caught:
            await call(channel)
    found = caught.value
    assert type(found) is error_class
    assert (found.reason, found.message, found.retry_after_s) == (raised.reason, raised.message, raised.retry_after_s)
    assert found.metadata == raised.metadata


@pytest.mark.parametrize("call", [put_much, commit_much])
async def test_a_caller_that_still_sends_hears_why_it_is_refused(
    call: Callable[[grpc.aio.Channel], Awaitable[None]],
) -> None:
    async def refuse(facts: CallFacts) -> Caller:
        raise UnauthenticatedError("who are you", reason="UNAUTHENTICATED")

    refusal = InvalidArgumentError("not this", reason="REFUSED")
    for _ in range(5):
        async with running(raising(refusal), max_bytes_in_hand=1_000_000) as (server, channel):
            assert await _reason_of(call(channel)) == "REFUSED"
            assert server.calls.bytes_in_hand == 0
        async with running(nothing, identify=refuse) as (_, channel):
            assert await _reason_of(call(channel)) == "UNAUTHENTICATED"


@pytest.mark.parametrize("call", [get, watch, put])
async def test_a_bug_tells_the_caller_nothing_and_the_log_everything(
    call: Callable[[grpc.aio.Channel], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(raising(ValueError("password is hunter2"))) as (_, channel):
        with pytest.raises(HarnessError) as caught:
            await call(channel)
    assert caught.value.reason == "INTERNAL"
    assert "hunter2" not in f"{caught.value.message}{caught.value.metadata}"
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert "hunter2" in str(record.exc_info[1])


async def test_a_call_that_is_not_there_is_unsupported() -> None:
    async with running(nothing) as (_, channel):
        unknown: Any = channel.unary_unary(f"/{NAME}/Nonsense", store_pb2.GetSessionRequest.SerializeToString)
        with pytest.raises(UnsupportedError) as caught:
            await calls.unary(unknown, store_pb2.GetSessionRequest(), timeout_s=10, is_idempotent=False)
    assert caught.value.reason == "UNSUPPORTED_CALL"


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\xa3\x01" * 500 + b"\xa4\x01" * 500],
    ids=["noise", "cut short", "no UTF-8", "nested deeply"],
)
async def test_bytes_that_are_no_request_are_an_invalid_argument(data: bytes) -> None:
    async with running(nothing) as (_, channel):
        raw: Any = channel.unary_unary(f"/{NAME}/GetSession")
        with pytest.raises(InvalidArgumentError) as caught:
            await calls.unary(raw, data, timeout_s=10, is_idempotent=False)
    assert caught.value.reason == "UNDECODABLE_REQUEST"


async def test_a_strict_method_refuses_fields_that_it_does_not_know() -> None:
    # Field 99 does not exist.
    newer = store_pb2.GetSessionRequest.FromString(b"\x0a\x01s\x9a\x06\x01x")
    async with running(nothing, rules=MethodRules(strict=frozenset({"GetSession"}))) as (_, channel):
        await get(channel, store_pb2.GetSessionRequest(session_id="s"))
        with pytest.raises(InvalidArgumentError) as caught:
            await get(channel, newer)
    assert (caught.value.reason, caught.value.metadata) == ("UNKNOWN_FIELDS", {"field": "99"})


async def test_a_message_over_its_methods_bound_is_refused_before_it_is_decoded() -> None:
    async with running(nothing, rules=MethodRules(max_request_bytes={"GetSession": 100})) as (_, channel):
        await get(channel, store_pb2.GetSessionRequest(session_id="x" * 98))
        with pytest.raises(ResourceExhaustedError) as caught:
            await get(channel, store_pb2.GetSessionRequest(session_id="x" * 99))
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
    assert caught.value.metadata == {"max_bytes": "100", "size_bytes": "101"}


async def test_a_busy_server_says_when_to_come_back_and_clients_do() -> None:
    entered, done = asyncio.Event(), asyncio.Event()

    async def behaviour() -> None:
        entered.set()
        await done.wait()

    large = store_pb2.GetSessionRequest(session_id="x" * 800)
    async with running(behaviour) as (server, channel), asyncio.TaskGroup() as tasks:
        tasks.create_task(get(channel, large))
        await entered.wait()
        stub = store_grpc.SessionStoreServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetSession(large, timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        tasks.create_task(get(channel, large))
        await eventually(lambda: server.calls.finished[f"/{NAME}/GetSession", "RESOURCE_EXHAUSTED"] >= 2)
        done.set()
    assert server.calls.bytes_in_hand == 0


async def test_a_call_that_takes_too_long_for_its_caller_is_cancelled_on_both_sides() -> None:
    cancelled = asyncio.Event()

    async def behaviour() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with running(behaviour) as (_, channel):
        with pytest.raises(DeadlineExceededError):
            await get(channel, timeout_s=0.2)
        await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_drain_joins_the_clean_up_of_a_handler_whose_call_is_over() -> None:
    steps: list[str] = []
    cleaning, may_finish = asyncio.Event(), asyncio.Event()

    async def behaviour() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await may_finish.wait()
            steps.append("cleaned up")

    async with running(behaviour) as (server, channel), asyncio.TaskGroup() as tasks:
        with pytest.raises(DeadlineExceededError):
            await get(channel, timeout_s=0.1)
        await cleaning.wait()
        draining = tasks.create_task(server.drain())
        done, _ = await asyncio.wait([draining], timeout=0.3)
        assert not done
        may_finish.set()
        await draining
        assert steps == ["cleaned up"]
    assert len(server.calls) == 0


async def test_a_drain_tells_health_ends_watches_and_lets_calls_finish() -> None:
    entered, done = asyncio.Event(), asyncio.Event()

    async def behaviour() -> None:
        entered.set()
        await done.wait()

    async with running(behaviour, rules=MethodRules(endless=frozenset({"WatchSession"}))) as (server, channel):
        health = health_of(channel)
        states = health.Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await states.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(get(channel))
            await entered.wait()
            watching = tasks.create_task(_reason_of(watch(channel)))
            await eventually(lambda: len(server.calls) == 3)
            draining = tasks.create_task(server.drain())
            assert await watching == "DRAINING"
            assert not call.done()
            done.set()
            await draining
        with pytest.raises(grpc.aio.AioRpcError):
            while True:
                last = await states.read()
                assert last.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def _reason_of(failing: Awaitable[None]) -> str:
    with pytest.raises(HarnessError) as caught:
        await failing
    return caught.value.reason


async def test_health_knows_each_service() -> None:
    async with running(nothing) as (_, channel):
        health = health_of(channel)
        for name in ("", NAME):
            response = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="no.Such"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services() -> None:
    async with running(nothing) as (_, channel):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # typed for threads only
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        response = await call.read()
        assert NAME in [service.name for service in response.list_services_response.service]


async def test_the_identity_hook_sees_the_token_and_refuses() -> None:
    seen: list[tuple[Caller | None, str]] = []
    caller = CertifiedCaller(("me",))

    async def identify(facts: CallFacts) -> Caller:
        if facts.metadata.get("authorization") != "Bearer t1":
            raise UnauthenticatedError("no token", reason="TOKEN_MISSING")
        return caller

    async def behaviour() -> None:
        seen.append((caller_var.get(), request_id_var.get()))

    async with running(behaviour, identify=identify) as (server, channel):
        for call in (get, watch, put):
            await call(channel)
        async with open_channel(server.addresses[0]) as stranger:
            for call in (get, watch, put):
                with pytest.raises(UnauthenticatedError):
                    await call(stranger)
            # Whoever watches over the process has no token.
            await health_of(stranger).Check(health_pb2.HealthCheckRequest())
    assert [found for found, _ in seen] == [caller] * 3
    assert len({request_id for _, request_id in seen}) == 3


async def test_an_identity_that_takes_too_long_is_told_as_it_was_raised() -> None:
    async def identify(facts: CallFacts) -> Caller:
        raise DeadlineExceededError("who calls was not found out in time", reason="IDENTITY_SLOW")

    async with running(nothing, identify=identify) as (_, channel):
        for call in (get, watch, put):
            assert await _reason_of(call(channel)) == "IDENTITY_SLOW"


async def test_a_port_in_use_is_told_with_its_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FailedPreconditionError, match=f"{address}.*address already in use") as caught:
            async with serve(ServerSettings(addresses=(address,)), []):
                pass
    assert caught.value.reason == "ADDRESS_UNUSABLE"


async def test_a_second_server_gets_neither_port_nor_socket_of_the_first(tmp_path: Path) -> None:
    path = f"unix:{tmp_path}/x.sock"
    async with serve(ServerSettings(addresses=("127.0.0.1:0", path)), []) as first:
        for address in first.addresses:
            with pytest.raises(FailedPreconditionError) as caught:
                async with serve(ServerSettings(addresses=(address,)), []):
                    pass
            assert caught.value.reason == "ADDRESS_UNUSABLE"
        for address in first.addresses:
            async with open_channel(address) as channel:
                await health_of(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    async with serve(ServerSettings(addresses=(path,)), []):
        pass


async def test_a_unix_socket_is_its_owners_alone_and_replaces_one_that_was_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "run" / "x.sock"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    async with serve(ServerSettings(addresses=(f"unix:{path}",)), []):
        assert path.stat().st_mode & 0o777 == 0o600


async def test_a_file_in_the_way_of_a_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(FailedPreconditionError):
        async with serve(ServerSettings(addresses=(f"unix:{path}",)), []):
            pass
    assert path.read_text() == "data"


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"])
async def test_nothing_listens_beyond_the_machine_unprotected(address: str) -> None:
    with pytest.raises(FailedPreconditionError, match="--insecure") as caught:
        async with serve(ServerSettings(addresses=(address,)), []):
            pass
    assert caught.value.reason == "ADDRESS_NOT_PROTECTED"


async def test_insecure_must_be_said_and_is_obeyed() -> None:
    async with serve(ServerSettings(addresses=("0.0.0.0:0",), is_insecure_allowed=True), []) as server:
        assert not server.addresses[0].endswith(":0")


async def test_metrics_count_calls_on_loopback_only() -> None:
    async with running(nothing) as (server, channel):
        await get(channel)
        async with serve_metrics("127.0.0.1:0", "session-store", server.calls, [lambda: {"things": 3}]) as address:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            text = (await reader.read()).decode()
            writer.close()
        with pytest.raises(InvalidArgumentError):
            async with serve_metrics("0.0.0.0:0", "session-store", server.calls, []):
                pass
    assert f'unreal_agent_calls_total{{component="session-store",method="/{NAME}/GetSession",code="OK"}} 1' in text
    assert 'unreal_agent_things{component="session-store"} 3' in text


async def test_closing_a_channel_in_the_middle_of_a_call_is_told_as_an_error() -> None:
    entered = asyncio.Event()

    async def behaviour() -> None:
        entered.set()
        await asyncio.Event().wait()

    async with running(behaviour) as (server, _):
        channel = open_channel(server.addresses[0])
        async with asyncio.TaskGroup() as tasks:
            getting = tasks.create_task(_reason_of(get(channel)))
            await entered.wait()
            await channel.close()
        assert getting.result() == "CLIENT_CLOSED"
        assert await _reason_of(get(channel)) == "CLIENT_CLOSED"
