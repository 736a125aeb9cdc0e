"""`inspect_workspace` version 1: what is true of the workspace before the first turn. PURE."""

from __future__ import annotations

from harness.operations.operations import Step
from harness.operations.types.computing import advance_computation
from harness.operations.types.skill_use import COMPUTE_TIMEOUT_S
from harness.operations.types.validating import find_fault
from harness.primitives.primitives import Compute, ComputeCompleted, Dispatch, Event
from harness.primitives.workspace_inspection import inspect_workspace
from unreal_agent.operation.v1 import operation_pb2


class InspectWorkspaceMachine:
    """Looks, and reports; a missing workspace is a finding and no failure."""

    operation_type = "inspect_workspace"
    type_version = 1
    effect_classes = (operation_pb2.EFFECT_CLASS_PURE,)

    def validate(self, operation: operation_pb2.Operation) -> str | None:
        """Refuse only what is no such operation."""
        return find_fault(operation, "inspect_workspace", self.effect_classes)

    def advance(self, operation: operation_pb2.Operation, event: Event) -> Step[Dispatch]:
        """Compute, then complete or fail."""
        return advance_computation(operation, event, compute=_compute, complete=_complete)


def _compute(workspace: str) -> Compute:
    return Compute(function=inspect_workspace, arguments=(workspace,), timeout_s=COMPUTE_TIMEOUT_S)


def _complete(successor: operation_pb2.Operation, event: ComputeCompleted) -> bool:
    if not isinstance(event.value, operation_pb2.InspectWorkspaceState):
        return False
    successor.inspect_workspace.CopyFrom(event.value)
    return True
