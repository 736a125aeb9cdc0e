"""A tool of your own: the model may run this project's tests, and nothing else."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from examples.embedding import ask, open_agent, play
from harness.tools import Rejection, ToolRegistry
from harness.tools.arguments import ArgumentSchema
from harness.tools.rendering import render_operations
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

# [snippet]
PARAMETERS = '{"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": false}'


class RunTests:
    """Pure: says what shall be done. The operation manager does it, once, whatever dies."""

    definition = llm_pb2.ToolDefinition(name="RunTests", description="Runs the tests.", parameters_json=PARAMETERS)
    schema = ArgumentSchema("RunTests", PARAMETERS)

    def is_offered(self, inspection: operation_pb2.InspectWorkspaceState) -> bool:
        return True

    def translate(self, call: llm_pb2.ToolCall) -> Sequence[operation_pb2.Operation] | Rejection:
        arguments = self.schema.parse(call.arguments_json)
        if isinstance(arguments, Rejection):
            return arguments  # the model is told what is wrong
        bash = operation_pb2.BashState(command="python3 -m unittest 2>&1")
        at_most_once = operation_pb2.EFFECT_CLASS_AT_MOST_ONCE
        return [operation_pb2.Operation(type="bash", type_version=1, effect_class=at_most_once, bash=bash)]

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        return render_operations(operations)


TOOLS = ToolRegistry([RunTests()])
# [/snippet]

SCRIPT = r"""
responses:
  - tool_calls: [{name: RunTests, arguments: {}}]
  - {expect: 'FAILED \(failures=1\)', text: "One fails: the median of an even number of values."}
"""


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        workspace = Path(shutil.copytree(Path(__file__).with_name("weather"), Path(directory) / "weather"))
        async with open_agent(Path(directory) / "state", play(SCRIPT), tools=TOOLS) as coordinator:
            print(await ask(coordinator, "tests", "Do the tests pass?", workspace))


if __name__ == "__main__":
    asyncio.run(main())
