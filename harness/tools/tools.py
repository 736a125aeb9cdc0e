"""Contract of the tool translators.

A translator turns a model's call into operations, and ended operations into the result that the model is shown. It is
pure: it does no I/O, reads no clock and makes no ID.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A call that can't be translated; the model's mistake, told to it. Nothing is started."""

    message: str
    """One or a few lines for the model: what is wrong, and what would be right."""


class ToolTranslator(Protocol):
    """One tool."""

    @property
    def definition(self) -> llm_pb2.ToolDefinition:
        """The tool as it is offered to the model; its name is the tool's name."""
        ...

    def is_offered(self, inspection: operation_pb2.InspectWorkspaceState) -> bool:
        """Return whether the tool makes sense in a workspace."""
        ...

    def translate(self, call: llm_pb2.ToolCall) -> Sequence[operation_pb2.Operation] | Rejection:
        """Return the operations that do the call, at least one, in the order in which they shall start.

        Set are `type`, `type_version`, `effect_class`, `limits` and the type's state; identity, assignment, status and
        times are the coordinator's.
        """
        ...

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        """Return the final result of a call whose operations are all terminal, given in the order of `translate`."""
        ...
