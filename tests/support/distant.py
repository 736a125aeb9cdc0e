"""The three services on hosts of their own, with TLS: a store, a coordinator, and a manager in a sandbox.

Each is connected with the coordinator alone, as in deploy/compose.yaml. The test talks to the coordinator through a
Unix socket, which needs no network.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clients.coordinator import CoordinatorClient
from deploy.certificates import make_certificates
from tests.support.network import Cable, Host, NearHost, are_namespaces_permitted
from tests.support.tcp_proxy import TcpCable
from tests.support.world import Script, World

COORDINATOR: Final = "coordinator"
STORE: Final = "session-store"
SANDBOX: Final = "operation-manager"
OTHER_SANDBOX: Final = "other-sandbox"
PROVIDER: Final = "provider"

PORT: Final = 7777
"""Where each service listens."""

METRICS: Final = "127.0.0.1:9100"
"""Where the manager shows its figures, on its own host."""

_NETWORKS: Final = {STORE: 1, SANDBOX: 2, OTHER_SANDBOX: 3, PROVIDER: 4}


def address_of(name: str) -> str:
    """Return a host's address."""
    return f"{_prefix(name)}.2"


def coordinator_toward(name: str) -> str:
    """Return the coordinator's address on the cable to a host."""
    return f"{_prefix(name)}.1"


def _prefix(name: str) -> str:
    return f"{'10.77' if are_namespaces_permitted() else '127.77'}.{_NETWORKS[name]}"


def _through(address: str) -> str:
    """Return what is dialled for an address of the sandbox's network: the proxy, where there is one."""
    return address if are_namespaces_permitted() else f"{_prefix(SANDBOX)}.9"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distant:
    """Services that run far from each other."""

    directory: Path
    hosts: Mapping[str, Host]
    cables: Mapping[str, Cable | TcpCable]
    """Those to the coordinator, by the host at the other end."""
    coordinator: CoordinatorClient

    @property
    def workspace(self) -> Path:
        """Where sessions of `world` work."""
        return self.directory / "workspace"

    def world(self) -> World:
        """Return the agent."""
        return World(coordinator=self.coordinator, workspace=self.workspace)

    def remembered(self) -> int:
        """Return how many operations the manager remembers in full: those whose end nobody has acknowledged."""
        text: bytes = self.hosts[SANDBOX].inside(lambda: urllib.request.urlopen(f"http://{METRICS}/metrics").read())
        (line,) = (line for line in text.decode().splitlines() if "operations_remembered" in line and line[0] != "#")
        return int(float(line.split()[-1]))

    def log(self, name: str) -> str:
        """Return what a service has written to standard error."""
        return (self.directory / f"{name}.log").read_text(encoding="utf-8")


@asynccontextmanager
async def distant_services(
    directory: Path, script: Script, *, attached: bool, flags: Mapping[str, Sequence[str]] | None = None
) -> AsyncIterator[Distant]:
    """Run the services while the block runs.

    Args:
        directory: Holds workspace, state, certificates and logs.
        script: What the model says.
        attached: True: the manager dials the coordinator; False: the coordinator dials it.
        flags: Further flags of each service, by its name.
    """
    (directory / "workspace").mkdir()
    (directory / "script.json").write_text(json.dumps({"responses": list(script)}), encoding="utf-8")
    addresses = [address for name in _NETWORKS for address in (address_of(name), coordinator_toward(name))]
    make_certificates(directory / "certificates", [*addresses, _through(addresses[0])])
    # The path of a socket has at most 107 bytes, and a test's own directory may be longer.
    sockets = Path(tempfile.mkdtemp(prefix="distant-"))
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, sockets, ignore_errors=True)
        kind = Host if are_namespaces_permitted() else NearHost
        hosts = {name: kind(name) for name in (COORDINATOR, *_NETWORKS)}
        for host in hosts.values():
            stack.callback(host.close)
        cables = _cables(hosts, attached=attached)
        for cable in cables.values():
            await stack.enter_async_context(cable.plugged_in())
        services = _Services(directory=directory, hosts=hosts, sockets=sockets, attached=attached, flags=flags or {})
        await stack.enter_async_context(services.run(STORE))
        client_token, manager_token = await asyncio.gather(services.token(), services.token("--manager", "local"))
        (directory / "manager.token").write_text(manager_token)
        # In no order: each may start before those that it needs.
        both = (services.run(SANDBOX), services.run(COORDINATOR))
        await asyncio.gather(*(one.__aenter__() for one in both))
        for one in both:
            stack.push_async_exit(one)
        client = CoordinatorClient(f"unix:{sockets / COORDINATOR}", token=client_token)
        await stack.enter_async_context(client)
        yield Distant(directory=directory, hosts=hosts, cables=cables, coordinator=client)


def _cables(hosts: Mapping[str, Host], *, attached: bool) -> Mapping[str, Cable | TcpCable]:
    if are_namespaces_permitted():
        coordinator = hosts[COORDINATOR]
        return {name: Cable(coordinator, coordinator_toward(name), hosts[name], address_of(name)) for name in _NETWORKS}
    dialler, listener = (SANDBOX, COORDINATOR) if attached else (COORDINATOR, SANDBOX)
    listening = coordinator_toward(SANDBOX) if attached else address_of(SANDBOX)
    return {SANDBOX: TcpCable(dialler, listener, (_through(listening), PORT), (listening, PORT))}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Services:
    directory: Path
    hosts: Mapping[str, Host]
    sockets: Path
    attached: bool
    flags: Mapping[str, Sequence[str]]

    @asynccontextmanager
    async def run(self, name: str) -> AsyncIterator[None]:
        """Run a service on its host; ready once it listens."""
        module = f"services.{name.replace('-', '_')}"
        with (self.directory / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *self.hosts[name].command(sys.executable, "-m", module, *self._flags(name)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environment(),
            )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(20):
                while b" listens on " not in (line := await process.stdout.readline()):
                    assert line, (self.directory / f"{name}.log").read_text()
            yield
        finally:
            process.terminate()
            await process.wait()

    async def token(self, *arguments: str) -> str:
        """Make a token, by the command line on the coordinator's host."""
        command = ("tokens", "create", "--session-store", f"{address_of(STORE)}:{PORT}", *arguments)
        process = await asyncio.create_subprocess_exec(
            *self.hosts[COORDINATOR].command(sys.executable, "-m", "clients.cli", *command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment()
            | {f"UNREAL_AGENT_TLS_{kind}": path for kind, path in zip(_TLS, self._tls("client"), strict=True)},
        )
        made, problem = await process.communicate()
        assert process.returncode == 0, problem.decode()
        return made.decode().strip()

    def _tls(self, name: str) -> Sequence[str]:
        certificates = self.directory / "certificates"
        return [str(certificates / file) for file in ("ca.pem", f"{name}.pem", f"{name}.key")]

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.directory), "LANG": "C.UTF-8"}

    def _flags(self, name: str) -> list[str]:
        ca, certificate, key = self._tls(name)
        flags = ["--tls-certificate", certificate, "--tls-key", key, "--tls-ca", ca, "--drain-grace-seconds", "1"]
        flags += ["--state-dir", str(self.directory / f"state-{name}")]
        only_coordinator = ["--tls-client-ca", ca, "--allow-client", "coordinator"]
        if name == SANDBOX:
            flags += ["--metrics", METRICS]
        if name == STORE:
            listens = [f"{address_of(STORE)}:{PORT}"]
            flags += [*only_coordinator, "--allow-client", "client"]
        elif name == SANDBOX and self.attached:
            listens = [f"unix:{self.sockets / SANDBOX}"]
            flags += ["--attach", f"{_through(coordinator_toward(SANDBOX))}:{PORT}"]
            flags += ["--token-file", str(self.directory / "manager.token")]
        elif name == SANDBOX:
            listens = [f"{address_of(SANDBOX)}:{PORT}"]
            flags += only_coordinator
        else:
            listens = [f"unix:{self.sockets / COORDINATOR}", f"{coordinator_toward(SANDBOX)}:{PORT}"]
            flags += ["--session-store", f"{address_of(STORE)}:{PORT}", "--authenticate", "tokens"]
            manager = "attached" if self.attached else f"{_through(address_of(SANDBOX))}:{PORT}"
            flags += ["--manager", f"local={manager}", "--script", str(self.directory / "script.json")]
            flags += ["--grace-seconds", "0.3"]
        return [*(part for address in listens for part in ("--listen", address)), *flags, *self.flags.get(name, ())]


_TLS: Final = ("CA", "CERTIFICATE", "KEY")
