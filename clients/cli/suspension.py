"""Ctrl-Z: the process stops with a clean screen, and only where somebody can let it go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

Stop = Callable[[], None]
"""Stops this process; returns once it goes on."""


@contextlib.contextmanager
def suspendable(on_suspend: Callable[[Stop], None], *, before: Callable[[], None]) -> Iterator[None]:
    """Answer SIGTSTP in the block: `on_suspend` is given what stops the process, which first calls `before`."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        before()
        os.kill(os.getpid(), signal.SIGSTOP)

    def on_signal() -> None:
        if _has_shell():
            on_suspend(stop)

    loop.add_signal_handler(signal.SIGTSTP, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTSTP)


def _has_shell() -> bool:
    """Return whether the parent is of the same session: else nobody would let this process go on (see setpgid(2))."""
    parent = os.getppid()
    try:
        # A parent outside of the container is process 0.
        return parent > 0 and os.getsid(parent) == os.getsid(0)
    except OSError:
        return False
