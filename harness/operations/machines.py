"""Every operation type that this release runs."""

from __future__ import annotations

from harness.operations.registry import Machine
from harness.operations.types.bash import BashMachine
from harness.operations.types.inspect_workspace import InspectWorkspaceMachine
from harness.operations.types.remote_job import RemoteJobMachine
from harness.operations.types.skill_use import SkillUseMachine
from harness.operations.types.timer import TimerMachine
from harness.operations.types.value import ValueMachine
from harness.operations.types.view_image import ViewImageMachine


def default_machines() -> list[Machine]:
    """Return the step machines of every type, with their own defaults."""
    return [
        BashMachine(),
        InspectWorkspaceMachine(),
        RemoteJobMachine(),
        SkillUseMachine(),
        TimerMachine(),
        ValueMachine(),
        ViewImageMachine(),
    ]
