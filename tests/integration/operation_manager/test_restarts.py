"""The service dies and comes back: commands run on, and whoever watches or reads goes on where it was."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from clients.operation_manager import DialledLink, ProxyOperationManager
from harness.coordinator.manager_link import ManagerLink, Outgoing
from harness.coordinator.protocol import Dispatch, ManagerConnected, ManagerLost, OperationReported, Stimulus
from harness.errors import UnavailableError
from harness.operations import OperationManager, is_terminal
from harness.primitives.streams import closing
from tests.support.eventually import eventually
from tests.support.manager_service import ManagerProcess, manager_process
from tests.support.operations import OWNER, SESSION, adding, bash, carriers, end_of, read_all, run, running
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED

COUNTING = "for i in $(seq 30); do echo $i; sleep 0.04; done; echo $$"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[ManagerProcess]:
    async with manager_process(tmp_path / "state", "--kill-grace-seconds", "0.5") as service:
        yield service


@pytest.fixture
async def proxy(service: ManagerProcess) -> AsyncIterator[ProxyOperationManager]:
    async with ProxyOperationManager(DialledLink(service.address)) as proxy:
        yield proxy


def counted(pid: int) -> str:
    return "".join(f"{number}\n" for number in range(1, 31)) + f"{pid}\n"


def following(operation_id: str) -> manager_pb2.ReadOutputRequest:
    stdout = operation_pb2.OUTPUT_STREAM_STDOUT
    return manager_pb2.ReadOutputRequest(operation_id=operation_id, stream=stdout, follow=True)


@asynccontextmanager
async def linked(manager: OperationManager, deliver: Callable[[str, Stimulus], None]) -> AsyncIterator[ManagerLink]:
    """Run a coordinator's link to a manager while the block runs."""
    link = ManagerLink("local", manager, owner=OWNER, deliver=deliver, drop_session=lambda _: None)
    async with asyncio.TaskGroup() as tasks:
        runner = tasks.create_task(link.run())
        try:
            await eventually(lambda: link.instance_id)
            yield link
        finally:
            runner.cancel()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
async def test_command_and_its_coordinators_link_outlive_the_service(
    service: ManagerProcess, proxy: ProxyOperationManager, workspace: Path, number: signal.Signals
) -> None:
    heard: list[Stimulus] = []
    operation = bash(COUNTING)

    def ends() -> list[operation_pb2.Operation]:
        return [one.operation for one in heard if isinstance(one, OperationReported) and is_terminal(one.operation)]

    async with linked(proxy, lambda _, stimulus: heard.append(stimulus)) as link:
        dispatch = Dispatch(manager_name="local", instance_id=link.instance_id, operations=(operation,))
        link.send(Outgoing(session_id=SESSION, epoch=1, workspace=str(workspace), effect=dispatch))
        before = await running(proxy, operation.operation_id)
        assert await service.end(number) == (-9 if number == signal.SIGKILL else 0)
        await eventually(lambda: any(isinstance(one, ManagerLost) for one in heard))
        assert psutil.Process(before.bash.process_id).is_running()
        await service.start()
        (ended,) = await eventually(ends, within_s=10)
    assert (ended.status, ended.bash.stdout.head) == (COMPLETED, counted(before.bash.process_id))
    assert ended.bash.process_id == before.bash.process_id
    connections = [one for one in heard if isinstance(one, ManagerConnected | ManagerLost)]
    connected = ManagerConnected(manager_name="local", instance_id=dispatch.instance_id)
    assert connections == [connected, ManagerLost(manager_name="local"), connected]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
async def test_reader_gets_each_byte_once_through_a_restart(
    service: ManagerProcess, proxy: ProxyOperationManager, workspace: Path, number: signal.Signals
) -> None:
    operation = bash(COUNTING)
    await proxy.add_operations(adding([operation], workspace))
    before = await running(proxy, operation.operation_id)
    data = b""
    has_been_killed = False
    async with closing(proxy.read_output(following(operation.operation_id))) as pieces:
        async for piece in pieces:
            assert piece.offset == len(data)
            data += piece.data
            if data and not has_been_killed:
                has_been_killed = True
                await service.end(number)
                await service.start()
    assert data.decode() == counted(before.bash.process_id)


async def test_watch_that_breaks_says_so_and_the_next_one_misses_nothing(
    service: ManagerProcess, proxy: ProxyOperationManager, workspace: Path
) -> None:
    operation = bash("echo kept; touch done")
    await proxy.add_operations(adding([operation], workspace))
    with pytest.raises(UnavailableError) as broken:
        async for _ in proxy.watch_operations(manager_pb2.WatchOperationsRequest()):
            await eventually((workspace / "done").exists)
            await service.end(signal.SIGKILL)
    assert broken.value.reason == "CONNECTION_LOST"
    await service.start()
    assert (await end_of(proxy, operation.operation_id)).bash.stdout.head == "kept\n"


async def test_call_during_an_outage_is_made_up_for_and_starts_a_command_once(
    service: ManagerProcess, proxy: ProxyOperationManager, workspace: Path
) -> None:
    operation = bash("echo x >> count")
    await service.end(signal.SIGKILL)
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(proxy.add_operations(adding([operation], workspace))) for _ in range(3)]
        await service.start()
    assert {call.result().results[0].operation.operation_id for call in calls} == {operation.operation_id}
    assert (await end_of(proxy, operation.operation_id)).status == COMPLETED
    assert (workspace / "count").read_text() == "x\n"


async def test_drain_ends_watches_and_readers_at_once_and_cancels_nothing(
    service: ManagerProcess, proxy: ProxyOperationManager, workspace: Path
) -> None:
    operation = bash("touch ready; sleep 60")
    await proxy.add_operations(adding([operation], workspace))
    await eventually((workspace / "ready").exists)
    link = DialledLink(service.address)
    watches = ProxyOperationManager(link)

    async def watch() -> str:
        with pytest.raises(UnavailableError) as ended:
            async for _ in watches.watch_operations(manager_pb2.WatchOperationsRequest()):
                watching.release()
        return ended.value.reason

    watching = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    async with watches, asyncio.TaskGroup() as tasks:
        running_watches = [tasks.create_task(watch()) for _ in range(3)]
        for _ in running_watches:
            await watching.acquire()
        begin_s = loop.time()
        assert await service.end(signal.SIGTERM) == 0
        assert loop.time() - begin_s < 3
    assert [one.result() for one in running_watches] == ["DRAINING"] * 3
    assert carriers(operation.operation_id) != []
    assert "destroyed" not in service.log()
    for process in carriers(operation.operation_id):
        # One of them ends with another.
        with suppress(psutil.NoSuchProcess):
            process.kill()


async def test_client_that_goes_away_cancels_nothing(service: ManagerProcess, workspace: Path) -> None:
    operation = bash("touch ready; sleep 0.5; touch done")
    async with ProxyOperationManager(DialledLink(service.address)) as proxy:
        await proxy.add_operations(adding([operation], workspace))
        async with closing(proxy.watch_operations(manager_pb2.WatchOperationsRequest())) as watch:
            await anext(watch)
            await eventually((workspace / "ready").exists)
    await eventually((workspace / "done").exists)


async def test_second_process_over_the_same_state_is_refused(service: ManagerProcess, tmp_path: Path) -> None:
    second = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.operation_manager",
        *("--state-dir", str(service.state), "--listen", f"unix:{tmp_path}/other.sock"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    _, error = await second.communicate()
    assert (second.returncode, b"is open in another operation manager" in error) == (1, True)


async def test_proxy_in_the_environment_is_not_used(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with (
        manager_process(tmp_path / "state", "--command-environment", "ONE=1", address="127.0.0.1:0") as service,
        ProxyOperationManager(DialledLink(service.address)) as proxy,
    ):
        ended = await run(proxy, bash("echo $ONE $http_proxy"), workspace)
    assert ended.bash.stdout.head == "1 http://127.0.0.1:9\n"


async def test_example_runs_a_command_tails_it_and_tells_its_result(service: ManagerProcess) -> None:
    example = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "examples.operation_manager_alone",
        service.address,
        "for i in 1 2 3; do echo $i; sleep 0.1; done; exit 3",
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    output, _ = await example.communicate()
    assert (example.returncode, output.decode()) == (3, "1\n2\n3\nexit code 3, 6 bytes of output\n")


async def test_finished_output_is_read_after_a_restart(
    service: ManagerProcess, proxy: ProxyOperationManager, workspace: Path
) -> None:
    ended = await run(proxy, bash("seq 1000"), workspace)
    await service.end(signal.SIGKILL)
    await service.start()
    data, _ = await read_all(proxy, following(ended.operation_id))
    assert data.decode().split() == [str(number) for number in range(1, 1001)]
