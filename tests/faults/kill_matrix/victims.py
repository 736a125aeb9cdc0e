"""Who can be killed: the six kinds of processes, the fault points that lie in each, and how to find one to kill."""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import clients
import harness
import services
from harness import faults
from harness.primitives import process_table
from tests.support.stack import COORDINATOR, MANAGER, STORE

CLIENT: Final = "client"
LAUNCHER: Final = "launcher"
SUPERVISOR: Final = "supervisor"

SERVICES: Final = (COORDINATOR, STORE, MANAGER)
KINDS: Final = (CLIENT, COORDINATOR, STORE, MANAGER, LAUNCHER, SUPERVISOR)

_HOMES: Final = {
    "client": CLIENT,
    "coordinator": COORDINATOR,
    "session_store": STORE,
    "operations": MANAGER,
    "primitives": MANAGER,
    "launcher": LAUNCHER,
    "supervisor": SUPERVISOR,
}
"""In which process a point lies, by the first word of its name."""


def points() -> Mapping[str, str]:
    """Return every fault point of the code and the kind of process that dies there; a point of no known home fails."""
    for package in (clients, harness, services):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    return {name: _HOMES[name.partition(".")[0]] for name in faults.points()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervisor:
    """A supervisor that runs."""

    entry: process_table.ProcessEntry
    operation_id: str


def find_launcher(manager_pid: int) -> process_table.ProcessEntry | None:
    """Return the launcher of a manager."""
    for pid in _children(manager_pid):
        entry = process_table.read_entry(pid)
        if entry is not None and _read(f"/proc/{pid}/comm").strip() == b"ua-launcher":
            return entry
    return None


def find_supervisors(launcher_pid: int) -> Iterator[Supervisor]:
    """Yield the supervisors that a launcher started."""
    for pid in _children(launcher_pid):
        entry = process_table.read_entry(pid)
        arguments = _read(f"/proc/{pid}/cmdline").split(b"\0")
        if entry is not None and len(arguments) > 4 and arguments[3].endswith(b"/supervisor.sh"):
            yield Supervisor(entry=entry, operation_id=arguments[4].decode())


def kill(entry: process_table.ProcessEntry) -> bool:
    """End a process with SIGKILL; False where it is gone."""
    return process_table.signal_process(entry, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found = []
    for thread in _listed(f"/proc/{pid}/task"):
        found += [int(child) for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
    return found


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
