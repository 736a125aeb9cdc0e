"""Named points at which a test may make the process fail or die. In production every point is one dictionary look-up.

Points are registered where they are declared (module level), so that a kill matrix can enumerate them all.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

_points: dict[str, str] = {}
_handlers: dict[str, Callable[[], None]] = {}
_order: _StandingOrder | None = None

KILL_VARIABLE = "UNREAL_AGENT_FAULT_KILL"
"""Environment variable `POINT` or `POINT:N`: the process ends itself by SIGKILL when it is at POINT the N-th time.

`@FILE`: so it does once FILE says `POINT:N:ORDER`, and makes a file `FILE.ORDER` first. Where that exists the order was
carried out already: of many processes that read one file, one dies. In a supervisor N counts for nothing.
"""

STOP_VARIABLE = "UNREAL_AGENT_FAULT_STOP"
"""Environment variable `POINT` or `POINT:N`: the process stops itself by SIGSTOP when it is at POINT the N-th time."""


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
    elif _order is not None:
        _order.obey(name)


def set_handler(name: str, handler: Callable[[], None] | None) -> None:
    """Install a test's handler for one point, or remove it with None."""
    if handler is None:
        _handlers.pop(name, None)
    else:
        _handlers[name] = handler


def install_from_environment() -> None:
    """Arm the points that the environment names; called once by each program's main."""
    global _order
    wish = os.environ.get(KILL_VARIABLE, "")
    if wish.startswith("@"):
        _order = _StandingOrder(wish[1:])
    else:
        _arm(wish, signal.SIGKILL)
    _arm(os.environ.get(STOP_VARIABLE, ""), signal.SIGSTOP)


def _arm(wish: str, number: signal.Signals) -> None:
    if not wish:
        return
    name, _, count = wish.partition(":")
    remaining = int(count or "1")

    def send() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), number)

    _handlers[name] = send


class _StandingOrder:
    """A file that names the point at which the next process dies; it may change while processes run."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._order = ""
        self._remaining = 0

    def obey(self, name: str) -> None:
        try:
            with open(self._path, encoding="utf-8") as file:
                point, count, order = file.read().strip().split(":")
        except OSError:
            return
        if point != name:
            return
        if order != self._order:
            self._order, self._remaining = order, int(count)
        self._remaining -= 1
        if self._remaining > 0:
            return
        try:
            os.close(os.open(f"{self._path}.{order}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
