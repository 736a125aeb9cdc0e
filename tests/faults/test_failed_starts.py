"""A launcher or a command that can't be started: what was to run waits or fails visibly, and runs once at most."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.eventually import eventually
from tests.support.invariants import check_history
from tests.support.world import Script, bash, embedded_world, result_text
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import session_pb2

COUNTED = "echo $UNREAL_AGENT_OPERATION >> effects"
SCRIPT: Script = [{"text": "one", "tool_calls": [bash(COUNTED)]}, {"text": "waiting"}, {"text": "finished"}]


async def test_a_launcher_that_can_not_be_started_is_tried_again_and_the_command_runs_once(tmp_path: Path) -> None:
    # The launcher's log can't be opened: it is a directory.
    obstacle = tmp_path / "state" / "operations" / "launcher.log"
    obstacle.mkdir(parents=True)
    async with embedded_world(tmp_path, SCRIPT) as world:
        await world.create()
        await world.say("do it")

        async def is_assigned() -> bool:
            return [one.status for one in await world.operations()] == [operation_pb2.OPERATION_STATUS_AWAITING]

        await eventually(is_assigned)
        assert not (world.workspace / "effects").exists()
        obstacle.rmdir()
        rest = await world.until_rest()
        assert rest.session_state == session_pb2.SESSION_STATE_IDLE
        items, operations = await world.items(), await world.operations()
        check_history(items, operations)
        assert (world.workspace / "effects").read_text().split() == [operations[0].operation_id]


async def test_a_workspace_that_goes_away_fails_the_call_and_the_session_goes_on(tmp_path: Path) -> None:
    script: Script = [
        {"text": "one", "tool_calls": [bash(COUNTED)]},
        {"text": "two", "tool_calls": [bash(f"rm -rf {tmp_path}/workspace")]},
        {"text": "three", "tool_calls": [bash(COUNTED)]},
        {"text": "finished"},
    ]
    async with embedded_world(tmp_path, script) as world:
        await world.create()
        assert (await world.run("do it")).session_state == session_pb2.SESSION_STATE_IDLE
        items, operations = await world.items(), await world.operations()
        check_history(items, operations)
        assert "finished" in str(items[-1].model_response)
        last = operations[-1] if operations[-1].status == operation_pb2.OPERATION_STATUS_FAILED else operations[0]
        assert last.status == operation_pb2.OPERATION_STATUS_FAILED
        text = result_text((await world.results())[last.call_id])
        assert os.fspath(world.workspace) in text
