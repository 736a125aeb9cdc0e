"""A coordinator that is sent anything at all answers with an error that says what is wrong, and goes on for others.

The server runs in this process, so that its tasks and what it holds can be counted; clients that vanish are processes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.message import Message

from clients._rpc.channel import open_channel
from clients._rpc.status import from_rpc_error
from harness.errors import HarnessError
from tests.support import raw_client
from tests.support.coordinator_server import ServedWorld, served_world
from tests.support.eventually import eventually
from tests.support.hostile_requests import hostile_requests
from tests.support.sound_requests import exported, sound_requests
from tests.support.world import bash, text_message
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from unreal_agent.session.v1 import session_pb2

ROOT = Path(__file__).resolve().parents[2]
SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
SUBMIT_INPUT = f"/{SERVICE.full_name}/SubmitInput"
GET_SESSION = f"/{SERVICE.full_name}/GetSession"

VANISHING_WATCHERS = 500
"""Of one process, which is killed in the middle; two of them."""

WATCHER_PROGRAM = """
import asyncio, sys
from clients._rpc.channel import open_channel
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as pb2, coordinator_service_pb2_grpc as grpc_pb2

async def main(address, count):
    channels = [open_channel(address) for _ in range(10)]
    stubs = [grpc_pb2.CoordinatorServiceStub(channel) for channel in channels]
    request = pb2.WatchSessionRequest(session_id="s1", include_deltas=True, include_output=True)
    calls = [stubs[number % len(stubs)].WatchSession(request) for number in range(count)]
    for call in calls:
        await call.read()
    print("all watch", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedWorld]:
    async with served_world(tmp_path, [{"tool_calls": [bash("echo hello")]}, {"text": "hello"}]) as served:
        await served.world.create()
        await served.world.run("hi")
        yield served


@asynccontextmanager
async def stub_of(served: ServedWorld) -> AsyncIterator[coordinator_grpc.CoordinatorServiceAsyncStub]:
    async with open_channel(served.address) as channel:
        yield coordinator_grpc.CoordinatorServiceStub(channel)


async def send(channel: grpc.aio.Channel, method: str, data: bytes) -> HarnessError | None:
    """Send bytes as the request of a call with any shape; return how it failed, None where it did not."""
    # The types would come from (de)serialisers; there are none.
    call: Any = channel.unary_stream(method)(data, timeout=10)  # type: ignore[arg-type]
    try:
        async for _ in call:
            break
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    finally:
        call.cancel()
    return None


async def is_served(served: ServedWorld) -> bool:
    """Return whether a client that means well is answered."""
    async with stub_of(served) as stub:
        response = await stub.GetSession(coordinator_pb2.GetSessionRequest(session_id="s1"), timeout=10)
        return bool(response.session.session_id == "s1")


@pytest.mark.slow
async def test_no_value_of_any_field_meets_a_fault(served: ServedWorld, caplog: pytest.LogCaptureFixture) -> None:
    await served.world.create("victim")
    async with open_channel(served.address) as channel:
        sound = sound_requests(await exported(coordinator_grpc.CoordinatorServiceStub(channel)))
        assert set(sound) == set(SERVICE.methods_by_name)
        faults = []
        for name, make in sound.items():
            # An import holds every type of the schemas.
            for label, request in hostile_requests(make, most=2 if name == "ImportSession" else 8):
                error = await send(channel, f"/{SERVICE.full_name}/{name}", request.SerializeToString())
                if error is not None and error.code in ("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "DATA_LOSS"):
                    faults.append(f"{name} {label}: {error.code}/{error.reason} {error.message}")
    assert faults == []
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert await is_served(served)


IDS = {"empty": "", "10,000 characters": "x" * 10_000, "NUL": "a\0b", "line break": "a\nb", "path": "../../etc"}


@pytest.mark.parametrize("bad_id", IDS.values(), ids=IDS.keys())
async def test_a_bad_input_id_is_refused_and_nothing_is_recorded(served: ServedWorld, bad_id: str) -> None:
    before = await served.world.items()
    async with open_channel(served.address) as channel:
        request = coordinator_pb2.SubmitInputRequest(session_id="s1", input=text_message(bad_id, "hi"))
        error = await send(channel, SUBMIT_INPUT, request.SerializeToString())
    if bad_id == "../../etc":  # an input's ID names no file
        assert error is None
        return
    assert error is not None
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID_INPUT_ID")
    assert error.metadata["field"].endswith("input_id")
    assert len(error.message) < 1000
    assert await served.world.items() == before


@pytest.mark.parametrize("bad_id", [one for one in IDS.values() if one])
async def test_a_bad_session_id_is_refused_and_no_session_is_made(served: ServedWorld, bad_id: str) -> None:
    async with open_channel(served.address) as channel:
        settings = session_pb2.SessionSettings(provider="scripted", model="m1", workspace="/tmp")
        request = coordinator_pb2.CreateSessionRequest(session_id=bad_id, settings=settings)
        error = await send(channel, f"/{SERVICE.full_name}/CreateSession", request.SerializeToString())
        assert error is not None
        assert (error.code, error.metadata.get("field")) == ("INVALID_ARGUMENT", "session_id")
        assert len(error.message) < 1000
        stub = coordinator_grpc.CoordinatorServiceStub(channel)
        listed = await stub.ListSessions(coordinator_pb2.ListSessionsRequest())
        assert [session.session_id for session in listed.sessions] == ["s1"]


def nested(depth: int) -> bytes:
    """Return an unknown group within a group, and so on."""
    return b"\xa3\x01" * depth + b"\xa4\x01" * depth


UNDECODABLE = {
    "random bytes": random.Random(1).randbytes(4096),
    "cut short": coordinator_pb2.GetSessionRequest(session_id="s1").SerializeToString()[:-1],
    "wrong UTF-8": b"\x0a\x03\xff\xfe\xfd",
    "nested 10,000 deep": nested(10_000),
    "nested 1,000,000 deep": nested(1_000_000),
    "length beyond the end": b"\x0a\xff\xff\xff\xff\x07s1",
}


@pytest.mark.parametrize("data", UNDECODABLE.values(), ids=UNDECODABLE.keys())
@pytest.mark.parametrize("method", [SUBMIT_INPUT, GET_SESSION, f"/{SERVICE.full_name}/ImportSession"])
async def test_bytes_that_are_no_request_are_an_invalid_argument(served: ServedWorld, method: str, data: bytes) -> None:
    async with open_channel(served.address) as channel:
        error = await send(channel, method, data)
    assert error is not None
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "UNDECODABLE_REQUEST")
    assert await is_served(served)


@pytest.mark.parametrize(("method", "size_mib"), [(GET_SESSION, 5), (SUBMIT_INPUT, 17), (SUBMIT_INPUT, 63)])
async def test_a_message_that_is_too_large_is_refused_with_its_bound(
    served: ServedWorld, method: str, size_mib: int
) -> None:
    text = "x" * (size_mib * 1024 * 1024)
    request: Message = coordinator_pb2.GetSessionRequest(session_id=text)
    if method == SUBMIT_INPUT:
        request = coordinator_pb2.SubmitInputRequest(session_id="s1", input=text_message("large", text))
    async with open_channel(served.address) as channel:
        error = await send(channel, method, request.SerializeToString())
    assert error is not None
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE")
    assert await is_served(served)
    assert served.server.calls.bytes_in_hand == 0


NOISE = {
    "random bytes": random.Random(2).randbytes(65_536),
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "half a preface": raw_client.PREFACE[:10],
    "random frames": raw_client.begin() + random.Random(3).randbytes(65_536),
    "a frame of 16 MiB": raw_client.begin() + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(1000),
    "headers that are none": raw_client.begin()
    + raw_client.frame(raw_client.HEADERS, b"\xff" * 100, flags=4, stream=1),
    "data of no call": raw_client.begin() + raw_client.message(b"x", stream=7),
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
async def test_noise_on_a_connection_concerns_no_other(served: ServedWorld, noise: bytes) -> None:
    async with stub_of(served) as stub:
        watch = aiter(stub.WatchSession(coordinator_pb2.WatchSessionRequest(session_id="s1")))
        assert (await anext(watch)).change.items
        connections = [await raw_client.connect(served.address, noise) for _ in range(20)]
        with raw_client.closed_at_end([writer for _, writer in connections]):
            assert await is_served(served)
            await served.world.say("again")
            assert (await anext(watch)).HasField("change")


UNFINISHED = {
    "nothing": b"",
    "a preface": raw_client.begin(),
    "headers": raw_client.begin() + raw_client.call_headers(SUBMIT_INPUT),
    "half a message": raw_client.begin()
    + raw_client.call_headers(SUBMIT_INPUT)
    + raw_client.message(b"x" * 1000, claimed_size=16_000_000),
    "a claim of 4 GiB": raw_client.begin()
    + raw_client.call_headers(SUBMIT_INPUT)
    + raw_client.message(b"x" * 1000, claimed_size=2**32 - 1),
    "a stream without end": raw_client.begin()
    + raw_client.call_headers(f"/{SERVICE.full_name}/ImportSession")
    + raw_client.message(coordinator_pb2.ImportSessionRequest(session_id="half").SerializeToString()),
}


@pytest.mark.parametrize("beginning", UNFINISHED.values(), ids=UNFINISHED.keys())
async def test_what_a_client_begins_and_never_ends_costs_little_and_is_given_back(
    served: ServedWorld, beginning: bytes
) -> None:
    process = psutil.Process()
    assert await is_served(served)
    descriptors, memory = process.num_fds(), process.memory_info().rss
    connections = [await raw_client.connect(served.address, beginning) for _ in range(100)]
    with raw_client.closed_at_end([writer for _, writer in connections]):
        assert await is_served(served)
        assert process.memory_info().rss - memory < 60 * 1024 * 1024
    await eventually(lambda: process.num_fds() <= descriptors + 5, within_s=10.0)
    await eventually(lambda: len(served.server.calls) == 0, within_s=10.0)
    assert served.server.calls.bytes_in_hand == 0


async def vanish_in_the_middle(served: ServedWorld) -> None:
    """Open watches in another process and kill it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WATCHER_PROGRAM, served.address, str(VANISHING_WATCHERS)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"},
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"all watch\n"
    assert len(served.server.calls) >= VANISHING_WATCHERS
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await eventually(lambda: len(served.server.calls) == 0, within_s=20.0)


@pytest.mark.slow
async def test_tasks_and_memory_are_back_after_a_thousand_clients_vanished(served: ServedWorld) -> None:
    process = psutil.Process()
    tasks = len(asyncio.all_tasks())
    await vanish_in_the_middle(served)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks, within_s=10.0)
    objects = objects_by_type()
    descriptors, memory = process.num_fds(), process.memory_info().rss
    # What the first lot took is kept by allocators; another one must do with it.
    await vanish_in_the_middle(served)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks, within_s=10.0)
    await eventually(lambda: process.num_fds() <= descriptors, within_s=10.0)

    def most_are_gone() -> bool:
        left = objects_by_type() - objects
        assert left.total() < VANISHING_WATCHERS, left.most_common(10)
        return True

    # gRPC lets go of a call some time after its handler ended.
    await eventually(most_are_gone, within_s=10.0)
    assert process.memory_info().rss - memory < VANISHING_WATCHERS * 40 * 1024
    assert await is_served(served)


def objects_by_type() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


async def test_a_client_that_vanishes_cancels_nothing_that_was_accepted(tmp_path: Path) -> None:
    script = [{"delay_seconds": 0.3, "text": "the answer"}]
    async with served_world(tmp_path, script) as served:
        await served.world.create()
        async with stub_of(served) as stub:
            request = coordinator_pb2.SubmitInputRequest(session_id="s1", input=text_message("i1", "hi"))
            await stub.SubmitInput(request)
            watch = stub.WatchSession(coordinator_pb2.WatchSessionRequest(session_id="s1", include_deltas=True))
            await watch.read()
        rest = await served.world.until_rest()
        assert rest.session_state == session_pb2.SESSION_STATE_IDLE
        assert (await served.world.items())[-1].model_response.output.items[0].message.text == "the answer"
