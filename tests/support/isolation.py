"""A manager that isolates commands by bubblewrap, for tests that run where that can be had and where it can't."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from harness.errors import FailedPreconditionError
from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from harness.primitives.isolation import IsolationSettings

PYTHON = os.path.realpath(sys.executable)
"""The interpreter behind the virtual environment, which commands are granted to read."""

ISOLATION = IsolationSettings(kind="bubblewrap", readable=[sys.base_prefix])

BUBBLEWRAP = LocalManagerSettings(grace_s=0.5, isolation=ISOLATION)


@cache
def refusal(state_directory: Path = Path("/nonexistent")) -> str:
    """Return why this machine can't isolate by bubblewrap, as a manager says it; empty where it can."""
    try:
        BUBBLEWRAP.establish_isolation(state_directory)
    except FailedPreconditionError as error:
        assert error.reason == "ISOLATION_UNAVAILABLE", error
        assert error.message.startswith("isolation by bubblewrap is not to be had here: "), error
        return error.message
    return ""


@asynccontextmanager
async def isolated_manager(
    state: Path, settings: LocalManagerSettings = BUBBLEWRAP
) -> AsyncIterator[LocalOperationManager | None]:
    """Give a manager, or None where this machine can't isolate and the manager said so instead of opening."""
    try:
        opening = LocalOperationManager.open(state, name="local", settings=settings)
        manager = await opening.__aenter__()
    except FailedPreconditionError as error:
        assert error.message == refusal() != "", error
        yield None
        return
    try:
        yield manager
    finally:
        await opening.__aexit__(None, None, None)
