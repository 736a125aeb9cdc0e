"""Signals that end the command: what the first Ctrl-C does, and how to leave at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

from clients.cli.failures import EXIT_INTERRUPTED


class Interrupts:
    """Answers SIGINT, SIGTERM and SIGHUP.

    The first SIGINT calls `on_first`, where one is set; anything else leaves at once: without waiting, with the
    commands running on, and with everything that was acknowledged on disk, as after SIGKILL.
    """

    def __init__(self) -> None:
        """Begin with nothing to stop: any signal leaves at once."""
        self.on_first: Callable[[], None] | None = None
        self.on_leave: Callable[[], None] | None = None
        """Gives the terminal back."""

        self.resume_command = ""
        self.count = 0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Answer the signals until the block ends."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._leave)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        self.count += 1
        if self.count == 1 and self.on_first is not None:
            self.on_first()
        else:
            self._leave()

    def _leave(self) -> None:
        if self.on_leave is not None:
            self.on_leave()
        with contextlib.suppress(OSError, ValueError):
            if self.resume_command:
                sys.stderr.write(f"unreal-agent: left; what runs runs on. Resume: {self.resume_command}\n")
            sys.stderr.flush()
        # No clean-up may hold this up; none is needed, since a process may be killed at any instruction.
        os._exit(EXIT_INTERRUPTED)
