"""Clients by their tokens: what each may do, that it sees no other's sessions, and that its streams end with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients._rpc.channel import open_channel
from clients._rpc.status import from_rpc_error
from clients.coordinator import CoordinatorClient
from clients.session_store.remote_session_store import RemoteSessionStore
from harness.clock import timestamp
from harness.errors import HarnessError, PermissionDeniedError, UnauthenticatedError
from harness.session_store import SessionStore
from services.coordinator.servicer import SERVICE_NAME
from services.coordinator.tokens import RIGHT_FOR
from tests.support.coordinator_server import served_world
from tests.support.sound_requests import exported, sound_requests
from tests.support.stack import COORDINATOR, STORE, Stack, three_services
from tests.support.world import Script, World, bash
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from unreal_agent.gateway.v1 import operation_manager_gateway_service_pb2 as gateway_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]

READ, SUBMIT, CONTROL = store_pb2.RIGHT_READ, store_pb2.RIGHT_SUBMIT, store_pb2.RIGHT_CONTROL
ALL = (READ, SUBMIT, CONTROL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A coordinator that asks for tokens, with a session `s1` that has run."""

    addresses: Mapping[str, str]
    workspace: Path
    store: SessionStore
    admin: str

    async def token(self, *rights: store_pb2.Right.ValueType, prefix: str = "", seconds: float = 0.0) -> str:
        return (await self.made(*rights, prefix=prefix, seconds=seconds)).secret

    async def made(
        self, *rights: store_pb2.Right.ValueType, prefix: str = "", seconds: float = 0.0
    ) -> store_pb2.CreateTokenResponse:
        token = store_pb2.Token(rights=rights, session_prefix=prefix)
        if seconds:
            token.expire_time.CopyFrom(timestamp(datetime.now(UTC) + timedelta(seconds=seconds)))
        return await self.store.create_token(store_pb2.CreateTokenRequest(request_id=uuid.uuid4().hex, token=token))

    def client(self, token: str, name: str = COORDINATOR) -> CoordinatorClient:
        return CoordinatorClient(self.addresses[name], token=token, patience_s=10.0)

    async def refusal(self, token: str, method: str, request: Any) -> HarnessError | None:
        """Return how a call was refused; None where it was not refused for who calls."""
        async with open_channel(self.addresses[COORDINATOR], token=token) as channel:
            call: Any = channel.unary_stream(f"/{SERVICE_NAME}/{method}")(request.SerializeToString(), timeout=10)
            try:
                async for _ in call:
                    break
            except grpc.aio.AioRpcError as error:
                found = from_rpc_error(error)
                return found if isinstance(found, (PermissionDeniedError, UnauthenticatedError)) else None
            finally:
                call.cancel()
        return None


SCRIPT: Script = [{"tool_calls": [bash("echo hello")]}, {"text": "hello"}]


@asynccontextmanager
async def guarded(directory: Path) -> AsyncIterator[Guarded]:
    """Run a coordinator's server in this process."""
    async with served_world(directory, SCRIPT, asks_for_tokens=True) as served:
        yield await _with_session({COORDINATOR: served.address}, served.world.workspace, served.store)


@asynccontextmanager
async def guarded_services(directory: Path) -> AsyncIterator[tuple[Guarded, Stack]]:
    """Run the three services."""
    flags = {COORDINATOR: ("--authenticate", "tokens")}
    async with (
        three_services(directory, SCRIPT, flags=flags) as stack,
        RemoteSessionStore(stack.addresses[STORE]) as store,
    ):
        yield await _with_session(stack.addresses, stack.workspace, store), stack


async def _with_session(addresses: Mapping[str, str], workspace: Path, store: SessionStore) -> Guarded:
    made = await store.create_token(store_pb2.CreateTokenRequest(request_id="admin", token=store_pb2.Token(rights=ALL)))
    services = Guarded(addresses=addresses, workspace=workspace, store=store, admin=made.secret)
    async with services.client(made.secret) as client:
        world = World(coordinator=client, workspace=workspace)
        await world.create()
        await world.run("hi")
    return services


async def sound(services: Guarded) -> dict[str, Any]:
    async with open_channel(services.addresses[COORDINATOR], token=services.admin) as channel:
        return sound_requests(await exported(coordinator_grpc.CoordinatorServiceStub(channel)))


def test_every_call_has_a_right() -> None:
    gateway = gateway_pb2.DESCRIPTOR.services_by_name["OperationManagerGatewayService"]
    assert RIGHT_FOR.keys() | {"GetServerInfo"} == {*SERVICE.methods_by_name, *gateway.methods_by_name}


async def test_a_call_without_a_valid_token_is_refused_whatever_it_asks(tmp_path: Path) -> None:
    async with guarded(tmp_path) as services:
        expired = await services.token(*ALL, seconds=0.001)
        revoked = await services.made(*ALL)
        await services.store.revoke_token(store_pb2.RevokeTokenRequest(token_id=revoked.token.token_id))
        reasons = {"": "TOKEN_MISSING", "guess": "TOKEN_UNKNOWN", expired: "TOKEN_EXPIRED"}
        for name, make in (await sound(services)).items():
            for token, reason in reasons.items():
                error = await services.refusal(token, name, make())
                assert error is not None, name
                assert error.reason == reason
            error = await services.refusal(revoked.secret, name, make())
            assert error is not None
            assert error.reason in ("TOKEN_REVOKED", "TOKEN_UNKNOWN")
            assert not any(secret in error.message for secret in (expired, revoked.secret))


async def test_a_token_allows_what_its_rights_say_and_nothing_else(tmp_path: Path) -> None:
    async with guarded(tmp_path) as services:
        tokens = {right: await services.token(right) for right in ALL}
        for name, make in (await sound(services)).items():
            if name == "DeleteSession":
                continue
            for right, token in tokens.items():
                error = await services.refusal(token, name, make())
                if RIGHT_FOR.get(name) in (None, right):
                    assert error is None, name
                else:
                    assert error is not None, name
                    assert (type(error), error.reason) == (PermissionDeniedError, "RIGHT_MISSING")


async def test_a_token_for_a_prefix_sees_and_touches_no_other_session(tmp_path: Path) -> None:
    async with guarded(tmp_path) as services:
        token = await services.token(*ALL, prefix="team-")
        for name, make in (await sound(services)).items():
            if name in ("GetServerInfo", "ListSessions"):
                continue
            error = await services.refusal(token, name, make())
            assert error is not None, name
            assert error.reason == "SESSION_NOT_ALLOWED"
        as_exported = (await sound(services))["ImportSession"]()
        as_exported.session_id = ""
        error = await services.refusal(token, "ImportSession", as_exported)
        assert error is not None
        assert error.reason == "SESSION_NOT_ALLOWED"
        settings = session_pb2.SessionSettings(provider="scripted", model="m1", workspace=str(services.workspace))
        async with services.client(token) as client:
            unnamed = await client.create_session(coordinator_pb2.CreateSessionRequest(settings=settings))
            assert unnamed.session.session_id.startswith("team-")
            fork = await client.fork_session(
                coordinator_pb2.ForkSessionRequest(request_id="f", parent_session_id=unnamed.session.session_id)
            )
            assert fork.session.session_id.startswith("team-")
            for prefix in ("", "te", "team-"):
                listed = await client.list_sessions(coordinator_pb2.ListSessionsRequest(id_prefix=prefix))
                assert len(listed.sessions) == 2
            for prefix in ("s", "teams", "s1"):
                listed = await client.list_sessions(coordinator_pb2.ListSessionsRequest(id_prefix=prefix))
                assert len(listed.sessions) == 0
            # Of an operation of another session, under the name of an own one.
            page = await services.store.list_operations(store_pb2.ListOperationsRequest(session_id="s1"))
            for operation in page.operations:
                wish = coordinator_pb2.ReadOutputRequest(session_id=unnamed.session.session_id)
                wish.request.operation_id = operation.operation_id
                with pytest.raises(HarnessError, match="has no operation"):
                    _ = [piece async for piece in client.read_output(wish)]


async def test_a_fork_without_an_id_that_is_asked_for_again_is_made_once_within_the_prefix(tmp_path: Path) -> None:
    """By a client of another language, which leaves the ID to the server."""
    settings = session_pb2.SessionSettings(provider="scripted", model="m1", workspace=str(tmp_path))
    async with guarded(tmp_path) as services:
        token = await services.token(*ALL, prefix="team-")
        async with open_channel(services.addresses[COORDINATOR], token=token) as channel:
            stub = coordinator_grpc.CoordinatorServiceStub(channel)
            for parent in ("team-1", "team-2"):
                await stub.CreateSession(coordinator_pb2.CreateSessionRequest(session_id=parent, settings=settings))
            one, again, other, elsewhere = [
                await stub.ForkSession(coordinator_pb2.ForkSessionRequest(request_id=request, parent_session_id=parent))
                for request, parent in (("f", "team-1"), ("f", "team-1"), ("g", "team-1"), ("f", "team-2"))
            ]
            assert (again.session.session_id, again.duplicate) == (one.session.session_id, True)
            assert len({made.session.session_id for made in (one, other, elsewhere)}) == 3


async def watch_until_refused(client: CoordinatorClient, began: asyncio.Event) -> str:
    try:
        async for _ in client.watch_session(coordinator_pb2.WatchSessionRequest(session_id="s1", include_deltas=True)):
            began.set()
    except UnauthenticatedError as error:
        return error.reason
    return "ended"


async def test_a_watch_ends_when_its_token_is_revoked_and_others_go_on(tmp_path: Path) -> None:
    async with guarded(tmp_path) as services:
        made = await services.made(READ)
        async with (
            services.client(made.secret) as client,
            services.client(services.admin) as other,
            asyncio.TaskGroup() as tasks,
        ):
            began, other_began = asyncio.Event(), asyncio.Event()
            watching = tasks.create_task(watch_until_refused(client, began))
            other_watching = tasks.create_task(watch_until_refused(other, other_began))
            await began.wait()
            await other_began.wait()
            await services.store.revoke_token(store_pb2.RevokeTokenRequest(token_id=made.token.token_id))
            async with asyncio.timeout(5):
                assert await watching == "TOKEN_REVOKED"
            assert not other_watching.done()
            other_watching.cancel()


async def test_a_watch_ends_when_its_token_expires(tmp_path: Path) -> None:
    async with guarded(tmp_path) as services, services.client(await services.token(READ, seconds=1.0)) as client:
        async with asyncio.timeout(5):
            assert await watch_until_refused(client, asyncio.Event()) == "TOKEN_EXPIRED"


async def test_known_tokens_hold_while_the_store_is_away_and_are_told_anew_after(tmp_path: Path) -> None:
    async with guarded_services(tmp_path) as (services, stack), services.client(services.admin) as client:
        await stack.kill(STORE)
        await client.get_server_info(coordinator_pb2.GetServerInfoRequest())
        await stack.start(STORE)
        made = await services.made(READ)
        async with services.client(made.secret) as later:
            await later.get_server_info(coordinator_pb2.GetServerInfoRequest())


async def test_a_call_is_passed_on_with_its_callers_token(tmp_path: Path) -> None:
    async with guarded_services(tmp_path) as (services, stack):
        await stack.add_coordinator("second", "--authenticate", "tokens")
        services = replace(services, addresses=stack.addresses)
        async with services.client(services.admin, "second") as client:
            world = World(coordinator=client, workspace=services.workspace)
            # The first owns it.
            await world.run("again")
        async with services.client(await services.token(READ), "second") as reader:
            with pytest.raises(PermissionDeniedError):
                await World(coordinator=reader, workspace=services.workspace).run("no")


async def test_tokens_are_made_listed_and_revoked_by_hand(tmp_path: Path) -> None:
    async with guarded_services(tmp_path) as (services, stack):
        environment = {**stack.environment, "UNREAL_AGENT_SERVER": stack.address}

        def run(*arguments: str, token: str = "") -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "clients.cli", *arguments],
                env={**environment, "UNREAL_AGENT_TOKEN": token},
                capture_output=True,
                text=True,
                timeout=30,
            )

        at = ("--session-store", stack.addresses[STORE])
        wish = ("--right", "read", "--label", "for Ann", "--days", "2")
        made = await asyncio.to_thread(run, "tokens", "create", *wish, *at)
        assert made.returncode == 0, made.stderr
        secret = made.stdout.strip()
        assert secret.count("\n") == 0
        listed = await asyncio.to_thread(run, "tokens", "list", *at)
        (line,) = [line for line in listed.stdout.splitlines() if "for Ann" in line]
        assert "valid until" in line
        assert "read on all sessions" in line
        assert secret not in listed.stdout
        shown = await asyncio.to_thread(run, "sessions", "list", token=secret)
        assert shown.returncode == 0, shown.stderr
        assert "s1" in shown.stdout
        told = await asyncio.to_thread(run, "sessions", "delete", "s1", token=secret)
        assert told.returncode == 1
        assert "lacks the right 'control'" in told.stderr
        assert len(told.stderr.splitlines()) == 1
        useless = await asyncio.to_thread(run, "tokens", "create", "--prefix", "a b", *at)
        assert (useless.returncode, useless.stdout) == (1, "")
        assert "token.session_prefix must be 1 to 128 letters" in useless.stderr
        revoked = await asyncio.to_thread(run, "tokens", "revoke", line.split()[0], *at)
        assert revoked.returncode == 0
        for token, word in ((secret, "revoked"), ("", "UNREAL_AGENT_TOKEN")):
            told = await asyncio.to_thread(run, "sessions", "list", token=token)
            assert told.returncode == 1
            assert word in told.stderr
            assert len(told.stderr.splitlines()) == 1


async def test_a_run_with_a_token_for_a_prefix_makes_its_session_there(tmp_path: Path) -> None:
    async with guarded_services(tmp_path) as (services, stack):
        token = await services.token(*ALL, prefix="team-")
        environment = {
            **stack.environment,
            "UNREAL_AGENT_SERVER": services.addresses[COORDINATOR],
            "UNREAL_AGENT_TOKEN": token,
        }
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "clients.cli", "run", "-p", "hi", "--workspace", str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        assert "team-" in done.stdout
