"""Signals that end the command: what the first Ctrl-C does, and how to leave at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

from clients.cli.failures import EXIT_FAILED, EXIT_INTERRUPTED, error_line
from harness.errors import HarnessError


class Interrupts:
    """Answers SIGINT, SIGTERM and SIGHUP.

    The first SIGINT stops the run that is attached; anything else leaves at once: without waiting, with the
    commands running on, and with everything that was acknowledged on disk, as after SIGKILL.
    """

    def __init__(self) -> None:
        """Begin with nothing to stop: any signal leaves at once."""
        self._on_first: Callable[[], None] | None = None
        self._on_trouble: Callable[[HarnessError], None] | None = None
        self.on_leave: Callable[[], None] | None = None
        """Gives the terminal back."""

        self.resume_command = ""
        self._count = 0
        self._has_trouble = False
        self._was_attached = False

    @contextlib.contextmanager
    def attached(
        self, on_first: Callable[[], None] | None, on_trouble: Callable[[HarnessError], None]
    ) -> Iterator[None]:
        """Hand the first SIGINT, where `on_first` is given, and what ends a run from outside to a run in the block."""
        self._on_first, self._on_trouble, self._was_attached = on_first, on_trouble, True
        try:
            yield
        finally:
            self._on_first = self._on_trouble = None

    def trouble(self, error: HarnessError) -> None:
        """Tell the run that the disk can't be written, which it would not see by itself; before it began, leave."""
        if self._on_trouble is not None:
            self._has_trouble = True
            self._on_trouble(error)
        elif not self._was_attached:
            self._leave(error_line(error) or str(error), EXIT_FAILED)

    @contextlib.contextmanager
    def left_in_trouble(self) -> Iterator[None]:
        """Leave at once where the block fails because the disk can't be written: an orderly end would write too."""
        try:
            yield
        except Exception as error:
            if self._has_trouble:
                self._leave(error_line(error) or str(error), EXIT_FAILED)
            raise

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Answer the signals until the block ends."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._leave_interrupted)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        self._count += 1
        if self._count == 1 and self._on_first is not None:
            self._on_first()
        else:
            self._leave_interrupted()

    def _leave_interrupted(self) -> None:
        resume = f" Resume: {self.resume_command}" if self.resume_command else ""
        self._leave(f"left; what runs runs on.{resume}", EXIT_INTERRUPTED)

    def _leave(self, line: str, code: int) -> None:
        if self.on_leave is not None:
            self.on_leave()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"unreal-agent: {line}\n")
            sys.stderr.flush()
        # No clean-up may hold this up; none is needed, since a process may be killed at any instruction.
        os._exit(code)
