"""Channels to our servers: addresses, options that fit the servers' own, tokens."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from clients._rpc.tls import ClientTls, read_tls_file
from harness.errors import FailedPreconditionError, InvalidArgumentError

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Ceiling of the transport; every request has a lower bound of its own."""

# Longest path of a Unix socket, without the zero byte at its end (unix(7)).
_MAX_SOCKET_PATH_BYTES: Final = 107

UNIX_PREFIX: Final = "unix:"

Options = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """Pings on quiet connections. Client and server must agree: a server cuts clients that ping more than it allows."""

    time_s: float = 10.0
    """After this long without traffic either side pings, also without calls."""

    timeout_s: float = 5.0
    """A peer that does not answer for this long is gone: frozen, cut off, or its machine is."""

    min_interval_s: float = 5.0
    """What a server allows of its clients; well below `time_s`, since pings may arrive bunched."""

    def options(self) -> Options:
        """Return what both sides set."""
        return (
            ("grpc.keepalive_time_ms", round(self.time_s * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.timeout_s * 1000)),
            # Pings that measure the bandwidth have a timeout of their own, a minute, and none is sent beside them.
            ("grpc.http2.ping_timeout_ms", round(self.timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        )

    def server_options(self) -> Options:
        """Return what a server sets."""
        return (
            *self.options(),
            # Its constant in gRPC's sources has RECV in its name; an option with that does nothing.
            ("grpc.http2.min_ping_interval_without_data_ms", round(self.min_interval_s * 1000)),
        )


KEEPALIVE: Final = Keepalive()

SIZE_OPTIONS: Final[Options] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

CHANNEL_OPTIONS: Final[Options] = (
    *SIZE_OPTIONS,
    # A proxy in the environment is for the way to model providers.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Despite its name the time that an attempt to connect may take, not a bound of the back-off.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Each channel its own connections: a stream that fills one must not hold up another channel's calls.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.service_config_disable_resolution", 1),
)


def open_channel(
    address: str, *, token: str = "", tls: ClientTls | None = None, keepalive: Keepalive = KEEPALIVE
) -> grpc.aio.Channel:
    """Return a channel that connects when it is first used and reconnects for ever; the caller closes it.

    Args:
        address: `host:port` or `unix:/path`.
        token: Bearer token that goes with every call; empty: none.
        tls: For TCP addresses; None: plain text.
        keepalive: Must be what the server has.

    Raises:
        InvalidArgumentError: INVALID_ADDRESS.
        FailedPreconditionError: TLS_FILE_UNREADABLE, TOKEN_IN_CLEAR_TEXT, TOKEN_UNUSABLE.
    """
    check_address(address)
    if not (token.isascii() and token.isprintable()):
        # A header can't carry it. The message must not show it.
        raise FailedPreconditionError(
            "the token holds a character that no token has, such as the end of a line: give it as it was made",
            reason="TOKEN_UNUSABLE",
        )
    if token and tls is None and not is_local(address):
        raise FailedPreconditionError(
            f"a token would go to {address!r} in clear text: name the authority of its certificate (--tls-ca), or use a"
            " Unix socket or 127.0.0.1",
            reason="TOKEN_IN_CLEAR_TEXT",
            metadata={"address": address},
        )
    interceptors = _token_interceptors(token) if token else []
    options = CHANNEL_OPTIONS + keepalive.options()
    if tls is None or address.startswith(UNIX_PREFIX):
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    if tls.server_name:
        options += (("grpc.ssl_target_name_override", tls.server_name),)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=read_tls_file(tls.ca_path) if tls.ca_path else None,
        private_key=read_tls_file(tls.key_path) if tls.key_path else None,
        certificate_chain=read_tls_file(tls.certificate_path) if tls.certificate_path else None,
    )
    return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)


def is_local(address: str) -> bool:
    """Return whether nobody beyond this machine can reach an address."""
    if address.startswith(UNIX_PREFIX):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str) -> None:
    """Refuse an address that is neither `host:port` nor `unix:/path`: INVALID_ADDRESS."""
    problem = _address_problem(address)
    if problem:
        raise InvalidArgumentError(
            f"address {address!r} {problem}", reason="INVALID_ADDRESS", metadata={"field": "address"}
        )


def _address_problem(address: str) -> str:
    if address.startswith(UNIX_PREFIX):
        path = address.removeprefix(UNIX_PREFIX)
        if not path.startswith("/"):
            return "must hold an absolute path after 'unix:'"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            return f"must hold a path of at most {_MAX_SOCKET_PATH_BYTES} bytes; choose a shorter one"
        return ""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        return "must be host:port, [IPv6 address]:port or unix:/path"
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
        return "must end in a port from 0 to 65535"
    return ""


# gRPC has no credentials for calls over plain text, and an interceptor for each of the four kinds of calls.
class _UnaryUnaryToken(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, header: tuple[str, str]) -> None:
        self._header = header

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_header(client_call_details, self._header), request)


class _UnaryStreamToken(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, header: tuple[str, str]) -> None:
        self._header = header

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_header(client_call_details, self._header), request)


class _StreamUnaryToken(grpc.aio.StreamUnaryClientInterceptor):
    def __init__(self, header: tuple[str, str]) -> None:
        self._header = header

    async def intercept_stream_unary(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request_iterator: AsyncIterable[Any] | Iterable[Any],
    ) -> Any:
        return await continuation(_with_header(client_call_details, self._header), request_iterator)


class _StreamStreamToken(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, header: tuple[str, str]) -> None:
        self._header = header

    async def intercept_stream_stream(
        self,
        continuation: Callable[..., Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request_iterator: AsyncIterable[Any] | Iterable[Any],
    ) -> Any:
        return await continuation(_with_header(client_call_details, self._header), request_iterator)


def _token_interceptors(token: str) -> list[grpc.aio.ClientInterceptor]:
    header = ("authorization", f"Bearer {token}")
    return [_UnaryUnaryToken(header), _UnaryStreamToken(header), _StreamUnaryToken(header), _StreamStreamToken(header)]


def _with_header(details: grpc.aio.ClientCallDetails, header: tuple[str, str]) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), header)
    return grpc.aio.ClientCallDetails(
        method=details.method,
        timeout=details.timeout,
        metadata=metadata,
        credentials=details.credentials,
        wait_for_ready=details.wait_for_ready,
    )
