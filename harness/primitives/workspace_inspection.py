"""Looks at a workspace: whether it is there and writable, its shell, its skills. Blocking; changes nothing."""

from __future__ import annotations

import os
import platform
import shutil
import sys

from harness.errors import HarnessError, ResourceExhaustedError
from harness.primitives.confined_files import open_directory, real_path
from harness.primitives.primitives import ComputeError, ComputeOutcome
from harness.primitives.skills import SkillIndex, discover_skills
from unreal_agent.operation.v1 import operation_pb2


def inspect_workspace(workspace: str) -> ComputeOutcome:
    """Return what is true of a workspace as an `InspectWorkspaceState`; a compute function.

    A workspace that is missing or closed is a finding, no error: `exists` is false and a problem says why.

    Raises:
        ComputeError: TOO_MANY_OPEN_FILES.
    """
    state = operation_pb2.InspectWorkspaceState(
        workspace=workspace, shell=shutil.which("bash") or "", platform=f"{sys.platform}/{platform.machine()}"
    )
    try:
        with open_directory(workspace) as root:
            state.workspace = _text(real_path(root))
            state.exists = True
            # By the real path: access() takes no O_PATH descriptor.
            state.is_writable = os.access(real_path(root), os.W_OK | os.X_OK, effective_ids=True)
            index = discover_skills(root)
    except ResourceExhaustedError as error:
        # Says nothing of the workspace: asked again, it may be found.
        raise ComputeError(error.reason, error.message) from error
    except HarnessError as error:
        problem = operation_pb2.SkillProblem(path=".", reason=error.message)
        index = SkillIndex(skills=(), problems=(problem,))
    state.skills.extend(index.skills)
    state.problems.extend(index.problems)
    return ComputeOutcome(value=state)


def _text(path: str) -> str:
    """Return a path as text for a person; what is no UTF-8 in it is replaced."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
