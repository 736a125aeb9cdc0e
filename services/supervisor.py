"""Keeps processes alive: starts them, starts again what dies with a growing pause, and ends them in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0

SETTLED_S: Final = 10.0
"""A process that lived for so long began well: the next pause is short again."""

KILL_AFTER_S: Final = 15.0
"""What a process may take beyond its grace, for closing what it has open."""

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2


@dataclass(slots=True, kw_only=True)
class Child:
    """A service as a process: `python -m services.NAME ARGUMENTS`."""

    name: str
    """For example "session-store"."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = None
    """None: this process's own."""

    process: asyncio.subprocess.Process | None = None
    is_ending: bool = False
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs children until it is told to stop, or one of them can't be started at all."""

    def __init__(self, children: Sequence[Child], lock: int, grace_s: float) -> None:
        """Prepare.

        Args:
            children: In the order in which they end: the first alone, then the others together.
            lock: Descriptor that each child holds too, so that the state directory stays locked while one lives.
            grace_s: What a child may take for calls in hand once it is told to end.
        """
        self._children = children
        self._lock = lock
        self._grace_s = grace_s
        self._stopping = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Run until SIGTERM, SIGINT or SIGHUP, and return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        async with asyncio.TaskGroup() as tasks:
            for child in self._children:
                tasks.create_task(self._keep(child))
            await self._stopping.wait()
            first, *others = self._children
            await self._end(first)
            for child in others:
                tasks.create_task(self._end(child))
        return self._exit_code

    async def _keep(self, child: Child) -> None:
        """Start a child, and again whenever it ends, until it is told to."""
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        is_first = True
        try:
            while True:
                begin_s = loop.time()
                code = await self._run(child)
                lived_s = loop.time() - begin_s
                if child.is_ending or self._is_hopeless(child, code, is_first and lived_s < SETTLED_S):
                    return
                is_first = False
                pause_s = FIRST_PAUSE_S if lived_s >= SETTLED_S else pause_s
                _say(f"{child.name} ended ({_how(code)}); it is started again in {pause_s:g} s")
                try:
                    async with asyncio.timeout(pause_s):
                        await self._stopping.wait()
                except TimeoutError:
                    pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                else:
                    return
        finally:
            child.has_ended.set()

    async def _run(self, child: Child) -> int:
        module = f"services.{child.name.replace('-', '_')}"
        starter = [sys.executable, "-P", "-m", "services.supervised", str(self._lock), str(os.getpid()), module]
        # A session of its own: Ctrl-C reaches this process alone, which ends the others in order.
        child.process = await asyncio.create_subprocess_exec(
            *starter,
            *child.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[self._lock],
            env=child.environment,
        )
        if child.is_ending:
            child.process.terminate()
        return await child.process.wait()

    def _is_hopeless(self, child: Child, code: int, has_just_begun: bool) -> bool:
        """Return whether a child could not be started: it has said why, and would say the same again."""
        if code != EXIT_USAGE and not (code == EXIT_FAILED and has_just_begun):
            return False
        if not self._stopping.is_set():
            _say(f"{child.name} could not be started; all is ended")
            self._exit_code = code
            self._stopping.set()
        return True

    async def _end(self, child: Child) -> None:
        """End a child, by force where it takes too long."""
        child.is_ending = True
        _signal(child, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_s + KILL_AFTER_S):
                await child.has_ended.wait()
        except TimeoutError:
            _say(f"{child.name} did not end in time; it is killed")
            _signal(child, signal.SIGKILL)
            await child.has_ended.wait()

    def _on_signal(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            return
        for child in self._children:
            _signal(child, signal.SIGKILL)
        # What was acknowledged is safe at any instruction.
        os._exit(EXIT_FAILED)


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        child.process.send_signal(number)


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _say(line: str) -> None:
    print(f"services: {line}", file=sys.stderr, flush=True)  # noqa: T201  # for whoever started it
