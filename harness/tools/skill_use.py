"""The SkillUse tool: a skill's instructions, read when they are needed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from harness.tools.arguments import ArgumentSchema
from harness.tools.rendering import render_operations
from harness.tools.tools import Rejection
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

NAME: Final = "SkillUse"

_DESCRIPTION: Final = """\
Reads a skill: instructions for one kind of task, written for this workspace. Use it before you begin a task that a \
listed skill is about, then follow what it says."""

_PARAMETERS: Final = """\
{"type":"object","properties":{\
"name":{"type":"string","minLength":1,"maxLength":256,"pattern":"\\\\S",\
"description":"Name of the skill, exactly as it is listed."}\
},"required":["name"],"additionalProperties":false}"""


class SkillUseTranslator:
    """Turns a call into one `skill_use` operation."""

    def __init__(self) -> None:
        """Read the schema."""
        self._schema = ArgumentSchema(NAME, _PARAMETERS)

    @property
    def definition(self) -> llm_pb2.ToolDefinition:
        return llm_pb2.ToolDefinition(name=NAME, description=_DESCRIPTION, parameters_json=_PARAMETERS)

    def is_offered(self, inspection: operation_pb2.InspectWorkspaceState) -> bool:
        return bool(inspection.skills)

    def translate(self, call: llm_pb2.ToolCall) -> Sequence[operation_pb2.Operation] | Rejection:
        arguments = self._schema.parse(call.arguments_json)
        if isinstance(arguments, Rejection):
            return arguments
        state = operation_pb2.SkillUseState(name=str(arguments["name"]))
        return (
            operation_pb2.Operation(
                type="skill_use", type_version=1, effect_class=operation_pb2.EFFECT_CLASS_PURE, skill_use=state
            ),
        )

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        return render_operations(operations)
