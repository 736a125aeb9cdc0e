"""Starting processes in a process with gRPC's threads: never by a fork, without hang, leak or zombie."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from clients.operation_manager import DialledLink, ProxyOperationManager
from harness.operations import OperationManager, is_terminal
from harness.operations.local_manager import LocalOperationManager
from harness.primitives.streams import closing
from tests.support.eventually import eventually
from tests.support.manager_service import ManagerProcess, manager_process
from tests.support.operations import acknowledging, adding, bash
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
ASKERS = 8


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


async def test_launcher_runs_before_a_server_can_be_made(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    async with LocalOperationManager.open(tmp_path / "state", name="local"):
        # Nothing is awaited in between, as nothing is between the manager and the server of the service.
        made = [child for child in psutil.Process().children() if child.pid not in before]
        assert len(made) == 1
        # A program that was executed just now may have no arguments yet.
        await eventually(lambda: [Path(word).name for word in made[0].cmdline()[-1:]] == ["launcher.py"])


async def test_nothing_forks_beside_grpc_whatever_is_executed(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "ignore::DeprecationWarning", "-m", "tests.support.counted_forks", str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    output, _ = await process.communicate()
    # The last is the program's own, which shows that forks are counted.
    assert output.decode().splitlines() == ["12 commands, 1 image, 2 launchers: 0 forks", "then 1 fork"]


@pytest.mark.parametrize("count", [300, pytest.param(2_000, marks=[pytest.mark.long, pytest.mark.timeout(300)])])
async def test_many_commands_beside_busy_grpc_all_end_and_leave_nothing(
    tmp_path: Path, workspace: Path, count: int
) -> None:
    async with manager_process(tmp_path / "state", "--concurrency", "16") as service:
        async with ProxyOperationManager(DialledLink(service.address)) as warm:
            await run_commands(warm, workspace, 16)
        before = open_files(service)
        async with ProxyOperationManager(DialledLink(service.address)) as proxy:
            await run_beside_calls(proxy, workspace, count)
        await eventually(lambda: open_files(service) <= before, within_s=15)
        family = psutil.Process(service.process.pid).children(recursive=True)
        assert [Path(one.cmdline()[-1]).name for one in family] == ["launcher.py"]
        assert "ERROR" not in service.log()


async def run_beside_calls(manager: OperationManager, workspace: Path, count: int) -> None:
    """Run commands while a stream is open in both directions and calls never pause."""
    is_over = asyncio.Event()

    async def ask() -> None:
        while not is_over.is_set():
            await manager.get_server_info(manager_pb2.GetServerInfoRequest())

    async def requests() -> AsyncIterator[manager_pb2.UploadWorkspaceRequest]:
        directory = manager_pb2.WorkspaceEntry(path="there", directory=manager_pb2.Directory())
        yield manager_pb2.UploadWorkspaceRequest(workspace=str(workspace), entries=[directory])
        await is_over.wait()
        yield manager_pb2.UploadWorkspaceRequest()

    async def upload() -> int:
        async with closing(manager.upload_workspace(requests())) as answers:
            return len([answer async for answer in answers])

    async with asyncio.TaskGroup() as tasks:
        for _ in range(ASKERS):
            tasks.create_task(ask())
        uploading = tasks.create_task(upload())
        try:
            await run_commands(manager, workspace, count)
        finally:
            is_over.set()
    assert uploading.result() == 2


async def run_commands(manager: OperationManager, workspace: Path, count: int) -> None:
    operations = [bash("true") for _ in range(count)]
    await manager.add_operations(adding(operations, workspace))
    ended: Counter[operation_pb2.OperationStatus.ValueType] = Counter()
    async with closing(manager.watch_operations(manager_pb2.WatchOperationsRequest())) as watch:
        async for event in watch:
            if event.HasField("update") and is_terminal(event.update.operation):
                await manager.acknowledge_updates(acknowledging(event.update.operation))
                ended[event.update.operation.status] += 1
            if ended.total() == count:
                break
    assert ended == {COMPLETED: count}


def open_files(service: ManagerProcess) -> int:
    return len(os.listdir(f"/proc/{service.process.pid}/fd"))
