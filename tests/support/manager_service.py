"""Operation managers behind gRPC: one served in the test's own process, one as a process that can be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from clients.operation_manager import DialledLink, ProxyOperationManager
from clients.operation_manager.attached_link import AttachedLink
from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from services._server.server import Server, ServerSettings, serve
from services.coordinator.gateway import gateway_service
from services.operation_manager.attach import stay_attached
from services.operation_manager.servicer import OperationManagerServicer, manager_service
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

LOCAL = ("127.0.0.1:0",)


@asynccontextmanager
async def served_manager(
    state: Path, settings: LocalManagerSettings | None = None, *, addresses: tuple[str, ...] = LOCAL
) -> AsyncIterator[tuple[Server, ProxyOperationManager]]:
    """Serve a manager over a state directory and dial it."""
    async with (
        LocalOperationManager.open(state, name="local", settings=settings) as manager,
        serve(ServerSettings(addresses=addresses), [manager_service(manager)]) as server,
        ProxyOperationManager(DialledLink(server.addresses[0])) as proxy,
    ):
        yield server, proxy


@asynccontextmanager
async def attached_manager(
    state: Path, settings: LocalManagerSettings | None = None
) -> AsyncIterator[tuple[Server, ProxyOperationManager]]:
    """Run a manager over a state directory that dials the server of a gateway, and reach it through that."""
    link = AttachedLink("local")
    async with (
        LocalOperationManager.open(state, name="local", settings=settings) as manager,
        serve(ServerSettings(addresses=LOCAL), [gateway_service({"local": link})]) as server,
        ProxyOperationManager(link) as proxy,
        asyncio.TaskGroup() as tasks,
    ):
        info = (await manager.get_server_info(manager_pb2.GetServerInfoRequest())).info
        staying = tasks.create_task(stay_attached(server.addresses[0], OperationManagerServicer(manager), info))
        try:
            yield server, proxy
        finally:
            staying.cancel()


class ManagerProcess:
    """`python -m services.operation_manager` over a state directory, to be killed and started again."""

    def __init__(self, state: Path, *flags: str, address: str = "") -> None:
        """Prepare; `start` starts it. Empty `address`: a socket in the state directory. A port 0 is chosen once."""
        self.state = state
        self.address = address or f"unix:{state}/manager.sock"
        self._flags = flags
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Start a process, and return once it serves."""
        self.state.mkdir(exist_ok=True)
        with (self.state / "service.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.operation_manager",
                *("--state-dir", str(self.state), "--listen", self.address, *self._flags),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        assert line.startswith("operation-manager listens on "), self.log()
        self.address = line.split()[-1]

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.process.wait()

    def log(self) -> str:
        """Return what all its processes logged."""
        return (self.state / "service.log").read_text()


@asynccontextmanager
async def manager_process(state: Path, *flags: str, address: str = "") -> AsyncIterator[ManagerProcess]:
    """Run a manager's process while the block runs."""
    manager = ManagerProcess(state, *flags, address=address)
    await manager.start()
    try:
        yield manager
    finally:
        await manager.end(signal.SIGTERM)
