"""The three services beyond loopback's trust: TLS both ways, names that may call, certificates that are renewed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from clients._rpc.channel import open_channel
from clients._rpc.tls import ClientTls
from clients.operation_manager import DialledLink, ProxyOperationManager
from clients.session_store.remote_session_store import RemoteSessionStore
from deploy.certificates import make_certificates
from harness.errors import DeadlineExceededError, FailedPreconditionError, PermissionDeniedError, UnavailableError
from tests.support.world import bash
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

STORE_INFO = store_pb2.GetServerInfoRequest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """Services at TCP addresses, and where their certificates are."""

    addresses: dict[str, str]
    certificates: Path
    directory: Path

    def tls(self, name: str) -> ClientTls:
        """Return how a service, or a client, dials the others."""
        return ClientTls(
            ca_path=self.certificates / "ca.pem",
            certificate_path=self.certificates / f"{name}.pem",
            key_path=self.certificates / f"{name}.key",
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command line."""
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.directory), "LANG": "C.UTF-8", **variables}
        return subprocess.run(
            [sys.executable, "-m", "clients.cli", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def secured_services(directory: Path, *, manager_attaches: bool = False) -> AsyncIterator[Secured]:
    certificates = directory / "certificates"
    make_certificates(certificates)
    (directory / "script.json").write_text(
        json.dumps({"responses": [{"tool_calls": [bash("echo hello")]}, {"expect": "hello", "text": "It said hello."}]})
    )
    names = ("session-store", "operation-manager", "coordinator")
    # Not loopback: there, nothing has to be protected.
    addresses = {name: f"0.0.0.0:{free_port()}" for name in names}
    dialled = {name: address.replace("0.0.0.0", "127.0.0.1") for name, address in addresses.items()}
    only_coordinator = ["--tls-client-ca", str(certificates / "ca.pem"), "--allow-client", "coordinator"]
    flags = {
        "session-store": [*only_coordinator, "--allow-client", "client"],
        "operation-manager": only_coordinator,
        "coordinator": [
            *("--session-store", dialled["session-store"]),
            *("--manager", "local=attached" if manager_attaches else f"local={dialled['operation-manager']}"),
            *("--tls-ca", str(certificates / "ca.pem"), "--authenticate", "tokens"),
            *("--script", str(directory / "script.json")),
        ],
    }
    token_path = directory / "manager.token"
    if manager_attaches:
        flags["operation-manager"] = [
            *("--attach", dialled["coordinator"], "--token-file", str(token_path)),
            *("--tls-ca", str(certificates / "ca.pem")),
        ]
        # Nobody can dial it.
        addresses["operation-manager"] = f"unix:{directory / 'manager.sock'}"
    secured = Secured(addresses=dialled, certificates=certificates, directory=directory)
    async with AsyncExitStack() as stack:
        for name in names:
            if name == "operation-manager" and manager_attaches:
                token_path.write_text(await manager_token(secured))
            own = ["--tls-certificate", str(certificates / f"{name}.pem")]
            own += ["--tls-key", str(certificates / f"{name}.key"), "--state-dir", str(directory / "state")]
            log = stack.enter_context((directory / f"{name}.log").open("wb"))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"services.{name.replace('-', '_')}", "--listen", addresses[name]),
                *(*own, *flags[name]),
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
            stack.push_async_callback(process.wait)
            stack.callback(process.terminate)
            assert process.stdout is not None
            while b" listens on " not in (line := await process.stdout.readline()):
                assert line, (directory / f"{name}.log").read_text()
        yield secured


async def manager_token(services: Secured) -> str:
    """Return the secret of a token for the manager `local`."""
    async with RemoteSessionStore(services.addresses["session-store"], tls=services.tls("client")) as store:
        token = store_pb2.Token(rights=[store_pb2.RIGHT_OPERATE], manager_name="local")
        return (await store.create_token(store_pb2.CreateTokenRequest(request_id="m", token=token))).secret


@pytest.mark.parametrize("manager_attaches", [False, True], ids=["dialled", "attached"])
async def test_a_run_goes_through_services_that_check_each_other(tmp_path: Path, manager_attaches: bool) -> None:
    async with secured_services(tmp_path, manager_attaches=manager_attaches) as services:
        ca = str(services.certificates / "ca.pem")
        as_client = {
            "UNREAL_AGENT_TLS_CA": ca,
            "UNREAL_AGENT_TLS_CERTIFICATE": str(services.certificates / "client.pem"),
            "UNREAL_AGENT_TLS_KEY": str(services.certificates / "client.key"),
        }
        store = ("--session-store", services.addresses["session-store"])
        made = await asyncio.to_thread(services.run, "tokens", "create", *store, **as_client)
        assert made.returncode == 0, made.stderr
        at = ("--server", services.addresses["coordinator"])
        wish = ("run", *at, "--tls-ca", ca, "-p", "hi", "--workspace", str(tmp_path))
        done = await asyncio.to_thread(services.run, *wish, UNREAL_AGENT_TOKEN=made.stdout.strip())
        assert done.returncode == 0, done.stderr
        assert "It said hello." in done.stdout
        told = await asyncio.to_thread(services.run, *wish)
        assert told.returncode == 1
        assert "UNREAL_AGENT_TOKEN" in told.stderr


async def test_only_who_is_named_reaches_store_and_manager(tmp_path: Path) -> None:
    async with secured_services(tmp_path) as services:
        address = services.addresses["session-store"]
        async with RemoteSessionStore(address, tls=services.tls("coordinator"), timeout_s=10) as store:
            await store.get_server_info(STORE_INFO)
        # What a manager in a sandbox holds opens neither the store nor another manager.
        async with RemoteSessionStore(address, tls=services.tls("operation-manager"), timeout_s=10) as store:
            with pytest.raises(PermissionDeniedError, match="operation-manager"):
                await store.get_server_info(STORE_INFO)
        link = DialledLink(services.addresses["operation-manager"], tls=services.tls("operation-manager"))
        async with ProxyOperationManager(link) as manager:
            with pytest.raises(PermissionDeniedError):
                await manager.list_operations(manager_pb2.ListOperationsRequest())
        for tls in (ClientTls(ca_path=services.certificates / "ca.pem"), None):
            async with RemoteSessionStore(address, tls=tls, timeout_s=2) as store:
                with pytest.raises((UnavailableError, DeadlineExceededError)):
                    await store.get_server_info(STORE_INFO)


async def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    async with secured_services(tmp_path) as services:
        address = services.addresses["session-store"]
        before = await asyncio.to_thread(shown_certificate, services)
        async with RemoteSessionStore(address, tls=services.tls("coordinator"), timeout_s=10) as connected:
            await connected.get_server_info(STORE_INFO)
            make_certificates(services.certificates)
            assert await asyncio.to_thread(shown_certificate, services) != before
            await connected.get_server_info(STORE_INFO)
        async with RemoteSessionStore(address, tls=services.tls("coordinator"), timeout_s=10) as store:
            await store.get_server_info(STORE_INFO)


def shown_certificate(services: Secured) -> bytes:
    """Return the certificate that the store shows."""
    context = ssl.create_default_context(cafile=services.certificates / "ca.pem")
    context.load_cert_chain(services.certificates / "coordinator.pem", services.certificates / "coordinator.key")
    context.set_alpn_protocols(["h2"])
    host, _, port = services.addresses["session-store"].rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secured,
    ):
        shown = secured.getpeercert(binary_form=True)
        assert shown is not None
        return shown


def test_a_token_is_not_sent_in_clear_text() -> None:
    with pytest.raises(FailedPreconditionError, match="clear text"):
        open_channel("192.0.2.1:7777", token="secret")
