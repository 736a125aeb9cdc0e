"""Certificates and keys of a client. Light: the command line names them before it needs gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.errors import FailedPreconditionError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """Files by which a client checks the server and shows who it is."""

    ca_path: Path | None = None
    """Authorities that the server's certificate must come from; None: the system's."""

    certificate_path: Path | None = None
    key_path: Path | None = None
    """The client's own certificate and key, both or none."""

    server_name: str = ""
    """Name that the server's certificate must hold; empty: the address's host."""


def read_tls_file(path: Path) -> bytes:
    """Return a certificate or key: TLS_FILE_UNREADABLE."""
    try:
        return path.read_bytes()
    except OSError as err:
        raise FailedPreconditionError(
            f"{str(path)!r} cannot be read ({err.strerror}): name a file in PEM form",
            reason="TLS_FILE_UNREADABLE",
            metadata={"path": str(path)},
        ) from err
