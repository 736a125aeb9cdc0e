"""Makes certificates for development: an authority, and one certificate for each service and for a client.

python -m deploy.certificates DIRECTORY [NAME ...]

Run again with the same directory, it renews the certificates by the same authority; services take them up by
themselves. NAMEs are further host names or addresses at which the services are reached.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import trustme

SERVICES = ("coordinator", "session-store", "operation-manager", "client")
"""Whom a certificate is for; its name in --allow-client."""

LOCAL = ("localhost", "127.0.0.1", "::1")


def make_certificates(directory: Path, names: Sequence[str] = ()) -> None:
    """Write `ca.pem`, `ca.key`, and `SERVICE.pem` and `SERVICE.key` of each service; keep an authority there is."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority_path, authority_key_path = directory / "ca.pem", directory / "ca.key"
    if authority_path.exists() and authority_key_path.exists():
        authority = trustme.CA.from_pem(authority_path.read_bytes(), authority_key_path.read_bytes())
    else:
        authority = trustme.CA(organization_name="unreal-agent development")
        _write(authority_key_path, authority.private_key_pem.bytes())
        _write(authority_path, authority.cert_pem.bytes())
    for service in SERVICES:
        certificate = authority.issue_cert(service, *LOCAL, *names, common_name=service)
        # The key first: who reads between the two finds a pair that does not fit, and keeps the one it has.
        _write(directory / f"{service}.key", certificate.private_key_pem.bytes())
        _write(directory / f"{service}.pem", b"".join(part.bytes() for part in certificate.cert_chain_pems))


def _write(path: Path, content: bytes) -> None:
    """Write a file that is whole at any moment and nobody else's to read."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.touch(mode=0o600)
    temporary.write_bytes(content)
    os.replace(temporary, path)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m deploy.certificates DIRECTORY [NAME ...]")
    make_certificates(Path(sys.argv[1]), sys.argv[2:])
    print(f"{sys.argv[1]}: certificates of {', '.join(SERVICES)}, by the authority ca.pem")
