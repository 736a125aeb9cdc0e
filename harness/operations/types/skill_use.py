"""`skill_use` version 1: the text of a skill of the workspace, as it is now. PURE."""

from __future__ import annotations

from harness.operations.operations import Step
from harness.operations.types.computing import advance_computation
from harness.operations.types.validating import find_fault
from harness.primitives.primitives import Compute, ComputeCompleted, Dispatch, Event
from harness.primitives.skill_files import MAX_NAME_CHARS
from harness.primitives.skills import SkillContent, use_skill
from unreal_agent.operation.v1 import operation_pb2

COMPUTE_TIMEOUT_S = 60.0
"""The worst that 256 hostile skill files take to parse is about half of it."""


class SkillUseMachine:
    """Finds the skill by its name; an unknown one fails with the names that exist."""

    operation_type = "skill_use"
    type_version = 1
    effect_classes = (operation_pb2.EFFECT_CLASS_PURE,)

    def validate(self, operation: operation_pb2.Operation) -> str | None:
        """Refuse names that no skill can have by their length; others fail with the names that exist."""
        fault = find_fault(operation, "skill_use", self.effect_classes)
        if fault is not None:
            return fault
        if not operation.skill_use.name.strip():
            return "the skill's name is blank"
        if len(operation.skill_use.name) > MAX_NAME_CHARS:
            return f"the skill's name has more than {MAX_NAME_CHARS} characters"
        return None

    def advance(self, operation: operation_pb2.Operation, event: Event) -> Step[Dispatch]:
        """Compute, then complete or fail."""

        def compute(workspace: str) -> Compute:
            return Compute(
                function=use_skill, arguments=(workspace, operation.skill_use.name), timeout_s=COMPUTE_TIMEOUT_S
            )

        return advance_computation(operation, event, compute=compute, complete=_complete)


def _complete(successor: operation_pb2.Operation, event: ComputeCompleted) -> bool:
    skill = event.value
    if not isinstance(skill, SkillContent):
        return False
    successor.skill_use.path = skill.path
    successor.skill_use.content = skill.content
    return True
