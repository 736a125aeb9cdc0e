"""Session stores behind gRPC: one served in the test's own process, one as a process that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from clients.session_store import RemoteSessionStore
from harness import faults
from harness.session_store import SessionStore
from harness.session_store.sqlite import SqliteSessionStore
from services._server.server import Server, ServerSettings, serve
from services.session_store.servicer import store_service

SETTINGS = ServerSettings(addresses=("127.0.0.1:0",))


@asynccontextmanager
async def served(store: SessionStore, settings: ServerSettings = SETTINGS) -> AsyncIterator[Server]:
    """Serve a store in this process."""
    async with store_service(store) as service, serve(settings, [service]) as server:
        yield server


@asynccontextmanager
async def served_sqlite(directory: Path, settings: ServerSettings = SETTINGS) -> AsyncIterator[Server]:
    """Serve a store on a file in `directory` in this process."""
    async with SqliteSessionStore.open(directory / "sessions.db") as store, served(store, settings) as server:
        yield server


class StoreProcess:
    """`python -m services.session_store` over a state directory, to be killed and started again."""

    def __init__(self, state: Path, *flags: str, is_tcp: bool = False) -> None:
        """Prepare; `start` starts it. Over TCP it keeps its port for life."""
        self.state = state
        self.address = f"127.0.0.1:{_free_port()}" if is_tcp else f"unix:{state}/store.sock"
        self._flags = flags
        self.process: asyncio.subprocess.Process

    async def start(self, *, kill_at: str = "", **environ: str) -> None:
        """Start a process, and return once it serves; `kill_at` is "POINT" or "POINT:N"."""
        self.state.mkdir(exist_ok=True)
        path = os.pathsep.join(filter(None, sys.path))
        with (self.state / "service.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.session_store",
                *("--state-dir", str(self.state), "--listen", self.address, *self._flags),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path, faults.KILL_VARIABLE: kill_at, **environ},
            )
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        assert line == f"session-store listens on {self.address}\n", self.log()

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.process.wait()

    def log(self) -> str:
        """Return what all its processes logged."""
        return (self.state / "service.log").read_text()


@asynccontextmanager
async def store_process(
    state: Path, *flags: str, is_tcp: bool = False, kill_at: str = ""
) -> AsyncIterator[StoreProcess]:
    """Run a store's process while the block runs; `kill_at` as for `start`, of the first process only."""
    process = StoreProcess(state, *flags, is_tcp=is_tcp)
    await process.start(kill_at=kill_at)
    try:
        yield process
    finally:
        if process.process.returncode is None:
            await process.end(signal.SIGKILL)


@asynccontextmanager
async def connected(process: StoreProcess, *, timeout_s: float = 30.0) -> AsyncIterator[RemoteSessionStore]:
    """Open a client of a store's process."""
    async with RemoteSessionStore(process.address, timeout_s=timeout_s) as store:
        yield store


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
