"""Live output whose manager is out of reach for longer than a reader waits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from harness.errors import UnavailableError
from harness.operations import OperationManager
from tests.support.world import Script, bash, embedded_world
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

WAITING = "echo first; until [ -e go ]; do sleep 0.05; done; echo second; until [ -e end ]; do sleep 0.05; done"


class Unreachable:
    """Passes everything on; the first reading of output ends behind its first piece, the second can't begin."""

    def __init__(self, manager: OperationManager) -> None:
        self._manager = manager
        self.offsets: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def read_output(
        self, request: manager_pb2.ReadOutputRequest
    ) -> AsyncIterator[manager_pb2.ReadOutputResponse]:
        if request.stream != operation_pb2.OUTPUT_STREAM_STDOUT or not request.follow:
            async for piece in self._manager.read_output(request):
                yield piece
            return
        self.offsets.append(request.offset)
        if len(self.offsets) == 2:
            raise UnavailableError("the test cut the link", reason="CONNECTION_LOST")
        async for piece in self._manager.read_output(request):
            yield piece
            if len(self.offsets) == 1:
                raise UnavailableError("the test cut the link", reason="CONNECTION_LOST")


async def test_a_tail_goes_on_where_it_broke_however_long_the_manager_was_away(tmp_path: Path) -> None:
    managers: list[Unreachable] = []

    def wrap(manager: OperationManager) -> OperationManager:
        managers.append(Unreachable(manager))
        return managers[0]

    script: Script = [{"tool_calls": [bash(WAITING)]}, {"text": "Done."}]
    async with embedded_world(tmp_path, script, wrap_manager=wrap) as world:
        await world.create()
        await world.say("do it")
        request = coordinator_pb2.WatchSessionRequest(session_id=world.session_id, include_output=True, until_idle=True)
        heard = b""
        async for event in world.coordinator.watch_session(request):
            assert event.output_delta.offset in (0, len(heard))
            heard += event.output_delta.data
            if b"first" in heard:
                (world.workspace / "go").touch()
            if b"second" in heard:
                (world.workspace / "end").touch()
        assert heard == b"first\nsecond\n"
        assert managers[0].offsets == [0, len(b"first\n"), len(b"first\n")]
