"""Runs a gRPC server: where it listens, what it allows of a connection, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from clients._rpc.channel import KEEPALIVE, SIZE_OPTIONS, UNIX_PREFIX, Keepalive, Options, check_address, is_local
from clients._rpc.tls import read_tls_file
from harness.errors import FailedPreconditionError
from services._server.health import HEALTH_SERVICE, Health
from services._server.identity import IdentityHook
from services._server.inflight import CallsInHand
from services._server.interceptor import CallInterceptor
from services._server.validation import MIB, MethodRules

logger = logging.getLogger(__name__)

SERVER_OPTIONS: Final[Options] = (
    *SIZE_OPTIONS,
    # Or a second server would take half of the first one's connections.
    ("grpc.so_reuseport", 0),
    # A connection that sends nothing, or something that is not HTTP/2, is closed after this.
    ("grpc.server_handshake_timeout_ms", 10_000),
)

_REFLECTION_SERVICE: Final[str] = reflection.SERVICE_NAME

_CLEAN_UP_S: Final = 10.0
"""What handlers may still take once their calls were cut."""

_WATCHES_END_S: Final = 1.0
"""What ending watches may take; one whose reader does not read can't be told and is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """Files by which a server shows who it is and checks who calls."""

    certificate_path: Path
    key_path: Path
    client_ca_path: Path | None = None
    """Authorities that a client's certificate must come from (mutual TLS); None: clients show none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server runs."""

    addresses: tuple[str, ...]
    """Each `host:port` (0: any free port) or `unix:/path`."""

    tls: ServerTls | None = None
    """For TCP addresses; None: plain text."""

    is_insecure_allowed: bool = False
    """True permits plain text beyond loopback: whoever reaches the port may do anything."""

    drain_grace_s: float = 20.0
    """What calls in hand may take after a drain began."""

    max_bytes_in_hand: int = 256 * MIB
    """Requests that are being worked on, together; beyond it calls are refused with SERVER_BUSY."""

    keepalive: Keepalive = KEEPALIVE
    """Must be what the clients have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A servicer and what there is to know about its methods."""

    name: str
    """Full name, for example "unreal_agent.sessionstore.v1.SessionStoreService"."""

    register: Callable[[grpc.aio.Server], None]
    """Adds the servicer to a server."""

    rules: MethodRules = field(default_factory=MethodRules)


class Server:
    """A running server. Made by `serve`."""

    def __init__(self, server: grpc.aio.Server, calls: CallsInHand, health: Health, grace_s: float) -> None:
        self.calls = calls
        self.addresses: tuple[str, ...] = ()
        """Where it listens, with the ports that were chosen."""
        self._server = server
        self._health = health
        self._grace_s = grace_s

    async def drain(self, grace_s: float | None = None) -> None:
        """Stop: end watches at once, let calls in hand finish within the grace, join their clean-up."""
        grace_s = self._grace_s if grace_s is None else grace_s
        self._health.drain()
        self.calls.drain()
        logger.info("drain began", extra={"calls": len(self.calls), "grace_s": grace_s})
        async with asyncio.TaskGroup() as tasks:
            # Refuses new calls from here on. It returns early where all calls end, and cuts what is left at the end.
            stopping = tasks.create_task(self._server.stop(grace_s))
            cutting = tasks.create_task(self._cut_unread_watches())
            await asyncio.wait((stopping,))
            cutting.cancel()
        # gRPC does not wait for handlers whose calls are over: their clean-up would be destroyed half done.
        try:
            async with asyncio.timeout(_CLEAN_UP_S):
                await self.calls.wait_until_idle()
        except TimeoutError:
            logger.error("handlers did not end", extra={"calls": len(self.calls)})
        logger.info("drain ended", extra={"calls": len(self.calls)})

    async def _cut_unread_watches(self) -> None:
        await asyncio.sleep(_WATCHES_END_S)
        await self.calls.wait_until_rest_is_ended()
        await self._server.stop(None)


@asynccontextmanager
async def serve(
    settings: ServerSettings, services: Sequence[Service], *, identify: IdentityHook | None = None
) -> AsyncIterator[Server]:
    """Serve while the block runs, health and reflection included; drain at its end unless that was done.

    Args:
        settings: How it runs.
        services: What it serves.
        identify: Says who calls, or refuses; not asked for health. None: everybody may do everything.

    Raises:
        InvalidArgumentError: INVALID_ADDRESS.
        FailedPreconditionError: ADDRESS_UNUSABLE, ADDRESS_NOT_PROTECTED, TLS_FILE_UNREADABLE.
    """
    check_settings(settings, is_authenticated=identify is not None)
    calls = CallsInHand(settings.max_bytes_in_hand)
    names = [service.name for service in services]
    rules = {service.name: service.rules for service in services}
    rules[HEALTH_SERVICE] = MethodRules(endless=frozenset({"Watch"}))
    rules[_REFLECTION_SERVICE] = MethodRules(conversations=frozenset({"ServerReflectionInfo"}))
    interceptor = CallInterceptor(calls, rules, identify, open_services=frozenset({HEALTH_SERVICE}))
    server = grpc.aio.server(options=SERVER_OPTIONS + settings.keepalive.server_options(), interceptors=[interceptor])
    health = Health(names)
    for service in services:
        service.register(server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((*names, HEALTH_SERVICE, _REFLECTION_SERVICE), server)
    running = Server(server, calls, health, settings.drain_grace_s)
    with ExitStack() as stack:
        running.addresses = tuple(
            stack.enter_context(_bound(server, address, settings)) for address in settings.addresses
        )
        await server.start()
        try:
            yield running
        finally:
            if not calls.is_draining:
                await running.drain()


def check_settings(settings: ServerSettings, *, is_authenticated: bool) -> None:
    """Refuse what can't be served, before anything is opened or waited for.

    Raises:
        InvalidArgumentError: INVALID_ADDRESS.
        FailedPreconditionError: ADDRESS_NOT_PROTECTED, TLS_FILE_UNREADABLE.
    """
    for address in settings.addresses:
        check_address(address)
        _check_protected(address, settings, is_authenticated=is_authenticated)
    if settings.tls is not None:
        _RenewedCertificate(settings.tls).check()


def _check_protected(address: str, settings: ServerSettings, *, is_authenticated: bool) -> None:
    if settings.is_insecure_allowed or is_local(address):
        return
    tls = settings.tls
    if tls is None or not (is_authenticated or tls.client_ca_path):
        missing = "TLS" if tls is None else "authentication of clients"
        raise FailedPreconditionError(
            f"{address!r} is not on this machine alone and there is no {missing}: give certificates, listen on a Unix"
            " socket or 127.0.0.1, or allow it in so many words with --insecure",
            reason="ADDRESS_NOT_PROTECTED",
            metadata={"address": address},
        )


@contextlib.contextmanager
def _bound(server: grpc.aio.Server, address: str, settings: ServerSettings) -> Iterator[str]:
    """Add an address to a server that was not started, and yield it with its port."""
    if address.startswith(UNIX_PREFIX):
        with _socket_path_held(Path(address.removeprefix(UNIX_PREFIX))):
            # The socket must be nobody else's from its first moment.
            mask = os.umask(0o177)
            try:
                _add_port(server, address, None)
            finally:
                os.umask(mask)
            yield address
        return
    port = _add_port(server, address, settings.tls)
    yield f"{address.rpartition(':')[0]}:{port}"


def _add_port(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    # Before gRPC tries, which says why it failed on standard error only.
    if not address.startswith(UNIX_PREFIX) and (problem := _bind_problem(address)):
        raise _unusable(address, problem)
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _RenewedCertificate(tls).credentials())
    except RuntimeError as err:
        raise _unusable(address, "it could not be bound, or the certificate is none") from err


class _RenewedCertificate:
    """Reads certificates again when their files change: they are renewed without a restart."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        paths = (tls.key_path, tls.certificate_path, tls.client_ca_path)
        self._paths = tuple(path for path in paths if path is not None)
        self._read_at: tuple[int, ...] = ()
        self._configuration: grpc.ServerCertificateConfiguration | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials that ask with every new connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._current(), self._current_or_last, require_client_authentication=self._tls.client_ca_path is not None
        )

    def check(self) -> None:
        """Read the files: TLS_FILE_UNREADABLE."""
        self._current()

    def _current(self) -> grpc.ServerCertificateConfiguration:
        tls = self._tls
        changed_at = self._changed_at()
        if self._configuration is None or changed_at != self._read_at:
            self._configuration = grpc.ssl_server_certificate_configuration(
                [(read_tls_file(tls.key_path), read_tls_file(tls.certificate_path))],
                root_certificates=read_tls_file(tls.client_ca_path) if tls.client_ca_path else None,
            )
            self._read_at = changed_at
        return self._configuration

    def _current_or_last(self) -> grpc.ServerCertificateConfiguration:
        last = self._configuration
        try:
            return self._current()
        except FailedPreconditionError as error:
            logger.error("certificate was not read again", extra={"error": error.message})
            assert last is not None  # gRPC asks once it has the first
            return last

    def _changed_at(self) -> tuple[int, ...]:
        # A missing file is told by reading it.
        return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in self._paths)


def _bind_problem(address: str) -> str:
    """Return why an address can't be listened on; empty where it can."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as err:
        return (err.strerror or str(err)).lower()
    problems: list[OSError] = []
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as err:
            problems.append(err)
    # One family of addresses may be missing on the machine; a port must be free in all.
    if len(problems) < len(found):
        problems = [problem for problem in problems if problem.errno == errno.EADDRINUSE]
    return (problems[0].strerror or str(problems[0])).lower() if problems else ""


def _unusable(address: str, problem: str) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"cannot listen on {address!r}: {problem}. Stop what uses it, or choose another address",
        reason="ADDRESS_UNUSABLE",
        metadata={"address": address},
    )


@contextlib.contextmanager
def _socket_path_held(path: Path) -> Iterator[None]:
    """Make sure that nobody else serves a Unix socket: gRPC removes the file of one that is in use without a word."""
    address = f"{UNIX_PREFIX}{path}"
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise _unusable(address, "the path is in use by something that is no socket")
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise _unusable(address, (err.strerror or str(err)).lower()) from err
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise _unusable(address, "another process serves it") from err
        yield
    finally:
        # The lock's file stays: removing it would let two processes lock two files of the same name.
        os.close(descriptor)
