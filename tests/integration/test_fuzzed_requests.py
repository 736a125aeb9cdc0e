"""Whatever bytes come as the request of whatever call, a service answers with an error of ours, and goes on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from clients._rpc.channel import open_channel
from clients._rpc.status import from_rpc_error
from harness.errors import HarnessError
from harness.session_store.sqlite import SqliteSessionStore
from tests.contract.session_store_suite.exports import write_history
from tests.support.coordinator_server import served_world
from tests.support.fuzzing import corpus
from tests.support.hostile_requests import hostile_requests
from tests.support.manager_service import served_manager
from tests.support.mutation import PROTOBUF_TOKENS, Mutator
from tests.support.store_service import served
from tests.support.world import bash
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

SHORT_ROUNDS = 600
LONG_ROUNDS = 50_000

# They may have nothing to say for long.
WAITING = {"WatchSession", "WatchRunnable", "WatchTokens", "WatchOperations", "ReadOutput", "CommitStream"}
FAULTS = {"INTERNAL", "UNKNOWN", "DATA_LOSS", "DEADLINE_EXCEEDED", "UNAVAILABLE"}
WAIT_S = 0.05


@asynccontextmanager
async def coordinator(directory: Path) -> AsyncIterator[str]:
    script: list[Mapping[str, object]] = [{"tool_calls": [bash("echo hello")]}, {"text": "hello"}]
    async with served_world(directory, script) as served_agent:
        await served_agent.world.create()
        await served_agent.world.run("hi")
        yield served_agent.address


@asynccontextmanager
async def session_store(directory: Path) -> AsyncIterator[str]:
    async with SqliteSessionStore.open(directory / "sessions.db") as store:
        await write_history(store, "s")
        async with served(store) as server:
            yield server.addresses[0]


@asynccontextmanager
async def operation_manager(directory: Path) -> AsyncIterator[str]:
    async with served_manager(directory / "state") as (server, _):
        yield server.addresses[0]


SERVICES: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "coordinator": (coordinator, coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]),
    "session-store": (session_store, store_pb2.DESCRIPTOR.services_by_name["SessionStoreService"]),
    "operation-manager": (operation_manager, manager_pb2.DESCRIPTOR.services_by_name["OperationManagerService"]),
}


async def _send(channel: grpc.aio.Channel, path: str, data: bytes, timeout_s: float) -> HarnessError | None:
    """Send bytes as the request of a call with any shape; return how it failed, None where it answered."""
    # The types would come from (de)serialisers; there are none.
    call: Any = channel.unary_stream(path)(data, timeout=timeout_s)  # type: ignore[arg-type]
    try:
        async for _ in call:
            break
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    finally:
        call.cancel()
    return None


async def _fuzz(name: str, directory: Path, rounds: int, run: int, faults: list[logging.LogRecord]) -> None:
    opened, service = SERVICES[name]
    requests = corpus(f"requests-{name}")
    assert {file.partition(".")[0] for file in requests} == set(service.methods_by_name)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(opened(directory))
        channel = await stack.enter_async_context(open_channel(address))
        methods = sorted(requests)
        mutators = [
            Mutator([requests[file], requests[file], *requests.values()], PROTOBUF_TOKENS, crc32(file.encode()) + run)
            for file in methods
        ]
        for number in range(rounds + len(methods)):
            file = methods[number % len(methods)]
            method = file.partition(".")[0]
            # First everything as it is: sound requests, and those that once met a fault.
            data = requests[file] if number < len(methods) else mutators[number % len(methods)].draw()
            wait_s = WAIT_S if method in WAITING else 20.0
            error = await _send(channel, f"/{service.full_name}/{method}", data, wait_s)
            is_fault = error is not None and error.code in FAULTS and not _is_expected(method, error)
            shown = f"keep it in tests/corpora/requests-{name}/{method}.NAME: {data[:400]!r}"
            assert not is_fault, f"{method} {number}: {error!r}; {shown}"
            assert not faults, f"{method} {number} logged {faults[0].getMessage()}: {faults[0].exc_text}; {shown}"
        request = service.methods_by_name["GetServerInfo"]
        assert await _send(channel, f"/{service.full_name}/{request.name}", b"", 20.0) is None


def _is_expected(method: str, error: HarnessError) -> bool:
    if error.code == "DEADLINE_EXCEEDED":
        return method in WAITING
    return error.code == "UNAVAILABLE" and error.reason in ("NOT_OWNER",)


@pytest.fixture
def faults() -> Any:
    """Collect what services log as errors."""
    records: list[logging.LogRecord] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.exc_text = str(record.exc_info[1]) if record.exc_info else ""
            records.append(record)

    collector = Collector(level=logging.ERROR)
    logging.getLogger().addHandler(collector)
    yield records
    logging.getLogger().removeHandler(collector)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SERVICES)
async def test_no_bytes_of_a_request_meet_a_fault(name: str, tmp_path: Path, faults: list[logging.LogRecord]) -> None:
    await _fuzz(name, tmp_path, SHORT_ROUNDS, 0, faults)


@pytest.mark.long
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("name", SERVICES)
async def test_no_bytes_of_a_request_meet_a_fault_for_long(
    name: str, tmp_path: Path, faults: list[logging.LogRecord]
) -> None:
    await _fuzz(name, tmp_path, LONG_ROUNDS, 1, faults)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["session-store", "operation-manager"])
async def test_no_value_of_any_field_of_an_inner_service_meets_a_fault(
    name: str, tmp_path: Path, faults: list[logging.LogRecord]
) -> None:
    opened, service = SERVICES[name]
    requests = corpus(f"requests-{name}")
    async with opened(tmp_path) as address, open_channel(address) as channel:
        for method in service.methods:
            make = partial(GetMessageClass(method.input_type).FromString, requests[method.name])
            # An import and a commit hold every type of the schemas.
            most = 1 if method.name in ("ImportSession", "Commit", "CommitStream") else 4
            for label, request in hostile_requests(make, most=most):
                wait_s = WAIT_S if method.name in WAITING else 20.0
                path = f"/{service.full_name}/{method.name}"
                error = await _send(channel, path, request.SerializeToString(), wait_s)
                assert error is None or error.code not in FAULTS or _is_expected(method.name, error), (label, error)
                assert not faults, f"{method.name} {label} logged {faults[0].getMessage()}: {faults[0].exc_text}"
