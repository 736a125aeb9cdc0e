"""The ViewImage tool: an image file of the workspace, shown to the model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from harness.tools.arguments import ArgumentSchema
from harness.tools.rendering import render_operations
from harness.tools.tools import Rejection
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

NAME: Final = "ViewImage"

_DESCRIPTION: Final = """\
Shows you an image file of the workspace: PNG, JPEG, WebP, BMP, TIFF, or the first frame of a GIF. What is larger than \
2000 x 2000 pixels is scaled down, and the result says by how much."""

_PARAMETERS: Final = """\
{"type":"object","properties":{\
"path":{"type":"string","minLength":1,"maxLength":4096,"pattern":"\\\\S",\
"description":"Path of the file, absolute or relative to the workspace. It must lie in the workspace."}\
},"required":["path"],"additionalProperties":false}"""


class ViewImageTranslator:
    """Turns a call into one `view_image` operation."""

    def __init__(self) -> None:
        """Read the schema."""
        self._schema = ArgumentSchema(NAME, _PARAMETERS)

    @property
    def definition(self) -> llm_pb2.ToolDefinition:
        return llm_pb2.ToolDefinition(name=NAME, description=_DESCRIPTION, parameters_json=_PARAMETERS)

    def is_offered(self, inspection: operation_pb2.InspectWorkspaceState) -> bool:
        return True

    def translate(self, call: llm_pb2.ToolCall) -> Sequence[operation_pb2.Operation] | Rejection:
        arguments = self._schema.parse(call.arguments_json)
        if isinstance(arguments, Rejection):
            return arguments
        state = operation_pb2.ViewImageState(path=str(arguments["path"]))
        return (
            operation_pb2.Operation(
                type="view_image", type_version=1, effect_class=operation_pb2.EFFECT_CLASS_PURE, view_image=state
            ),
        )

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        return render_operations(operations)
