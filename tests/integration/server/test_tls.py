"""Servers beyond the machine: certificates of both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from clients._rpc import calls
from clients._rpc.channel import open_channel
from clients._rpc.tls import ClientTls
from harness.errors import FailedPreconditionError, HarnessError, UnavailableError
from harness.session_store.sqlite import SqliteSessionStore
from services._server.identity import Caller, CallFacts, CertifiedCaller
from services._server.server import ServerSettings, ServerTls, serve
from services.session_store.servicer import store_service
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2_grpc as store_grpc


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """Make an authority, and certificates of a server and a client that come from it, and a stranger's."""
    authority, stranger = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    write(authority.issue_cert("localhost", "127.0.0.1", common_name="server"), tmp_path, "server")
    write(authority.issue_cert("coordinator-1", common_name="client"), tmp_path, "client")
    stranger.cert_pem.write_to_path(str(tmp_path / "stranger-ca.pem"))
    write(stranger.issue_cert("stranger"), tmp_path, "stranger")
    return tmp_path


def write(certificate: trustme.LeafCert, directory: Path, name: str) -> None:
    certificate.private_key_pem.write_to_path(str(directory / f"{name}.key"))
    for part in certificate.cert_chain_pems:
        part.write_to_path(str(directory / f"{name}.pem"), append=True)


async def test_both_sides_show_certificates_and_the_callers_names_are_seen(certificates: Path) -> None:
    seen: list[tuple[str, ...]] = []

    async def identify(facts: CallFacts) -> Caller:
        seen.append(facts.peer_names)
        return CertifiedCaller(facts.peer_names)

    tls = ServerTls(
        certificate_path=certificates / "server.pem",
        key_path=certificates / "server.key",
        client_ca_path=certificates / "ca.pem",
    )

    async def ask(address: str, **files: str) -> HarnessError | None:
        client = ClientTls(
            ca_path=certificates / files["ca"],
            certificate_path=certificates / files["certificate"] if "certificate" in files else None,
            key_path=certificates / files["key"] if "key" in files else None,
        )
        async with open_channel(address, tls=client) as channel:
            stub = store_grpc.SessionStoreServiceStub(channel)
            try:
                await calls.unary(
                    stub.GetServerInfo,
                    store_pb2.GetServerInfoRequest(),
                    timeout_s=5,
                    is_idempotent=False,
                    wait_for_ready=False,
                )
            except HarnessError as error:
                return error
        return None

    # Beyond loopback, which is allowed with TLS and authentication.
    settings = ServerSettings(addresses=("0.0.0.0:0",), tls=tls)
    async with (
        SqliteSessionStore.open(certificates / "sessions.db") as store,
        store_service(store) as service,
        serve(settings, [service], identify=identify) as server,
    ):
        address = f"127.0.0.1:{server.addresses[0].rpartition(':')[2]}"
        assert await ask(address, ca="ca.pem", certificate="client.pem", key="client.key") is None
        assert seen == [("coordinator-1",)]
        for bad in (
            {"ca": "stranger-ca.pem", "certificate": "client.pem", "key": "client.key"},
            {"ca": "ca.pem", "certificate": "stranger.pem", "key": "stranger.key"},
            {"ca": "ca.pem"},
        ):
            assert isinstance(await ask(address, **bad), UnavailableError)
        assert len(seen) == 1


async def test_certificates_without_authentication_are_not_enough(certificates: Path) -> None:
    tls = ServerTls(certificate_path=certificates / "server.pem", key_path=certificates / "server.key")
    with pytest.raises(FailedPreconditionError, match="authentication"):
        async with serve(ServerSettings(addresses=("0.0.0.0:0",), tls=tls), []):
            pass


async def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tls = ServerTls(certificate_path=tmp_path / "no.pem", key_path=tmp_path / "no.key")
    with pytest.raises(FailedPreconditionError, match=r"no\.key"):
        async with serve(ServerSettings(addresses=("127.0.0.1:0",), tls=tls), []):
            pass
