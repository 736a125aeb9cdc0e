"""Where a command finds its sessions: a state directory of its own, or a coordinator behind an address."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clients._rpc.tls import ClientTls
from clients.cli.failures import UsageError
from clients.cli.state_dir import StateDirectory, state_directory

SERVER_VARIABLE = "UNREAL_AGENT_SERVER"

TOKEN_VARIABLE = "UNREAL_AGENT_TOKEN"

PROGRAM = "unreal-agent"

_LOOPBACK = ("localhost:", "127.", "[::1]:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What options and environment name, or what was found to serve the state directory."""

    state: StateDirectory
    server: str = ""
    """Address of the coordinator; empty: the state directory is opened in this process."""

    is_server_named: bool = False
    """True where an option named it; then the command that goes on must name it too."""

    token: str = ""
    tls: ClientTls | None = None
    """How a server at a TCP address is reached; None: in plain text."""

    run_options: Sequence[str] = ()
    """Further options that a `run` which goes on must have."""

    @property
    def is_this_machine(self) -> bool:
        """Whether the agent sees the files that this process sees."""
        return not self.server or self.server.startswith(("unix:", *_LOOPBACK))

    def next_command(self, session_id: str) -> str:
        """Return the command that goes on with a session."""
        further = "".join(f" {shlex.quote(word)}" for word in self.run_options)
        return f"{_program()} run --session {session_id}{self._options()}{further}"

    def watch_command(self, session_id: str) -> str:
        """Return the command that follows a session."""
        return f"{_program()} sessions watch {session_id}{self._options()}"

    def _options(self) -> str:
        if self.is_server_named:
            return f" --server {shlex.quote(self.server)}"
        return "" if self.state.is_default else f" --state-dir {shlex.quote(str(self.state.path))}"


def find_place(
    state_dir: str | None, server: str | None, environ: Mapping[str, str], *, tls_ca: str | None = None
) -> Place:
    """Return the place that options and environment name. A directory that is served is reached through its server.

    Raises:
        UsageError: Both options are given.
    """
    if server is not None and state_dir is not None:
        raise UsageError("both --server and --state-dir are given", "Give one of them.")
    state = state_directory(state_dir, environ)
    # What a file was read into often ends with the end of its line.
    token = environ.get(TOKEN_VARIABLE, "").strip()
    tls = _tls(tls_ca, environ)
    if server is not None:
        return Place(state=state, server=server, is_server_named=True, token=token, tls=tls)
    named = environ.get(SERVER_VARIABLE, "") if state_dir is None else ""
    return Place(state=state, server=named or state.server_address() or "", token=token, tls=tls)


def _tls(tls_ca: str | None, environ: Mapping[str, str]) -> ClientTls | None:
    files = [tls_ca or environ.get("UNREAL_AGENT_TLS_CA", "")]
    files += [environ.get(f"UNREAL_AGENT_TLS_{name}", "") for name in ("CERTIFICATE", "KEY")]
    if not any(files):
        return None
    ca_path, certificate_path, key_path = (Path(file).expanduser().absolute() if file else None for file in files)
    return ClientTls(ca_path=ca_path, certificate_path=certificate_path, key_path=key_path)


def _program() -> str:
    """Return what to type for this program: the path that was typed, or its name where the shell finds it by that."""
    called = Path(sys.argv[0])
    if called.name != PROGRAM:
        return PROGRAM
    found = shutil.which(PROGRAM) if called.is_absolute() else None
    is_found = found is not None and Path(found).resolve() == called.resolve()
    return PROGRAM if is_found else shlex.quote(sys.argv[0])
