"""The Bash tool: a shell command in the workspace. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from harness.tools.arguments import ArgumentSchema
from harness.tools.rendering import render_operations
from harness.tools.tools import Rejection
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

NAME: Final = "Bash"
DEFAULT_TIMEOUT_S: Final = 600
DEFAULT_MAX_OUTPUT_CHARS: Final = 40_000

_DESCRIPTION: Final = """\
Runs a command with bash and returns what it printed and how it ended. Each call is a new bash in the workspace (or \
in working_directory): variables and cd do not carry over, files do. Stdin is empty and there is no terminal, so \
give every program what it would ask for. Calls made together run at the same time: put steps that depend on each \
other into one command, joined with && or newlines. Processes that are still running when the command ends are ended \
with it; for something that must keep running while you work, make it a call of its own and let it run. Of long \
output you see the beginning and the end, and the path of a file that holds it all."""

_PARAMETERS: Final = """\
{"type":"object","properties":{\
"command":{"type":"string","minLength":1,"pattern":"\\\\S",\
"description":"The command, as you would write it in a bash script."},\
"working_directory":{"type":"string","minLength":1,"maxLength":4096,"pattern":"\\\\S",\
"description":"Directory to run it in, absolute or relative to the workspace. Default: the workspace."},\
"timeout_seconds":{"type":"integer","minimum":1,"maximum":86400,"default":600,\
"description":"The command is ended after this many seconds. Default: 600."},\
"max_output_length":{"type":"integer","minimum":1,"maximum":1000000,"default":40000,\
"description":"Characters to show of stdout, and as many of stderr; beginning and end are kept. Default: 40000."}\
},"required":["command"],"additionalProperties":false}"""


class BashTranslator:
    """Turns a call into one `bash` operation, which is never started twice."""

    def __init__(self) -> None:
        """Read the schema."""
        self._schema = ArgumentSchema(NAME, _PARAMETERS)

    @property
    def definition(self) -> llm_pb2.ToolDefinition:
        return llm_pb2.ToolDefinition(name=NAME, description=_DESCRIPTION, parameters_json=_PARAMETERS)

    def is_offered(self, inspection: operation_pb2.InspectWorkspaceState) -> bool:
        # An inspection without workspace never took place, and says nothing against a shell.
        return bool(inspection.shell) or not inspection.workspace

    def translate(self, call: llm_pb2.ToolCall) -> Sequence[operation_pb2.Operation] | Rejection:
        arguments = self._schema.parse(call.arguments_json)
        if isinstance(arguments, Rejection):
            return arguments
        state = operation_pb2.BashState(
            command=str(arguments["command"]), working_directory=str(arguments.get("working_directory", ""))
        )
        operation = operation_pb2.Operation(
            type="bash", type_version=1, effect_class=operation_pb2.EFFECT_CLASS_AT_MOST_ONCE, bash=state
        )
        # The schema has checked that both are integers.
        operation.limits.timeout.seconds = int(str(arguments.get("timeout_seconds", DEFAULT_TIMEOUT_S)))
        operation.limits.max_output_chars = int(str(arguments.get("max_output_length", DEFAULT_MAX_OUTPUT_CHARS)))
        return (operation,)

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        return render_operations(operations)
