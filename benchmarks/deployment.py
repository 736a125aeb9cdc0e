"""Starts the three services for a measurement and dials them: by Unix socket, TCP, TLS or mTLS.

Between each other they always use Unix sockets, so that transports are compared by the caller's hop alone.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from clients._rpc.channel import open_channel
from clients._rpc.tls import ClientTls
from deploy.certificates import make_certificates
from tests.support.stack import COORDINATOR, MANAGER, STORE, Stack, three_services
from tests.support.world import Script

Transport = Literal["unix", "tcp", "tls", "mtls"]
TRANSPORTS: tuple[Transport, ...] = ("unix", "tcp", "tls", "mtls")
SERVICES = (COORDINATOR, STORE, MANAGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Services that run."""

    stack: Stack
    addresses: Mapping[str, str]
    """Of each service, by the transport that was asked for."""

    tls: ClientTls | None

    def channel(self, service: str) -> grpc.aio.Channel:
        """Return a channel to a service; the caller closes it."""
        return open_channel(self.addresses[service], tls=self.tls)


@asynccontextmanager
async def deployed(
    script: Script, *, transport: Transport = "unix", flags: Mapping[str, Sequence[str]] | None = None
) -> AsyncIterator[Deployment]:
    """Run the three services in a directory of their own while the block runs."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        further = {service: list((flags or {}).get(service, ())) for service in SERVICES}
        addresses: dict[str, str] = {}
        tls = None
        if transport != "unix":
            tls = _certificates(directory / "certificates", further, transport)
            for service in SERVICES:
                addresses[service] = f"127.0.0.1:{_free_port()}"
                further[service] += ["--listen", addresses[service]]
        async with three_services(directory, script, flags=further) as stack:
            yield Deployment(stack=stack, addresses=addresses or stack.addresses, tls=tls)


def _certificates(directory: Path, flags: dict[str, list[str]], transport: Transport) -> ClientTls | None:
    """Make certificates and add the flags that use them."""
    if transport == "tcp":
        return None
    make_certificates(directory)
    for service in SERVICES:
        flags[service] += ["--tls-certificate", str(directory / f"{service}.pem")]
        flags[service] += ["--tls-key", str(directory / f"{service}.key")]
        flags[service] += ["--tls-client-ca", str(directory / "ca.pem")] if transport == "mtls" else []
    if transport == "tls":
        return ClientTls(ca_path=directory / "ca.pem")
    return ClientTls(
        ca_path=directory / "ca.pem",
        certificate_path=directory / "client.pem",
        key_path=directory / "client.key",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
