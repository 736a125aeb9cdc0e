"""Isolation of commands that this process runs, from options and environment. Light: imported by the options."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clients.cli.failures import UsageError

if TYPE_CHECKING:
    from harness.primitives.isolation import IsolationSettings

KINDS = ("none", "bubblewrap", "container")

KIND_VARIABLE = "UNREAL_AGENT_ISOLATION"

_SIZE = re.compile(r"(\d{1,15})\s*(|B|KiB|MiB|GiB)")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationOptions:
    """What a command line says; the environment says the rest, by the variables of the operation manager."""

    kind: str | None = None
    has_network: bool | None = None

    @property
    def is_given(self) -> bool:
        """Whether an option was given."""
        return self.kind is not None or self.has_network is not None

    @property
    def words(self) -> Sequence[str]:
        """The options again, for a command that goes on."""
        network = ["--isolation-network"] if self.has_network else []
        return [*(["--isolation", self.kind] if self.kind else []), *network]


NO_OPTIONS = IsolationOptions()


def isolation_settings(
    options: IsolationOptions, environ: Mapping[str, str], *, hidden: Sequence[str]
) -> IsolationSettings:
    """Return what is asked for.

    Args:
        options: They win over the environment.
        environ: This process's.
        hidden: Paths that no command may see.

    Raises:
        UsageError: A variable that can't be used.
    """
    from harness.primitives.isolation import DEFAULT_MAX_PROCESSES, ISOLATION_KINDS, IsolationSettings

    named = options.kind or environ.get(KIND_VARIABLE, "none")
    kind = next((kind for kind in ISOLATION_KINDS if kind == named), None)
    if kind is None:
        raise UsageError(f"{KIND_VARIABLE} is {named!r}", f"Set it to one of {', '.join(ISOLATION_KINDS)}.")
    network = environ.get(f"{KIND_VARIABLE}_NETWORK", "false").lower()
    processes = environ.get(f"{KIND_VARIABLE}_MAX_PROCESSES", str(DEFAULT_MAX_PROCESSES))
    size = environ.get(f"{KIND_VARIABLE}_MAX_MEMORY", "0")
    match = _SIZE.fullmatch(size.strip())
    if network not in ("true", "false", "1", "0"):
        raise UsageError(f"{KIND_VARIABLE}_NETWORK is {network!r}", "Set it to true or false.")
    if not (processes.isascii() and processes.isdigit() and int(processes)):
        raise UsageError(f"{KIND_VARIABLE}_MAX_PROCESSES is {processes!r}", "Set it to a positive whole number.")
    if match is None:
        raise UsageError(f"{KIND_VARIABLE}_MAX_MEMORY is {size!r}", "Set it to a size such as 512MiB or 4GiB.")
    readable = [path.strip() for path in environ.get(f"{KIND_VARIABLE}_READ", "").split(",") if path.strip()]
    return IsolationSettings(
        kind=kind,
        has_network=network in ("true", "1") if options.has_network is None else options.has_network,
        readable=[os.path.abspath(os.path.expanduser(path)) for path in readable],
        max_memory_bytes=int(match[1]) * _UNITS[match[2]],
        max_processes=int(processes),
        hidden=hidden,
    )


def is_isolation_asked(options: IsolationOptions, environ: Mapping[str, str]) -> bool:
    """Return whether somebody said how commands are isolated, be it not at all."""
    return options.is_given or KIND_VARIABLE in environ
