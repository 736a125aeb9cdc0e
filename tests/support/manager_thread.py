"""An operation manager on a loop of its own, driven by plain calls: what a state machine of Hypothesis needs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from clients.operation_manager import DialledLink, ProxyOperationManager
from harness.clock import Clock, SystemClock
from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from harness.operations.operations import OperationManager
from services._server.server import ServerSettings, serve
from services.operation_manager.servicer import manager_service

T = TypeVar("T")

SETTINGS = LocalManagerSettings(grace_s=0.3, keepalive_s=0.05)
CALL_S = 20.0

Opened: TypeAlias = tuple[LocalOperationManager, OperationManager]
"""The manager itself, and what callers use of it."""

Opening: TypeAlias = Callable[[Path, Clock], AbstractAsyncContextManager[Opened]]


@dataclass(slots=True)
class ShiftedClock:
    """The machine's clock, ahead by what a test says."""

    ahead: timedelta = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.ahead

    def monotonic_s(self) -> float:
        return SystemClock().monotonic_s()


@asynccontextmanager
async def local_manager(state: Path, clock: Clock) -> AsyncIterator[Opened]:
    """Open a manager and use it as it is."""
    async with LocalOperationManager.open(state, name="local", settings=SETTINGS, clock=clock) as local:
        yield local, local


@asynccontextmanager
async def proxied_manager(state: Path, clock: Clock) -> AsyncIterator[Opened]:
    """Open a manager, serve it, and use it through the proxy."""
    async with (
        LocalOperationManager.open(state, name="local", settings=SETTINGS, clock=clock) as local,
        serve(ServerSettings(addresses=("127.0.0.1:0",)), [manager_service(local)]) as server,
        ProxyOperationManager(DialledLink(server.addresses[0])) as proxy,
    ):
        yield local, proxy


class ManagerThread:
    """Opens and closes managers over one state directory, one after the other, and runs calls to the open one."""

    def __init__(self, opening: Opening, state: Path, clock: Clock) -> None:
        """Start the thread; nothing is open."""
        self._opening = opening
        self._state = state
        self._clock = clock
        self._wanted: asyncio.Queue[bool] = asyncio.Queue()
        self._leave = asyncio.Event()
        self._opened: asyncio.Queue[Opened] = asyncio.Queue()
        self._closed: asyncio.Queue[None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop
        self._local: LocalOperationManager
        self._is_open = False
        self.manager: OperationManager
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._keep(ready)), name="manager")
        self._thread.start()
        ready.wait(CALL_S)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the manager's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    def open(self) -> None:
        """Open a manager over the directory."""
        self.call(self._wanted.put(True))
        self._local, self.manager = self.call(self._opened.get())
        self._is_open = True

    def close(self, *, is_killed: bool) -> None:
        """Close it as a process ends that was asked to, or as one that was killed: with nothing more in the journal."""
        if not self._is_open:
            return
        self._is_open = False
        self.call(self._end(is_killed=is_killed))
        self.call(self._closed.get())

    def stop(self) -> None:
        """End the thread."""
        self.close(is_killed=False)
        self.call(self._wanted.put(False))
        self._thread.join(CALL_S)

    async def _end(self, *, is_killed: bool) -> None:
        if is_killed:
            # From here on it decides nothing and writes nothing; what a write under way holds may still get there.
            self._local._engine._is_closed = True
            self._local._writer._pending.clear()
        self._leave.set()

    async def _keep(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        ready.set()
        while await self._wanted.get():
            self._leave.clear()
            async with self._opening(self._state, self._clock) as opened:
                await self._opened.put(opened)
                await self._leave.wait()
            await self._closed.put(None)
