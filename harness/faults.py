"""Named points at which a test may make the process fail or die. In production every point is one dictionary look-up.

Points are registered where they are declared (module level), so that a kill matrix can enumerate them all.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

_points: dict[str, str] = {}
_handlers: dict[str, Callable[[], None]] = {}

KILL_VARIABLE = "UNREAL_AGENT_FAULT_KILL"
"""Environment variable `POINT` or `POINT:N`: the process ends itself by SIGKILL when it is at POINT the N-th time."""


def declare(name: str, description: str) -> str:
    """Register a fault point and return its name. Names are unique: "package.place.before_or_after"."""
    if _points.setdefault(name, description) != description:
        raise ValueError(f"fault point {name!r} is declared twice")
    return name


def points() -> dict[str, str]:
    """Return every declared point with its description."""
    return dict(_points)


def reach(name: str) -> None:
    """Do what a test asked for at this point; raises what the handler raises."""
    handler = _handlers.get(name)
    if handler is not None:
        handler()


def set_handler(name: str, handler: Callable[[], None] | None) -> None:
    """Install a test's handler for one point, or remove it with None."""
    if handler is None:
        _handlers.pop(name, None)
    else:
        _handlers[name] = handler


def install_from_environment() -> None:
    """Arm the kill point that the environment names; called once by each program's main."""
    wish = os.environ.get(KILL_VARIABLE)
    if not wish:
        return
    name, _, count = wish.partition(":")
    remaining = int(count or "1")

    def kill() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _handlers[name] = kill
