"""How a local manager works, and a snapshot of how it fares. Values only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.operations.environment import command_environment
from harness.operations.output_files import RetentionSettings
from harness.primitives.isolation import Isolation, IsolationSettings, establish
from harness.primitives.primitives import RemoteJobHandler


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalManagerSettings:
    """How a local manager works."""

    concurrency: int = 64
    """Operations that use this machine at once."""

    environment: Mapping[str, str] = field(default_factory=lambda: command_environment(os.environ))
    """The whole environment of commands."""

    grace_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""

    file_size_limit_bytes: int = 8 << 30
    """Bound of every file that a command writes, and of its whole output, which ends it; 0: none."""

    keepalive_s: float = 15.0
    """Silence after which a watch sends a keepalive."""

    retention: RetentionSettings = field(default_factory=RetentionSettings)
    isolation: IsolationSettings = field(default_factory=IsolationSettings)
    """What isolates commands; the manager's own state directory is hidden from them in any case."""

    handlers: Sequence[RemoteJobHandler] = ()

    def establish_isolation(self, state_directory: Path) -> Isolation:
        """Look what holds on this machine for a manager of that state directory; blocks.

        Raises:
            FailedPreconditionError: ISOLATION_UNAVAILABLE.
        """
        wanted = replace(self.isolation, hidden=(*self.isolation.hidden, str(state_directory)))
        return establish(wanted, self.environment, self.file_size_limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot for people and tests."""

    remembered: int
    running: int
    waiting: int
    watchers: int
    position: int
