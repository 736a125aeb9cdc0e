"""Clients without generated code do the main job: what the coordinator says of itself is enough."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.support.stack import MANAGER, STORE, Stack, three_services
from tests.support.world import Script, bash

SERVICE = "unreal_agent.coordinator.v1.CoordinatorService"
BUF = Path(sys.executable).with_name("buf")

SCRIPT: Script = [
    {"text": "I'll look.", "tool_calls": [bash("echo 6 times 7 is $((6 * 7))")]},
    {"expect": "6 times 7 is 42", "text": "It is 42."},
]


class ReflectedClient:
    """Knows a service's name and asks the server for the rest. Types are of a pool of its own."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        database = ProtoReflectionDescriptorDatabase(channel)
        self.services = set(database.get_services())
        self._channel = channel
        self._service = DescriptorPool(database).FindServiceByName(service)

    def call(self, name: str, **request: object) -> Any:
        """Return the answer to a request given as JSON, or an iterator of the answers."""
        method: Any = self._service.methods_by_name[name]
        request_type: type[Message] = message_factory.GetMessageClass(method.input_type)
        response_type: type[Message] = message_factory.GetMessageClass(method.output_type)
        shape = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        call = shape(f"/{self._service.full_name}/{name}", request_type.SerializeToString, response_type.FromString)
        return call(ParseDict(request, request_type()), timeout=20)


def settings(workspace: Path) -> dict[str, str]:
    return {"provider": "scripted", "model": "m1", "workspace": str(workspace)}


def message(input_id: str, text: str) -> dict[str, object]:
    return {"input_id": input_id, "content": {"parts": [{"text": {"text": text}}]}}


def do_main_job(address: str, workspace: Path) -> Iterator[str]:
    """Ask and yield what is said, results of calls included."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        client = ReflectedClient(channel, SERVICE)
        assert {SERVICE, "grpc.health.v1.Health"} <= client.services
        client.call("CreateSession", session_id="s1", settings=settings(workspace))
        accepted = client.call("SubmitInput", session_id="s1", input=message("i1", "How much is 6 times 7?"))
        again = client.call("SubmitInput", session_id="s1", input=message("i1", "How much is 6 times 7?"))
        assert (accepted.duplicate, again.duplicate, again.sequence) == (False, True, accepted.sequence)
        for event in client.call("WatchSession", session_id="s1", until_idle=True):
            for item in event.change.items:
                yield from (part.message.text for part in item.model_response.output.items if part.message.text)
                yield from (part.text.text for part in item.tool_call_status.result.parts)
            if event.HasField("rest_reached"):
                yield (
                    type(event)
                    .DESCRIPTOR.file.pool.FindEnumTypeByName("unreal_agent.session.v1.SessionState")
                    .values_by_number[event.rest_reached.rest.session_state]
                    .name
                )


async def test_reflection_is_enough_to_do_the_main_job(tmp_path: Path) -> None:
    async with three_services(tmp_path, SCRIPT) as stack:
        # This client blocks, and the test's own loop is the one that watches over the services.
        said = await asyncio.to_thread(lambda: list(do_main_job(stack.address, stack.workspace)))
    assert said[0] == "I'll look."
    assert "6 times 7 is 42" in said[1]
    assert said[2:] == ["It is 42.", "SESSION_STATE_IDLE"]


@pytest.mark.parametrize(
    ("name", "service"),
    [
        (STORE, "unreal_agent.sessionstore.v1.SessionStoreService"),
        (MANAGER, "unreal_agent.operationmanager.v1.OperationManagerService"),
    ],
)
async def test_every_service_tells_of_itself(tmp_path: Path, name: str, service: str) -> None:
    async with three_services(tmp_path, SCRIPT, starts=False) as stack:
        await stack.start(name)

        def ask() -> str:
            with grpc.insecure_channel(stack.addresses[name]) as channel:
                return str(ReflectedClient(channel, service).call("GetServerInfo").info.component)

        assert await asyncio.to_thread(ask) == name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def buf_curl(where: Sequence[str], name: str, request: object, home: Path) -> Any:
    """Return the answer of a call by `buf curl`, which asks for the schema by reflection."""
    *flags, base = where
    process = await asyncio.create_subprocess_exec(
        *(str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--reflect", *flags),
        *("--data", json.dumps(request), f"{base}/{SERVICE}/{name}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return json.loads(output)


@pytest.fixture(params=["TCP", "Unix socket"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def base_of(stack: Stack, transport: str, port: int) -> tuple[str, ...]:
    if transport == "TCP":
        return (f"http://127.0.0.1:{port}",)
    return ("--unix-socket", stack.address.removeprefix("unix:"), "http://localhost")


@pytest.mark.slow
async def test_buf_curl_creates_submits_and_gets(tmp_path: Path, transport: str) -> None:
    port = free_port()
    async with three_services(tmp_path, SCRIPT, flags={"coordinator": ["--listen", f"127.0.0.1:{port}"]}) as stack:
        where = base_of(stack, transport, port)
        request: object = {"session_id": "s1", "settings": settings(stack.workspace)}
        created = await buf_curl(where, "CreateSession", request, tmp_path)
        assert created["session"]["sessionId"] == "s1"
        request = {"session_id": "s1", "input": message("i1", "How much is 6 times 7?")}
        assert "duplicate" not in await buf_curl(where, "SubmitInput", request, tmp_path)
        assert (await buf_curl(where, "SubmitInput", request, tmp_path))["duplicate"] is True
        async with stack.world() as world:
            world.session_id = "s1"
            await world.until_rest()
        got = await buf_curl(where, "GetSession", {"session_id": "s1"}, tmp_path)
        assert got["session"]["rest"]["sessionState"] == "SESSION_STATE_IDLE"
        assert got["turns"] == "2"
