"""Work of your own behind a tool: a build farm, a queue, a person. It outlives the agent, which finds it again."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from examples.embedding import ask, open_agent, play
from harness.primitives.primitives import RemoteJobEnded, RemoteJobUpdated
from harness.tools import ToolRegistry
from harness.tools.rendering import render_operations
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2


class Farm:
    """Stands for the machine elsewhere: starts a build, unless one of that name was started before."""

    def __init__(self) -> None:
        self.builds: dict[str, str] = {}

    async def build(self, name: str, target: str) -> str:
        return self.builds.setdefault(name, f"{target}: 0 errors")


FARM = Farm()


# [snippet]
class BuildHandler:
    """Runs the plans of type "build", version 1."""

    plan_type = "build"
    plan_version = 1

    async def run(
        self, *, operation_id: str, plan_json: str, handle: str, idempotency_key: str
    ) -> AsyncIterator[RemoteJobUpdated | RemoteJobEnded]:
        # After a restart this is called again, with the handle of the job that was started: find it, don't start it.
        name = handle or operation_id
        yield RemoteJobUpdated(handle=name, progress="building")
        report = await FARM.build(name, json.loads(plan_json)["target"])
        yield RemoteJobEnded(status=operation_pb2.OPERATION_STATUS_COMPLETED, result_json=json.dumps(report))

    async def cancel(self, *, operation_id: str, handle: str, reason: str) -> None:
        """Ask for the job's end; `run` reports it."""


class Build:
    """The tool that plans it."""

    definition = llm_pb2.ToolDefinition(
        name="Build",
        description="Builds a target.",
        parameters_json='{"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]}',
    )

    def is_offered(self, inspection: operation_pb2.InspectWorkspaceState) -> bool:
        return True

    def translate(self, call: llm_pb2.ToolCall) -> Sequence[operation_pb2.Operation]:
        job = operation_pb2.RemoteJobState(plan_type="build", plan_version=1, plan_json=call.arguments_json)
        probeable = operation_pb2.EFFECT_CLASS_PROBEABLE
        return [operation_pb2.Operation(type="remote_job", type_version=1, effect_class=probeable, remote_job=job)]

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        return render_operations(operations)


TOOLS, HANDLERS = ToolRegistry([Build()]), [BuildHandler()]
# [/snippet]

SCRIPT = """
responses:
  - tool_calls: [{name: Build, arguments: {target: app}}]
  - {expect: "app: 0 errors", text: It builds.}
"""


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with open_agent(Path(directory) / "state", play(SCRIPT), tools=TOOLS, handlers=HANDLERS) as coordinator:
            print(await ask(coordinator, "build", "Does the app build?", Path(directory)))


if __name__ == "__main__":
    asyncio.run(main())
