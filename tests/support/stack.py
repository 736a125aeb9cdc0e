"""The three services as processes of their own, on Unix sockets, to be killed and started again one by one.

async with three_services(tmp_path, [{"text": "Hello."}]) as stack, stack.world() as world:
    await world.create()
    await world.run("hi")
    await stack.kill("session-store")
    await stack.restart("session-store")
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clients.coordinator import CoordinatorClient
from tests.support.world import Script, World

STORE: Final = "session-store"
MANAGER: Final = "operation-manager"
COORDINATOR: Final = "coordinator"

START_S: Final = 15.0
END_S: Final = 15.0


@dataclass(slots=True)
class _Service:
    """A process, or how to start it."""

    module: str
    address: str
    arguments: tuple[str, ...]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of this service alone."""

    process: asyncio.subprocess.Process | None = None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None


@dataclass(slots=True)
class Stack:
    """Services that run. Names are "session-store", "operation-manager", "coordinator" and those that were added."""

    directory: Path
    environment: dict[str, str]
    """Variables of services that are started from now on."""

    sockets: Path
    manager_attaches_to: Sequence[str] = ()
    """Coordinators that the manager dials; empty: they dial it."""

    _services: dict[str, _Service] = field(default_factory=dict)

    @property
    def workspace(self) -> Path:
        """Where sessions of `world` work."""
        return self.directory / "workspace"

    @property
    def state(self) -> Path:
        """The state directory of store and manager."""
        return self.directory / "state"

    @property
    def address(self) -> str:
        """The coordinator's address."""
        return self.addresses[COORDINATOR]

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where each service listens."""
        return {name: service.address for name, service in self._services.items()}

    @property
    def pids(self) -> Mapping[str, int]:
        """The process of each service that runs."""
        return {name: one.process.pid for name, one in self._services.items() if one.process and one.is_alive}

    def log(self, name: str) -> str:
        """Return what a service has written to standard error since the stack began."""
        return self._services[name].log_path.read_text(encoding="utf-8")

    @asynccontextmanager
    async def client(
        self, name: str = COORDINATOR, *, token: str = "", patience_s: float = 30.0
    ) -> AsyncIterator[CoordinatorClient]:
        """Give a client of a coordinator while the block runs."""
        async with CoordinatorClient(self.addresses[name], token=token, patience_s=patience_s) as client:
            yield client

    @asynccontextmanager
    async def world(self, name: str = COORDINATOR, *, token: str = "") -> AsyncIterator[World]:
        """Give the agent behind a coordinator while the block runs."""
        async with self.client(name, token=token) as client:
            yield World(coordinator=client, workspace=self.workspace)

    async def add_coordinator(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Start another coordinator on the same store and manager, under a name of its own."""
        self._services[name] = self._coordinator(name, arguments)
        self.set_environment(name, environment or {})
        await self.start(name)

    def set_environment(self, name: str, environment: Mapping[str, str]) -> None:
        """Give a service variables of its own, from its next start on."""
        self._services[name].environment = environment

    async def start(self, name: str) -> None:
        """Start a service that doesn't run, and return once it listens."""
        service = self._services[name]
        assert not service.is_alive, f"{name} runs already"
        with service.log_path.open("ab") as log:
            service.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", service.module, "--listen", service.address, *service.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**self.environment, **service.environment},
            )
        assert service.process.stdout is not None
        said = b""
        try:
            async with asyncio.timeout(START_S):
                while b" listens on " not in said:
                    line = await service.process.stdout.readline()
                    assert line, f"{name} ended instead of listening: {self.log(name)}"
                    said += line
        except TimeoutError as error:
            raise AssertionError(f"{name} does not listen: {said.decode()}{self.log(name)}") from error

    async def restart(self, name: str) -> None:
        """Start a service again, killing it where it runs."""
        if self._services[name].is_alive:
            await self.kill(name)
        await self.start(name)

    async def kill(self, name: str) -> None:
        """End a service with SIGKILL."""
        self.signal(name, signal.SIGKILL)
        await self.wait(name)

    async def terminate(self, name: str) -> int:
        """End a service with SIGTERM and return its exit code."""
        self.signal(name, signal.SIGTERM)
        return await self.wait(name)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a service that runs."""
        process = self._services[name].process
        assert process is not None
        process.send_signal(number)

    async def wait(self, name: str) -> int:
        """Return the exit code of a service once it has ended."""
        process = self._services[name].process
        assert process is not None
        try:
            async with asyncio.timeout(END_S):
                return await process.wait()
        except TimeoutError as error:
            raise AssertionError(f"{name} does not end: {self.log(name)}") from error

    async def aclose(self) -> None:
        """End what runs, users before what they use."""
        for name in reversed(self._services):
            service = self._services[name]
            if service.process is None or not service.is_alive:
                continue
            self.signal(name, signal.SIGCONT)
            self.signal(name, signal.SIGTERM)
            try:
                async with asyncio.timeout(END_S):
                    await service.process.wait()
            except TimeoutError:
                await self.kill(name)

    def _prepare(self, flags: Mapping[str, Sequence[str]]) -> None:
        for name, module in ((STORE, "services.session_store"), (MANAGER, "services.operation_manager")):
            arguments = ["--state-dir", str(self.state), "--drain-grace-seconds", "5", *flags.get(name, ())]
            if name == MANAGER:
                for coordinator in self.manager_attaches_to:
                    arguments += ["--attach", f"unix:{self.sockets / coordinator}"]
            self._services[name] = self._service(name, module, arguments)
        self._services[COORDINATOR] = self._coordinator(COORDINATOR, flags.get(COORDINATOR, ()))

    def _coordinator(self, name: str, arguments: Sequence[str]) -> _Service:
        script = self.directory / "script.json"
        flags = ["--name", name, "--grace-seconds", "0.3", "--drain-grace-seconds", "5"]
        flags += ["--session-store", self.addresses[STORE], "--manager"]
        flags += ["local=attached" if self.manager_attaches_to else f"local={self.addresses[MANAGER]}"]
        flags += ["--script", str(script)] if script.exists() else []
        return self._service(name, "services.coordinator", (*flags, *arguments))

    def _service(self, name: str, module: str, arguments: Sequence[str]) -> _Service:
        return _Service(
            module=module,
            address=f"unix:{self.sockets / name}",
            arguments=tuple(arguments),
            log_path=self.directory / f"{name}.log",
        )


@asynccontextmanager
async def three_services(
    directory: Path,
    script: Script | None = None,
    *,
    flags: Mapping[str, Sequence[str]] | None = None,
    environment: Mapping[str, str] | None = None,
    starts: bool = True,
    manager_attaches_to: Sequence[str] = (),
) -> AsyncIterator[Stack]:
    """Run session store, operation manager and coordinator while the block runs; open it again to go on.

    Args:
        directory: Holds the workspace, the state and the logs.
        script: What the provider `scripted` plays; None: what a session's label `script` names.
        flags: Further flags of each service, by its name.
        environment: Variables on top of a bare environment.
        starts: False leaves every service to `Stack.start`.
        manager_attaches_to: Coordinators that the manager dials; empty: they dial it.
    """
    (directory / "workspace").mkdir(exist_ok=True)
    if script is not None:
        (directory / "script.json").write_text(json.dumps({"responses": list(script)}), encoding="utf-8")
    bare = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory), "LANG": "C.UTF-8"}
    # The path of a socket has at most 107 bytes, and a test's own directory may be longer.
    sockets = Path(tempfile.mkdtemp(prefix="stack-"))
    stack = Stack(directory=directory, environment={**bare, **(environment or {})}, sockets=sockets)
    stack.manager_attaches_to = tuple(manager_attaches_to)
    try:
        stack._prepare(flags or {})
        if starts:
            async with asyncio.TaskGroup() as tasks:
                for name in (STORE, MANAGER, COORDINATOR):
                    tasks.create_task(stack.start(name))
        yield stack
    finally:
        await stack.aclose()
        shutil.rmtree(sockets, ignore_errors=True)
