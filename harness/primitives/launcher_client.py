"""The manager's side of the launcher: starts it and exchanges frames with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from harness import faults
from harness.primitives import launcher_protocol as protocol

LAUNCHER = Path(__file__).with_name("launcher.py")

# A launcher without commands exits within milliseconds of losing its manager.
EXIT_PATIENCE_S = 1.0


class LauncherClient:
    """One launcher. Its commands do not depend on this object, nor on this process."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a started launcher; use `start`."""
        self.pid = pid
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, configuration: protocol.Configure, log: Path) -> LauncherClient:
        """Start a launcher.

        Args:
            configuration: Its first request; the launcher's own environment is that of the commands.
            log: File that takes its error output; made where it is missing.
        """
        ours, theirs = socket.socketpair()
        # A standing order reaches launcher and supervisors too, never a command.
        order = {key: os.environ[key] for key in (faults.KILL_VARIABLE,) if key in os.environ}
        try:
            # Returns once the program is executed, in a millisecond.
            pid = os.posix_spawn(  # noqa: ASYNC221
                sys.executable,
                [sys.executable, "-I", "-S", str(LAUNCHER)],
                {**configuration["environment"], **order},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
                ],
                setsid=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        client = cls(pid, reader, writer)
        client.send(configuration)
        return client

    def send(self, request: protocol.Request) -> None:
        """Queue a request. One that can't be delivered any more is dropped: the reports end then."""
        if not self._writer.is_closing():
            self._writer.write(protocol.encode(request))

    async def reports(self) -> AsyncIterator[protocol.Report]:
        """Yield what the launcher says, until it is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = protocol.LENGTH.unpack(await self._reader.readexactly(protocol.LENGTH.size))
                report: protocol.Report = json.loads(await self._reader.readexactly(length))
                yield report

    async def aclose(self, *, is_idle: bool) -> None:
        """Leave the launcher; wait for its exit where it has no commands."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        if is_idle:
            await self._wait()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222 - does not wait

    async def _wait(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(descriptor, gone.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_PATIENCE_S):
                    await gone.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
