"""The launcher dies at each of its fault points: the command runs once all the same, and how it ended is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.faults import KILL_VARIABLE
from tests.faults.kill_matrix import victims
from tests.support.invariants import check_history
from tests.support.world import Script, bash, embedded_world
from unreal_agent.operation.v1 import operation_pb2

POINTS = sorted(point for point, kind in victims.points().items() if kind == victims.LAUNCHER)


@pytest.mark.parametrize("point", POINTS)
async def test_a_command_whose_launcher_dies_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    order = tmp_path / "order"
    order.write_text(f"{point}:1:done")
    monkeypatch.setenv(KILL_VARIABLE, f"@{order}")
    responses: Script = [{"tool_calls": [bash("echo ran >> effects")]}, {"text": "done"}]
    async with embedded_world(tmp_path, responses) as world:
        await world.create()
        await world.run("do it")
        items, operations = await world.items(), await world.operations()
    assert (tmp_path / "order.done").exists(), "the point was not reached"
    check_history(items, operations)
    assert [one.status for one in operations] == [operation_pb2.OPERATION_STATUS_COMPLETED]
    assert (tmp_path / "workspace" / "effects").read_text() == "ran\n"
