"""Live output of commands in a watch that goes on behind a revision, as after a break of the connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.deployments import DEPLOYMENTS, Open
from tests.support.world import bash
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2

WAITING = "echo first; until [ -e go ]; do sleep 0.05; done; echo second; until [ -e end ]; do sleep 0.05; done"


@pytest.fixture(params=sorted(DEPLOYMENTS))
def open_world(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return lambda responses: DEPLOYMENTS[request.param](tmp_path, responses)


async def test_commands_that_began_before_the_revision_are_heard(open_world: Open) -> None:
    async with open_world([{"tool_calls": [bash(WAITING)]}, {"text": "Done."}]) as world:
        await world.create()
        await world.say("do it")
        await world.watch_until(lambda event: b"first" in event.output_delta.data)
        (operation,) = await world.operations()
        found = await world.coordinator.get_session(coordinator_pb2.GetSessionRequest(session_id=world.session_id))
        request = coordinator_pb2.WatchSessionRequest(
            session_id=world.session_id,
            after_revision=found.session.revision,
            include_output=True,
            until_idle=True,
        )
        heard = b""
        async for event in world.coordinator.watch_session(request):
            assert event.output_delta.operation_id in ("", operation.operation_id)
            assert event.output_delta.offset in (0, len(heard))
            heard += event.output_delta.data
            if b"first" in heard:
                (world.workspace / "go").touch()
            if b"second" in heard:
                (world.workspace / "end").touch()
        assert heard == b"first\nsecond\n"
