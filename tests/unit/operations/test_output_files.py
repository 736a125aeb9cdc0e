"""Old output goes by age and by size, never an operation's that is still remembered."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from harness.errors import NotFoundError
from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from harness.operations.output_files import RetentionSettings, sweep
from tests.support.eventually import eventually
from tests.support.operations import acknowledging, bash, read_all, run
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

NOW = datetime(2030, 1, 8, tzinfo=UTC)


def make(root: Path, name: str, size: int = 10) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "out").write_bytes(b"x" * size)


def test_the_old_go_and_then_the_oldest_until_the_rest_fits(tmp_path: Path) -> None:
    for name in ("old", "big", "new"):
        make(tmp_path, name, 100_000)
    kept = [("old", NOW - timedelta(days=8)), ("big", NOW - timedelta(days=2)), ("new", NOW - timedelta(days=1))]
    limits = RetentionSettings(max_total_bytes=150_000)
    assert sweep(tmp_path, kept, lambda _: True, NOW, limits) == ["old", "big"]
    assert os.listdir(tmp_path) == ["new"]


def test_directory_of_nobody_goes_once_it_is_old(tmp_path: Path) -> None:
    for name in ("orphan", "fresh orphan", "remembered"):
        make(tmp_path, name)
    for name in ("orphan", "remembered"):
        os.utime(tmp_path / name, (0, 0))
    now = datetime.now(UTC)
    assert sweep(tmp_path, [], lambda name: name == "remembered", now, RetentionSettings()) == []
    assert sorted(os.listdir(tmp_path)) == ["fresh orphan", "remembered"]


async def test_manager_sweeps_at_its_start_what_was_acknowledged(tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    async with LocalOperationManager.open(tmp_path / "state", name="local") as manager:
        acknowledged = await run(manager, bash("echo a"), tmp_path / "workspace")
        remembered = await run(manager, bash("echo b"), tmp_path / "workspace")
        await manager.acknowledge_updates(acknowledging(acknowledged))
    settings = LocalManagerSettings(retention=RetentionSettings(max_age=timedelta(0)))
    directory = tmp_path / "state" / "operations"
    async with LocalOperationManager.open(tmp_path / "state", name="local", settings=settings) as manager:
        await eventually(lambda: os.listdir(directory) == [remembered.operation_id])
        request = manager_pb2.ReadOutputRequest(
            operation_id=acknowledged.operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT
        )
        try:
            await read_all(manager, request)
        except NotFoundError as error:
            assert error.reason == "OUTPUT_EXPIRED"
        else:
            raise AssertionError("the output is still there")
