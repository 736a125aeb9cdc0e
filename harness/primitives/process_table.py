"""Reads /proc and signals processes by identity. Standard library only: the launcher imports it. Linux.

A process is identified by its pid and its start time in clock ticks since boot, within one boot and one pid namespace.
A bare pid is never signalled.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass

MARKER_VARIABLE = "UNREAL_AGENT_OPERATION"
"""Environment variable that every command's processes carry; its value is the operation's ID."""

SANDBOX_NAME = "bwrap"
"""How the processes are called that stand between a supervisor and a command in a sandbox; they end with the latter."""

OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing of what was to be read: the same may succeed a moment later."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """What /proc/PID/stat says."""

    pid: int
    state: str
    """One letter; "Z" has exited and is not yet reaped."""

    parent_pid: int
    group: int
    session: int
    start_ticks: int
    name: str
    """Its own word for itself, which it may change."""

    @property
    def is_sandbox(self) -> bool:
        """Whether it calls itself what bubblewrap is called."""
        return self.name == SANDBOX_NAME

    @property
    def is_alive(self) -> bool:
        """Whether it still runs code."""
        return self.state not in "ZX"


def parse_stat(stat: bytes) -> ProcessEntry | None:
    """Return the entry of a stat line, or None if it is not one."""
    # The name may hold spaces and parentheses: fields are counted from the last one.
    head, _, tail = stat.rpartition(b") ")
    fields = tail.split()
    pid, _, name = head.partition(b" (")
    if len(fields) < 20 or not all(field.isdigit() for field in (pid, *fields[1:4], fields[19])):
        return None
    return ProcessEntry(
        pid=int(pid),
        state=fields[0].decode("ascii", "replace"),
        parent_pid=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        name=name.decode("utf-8", "replace"),
    )


def _read(path: str) -> bytes:
    """Return what a file holds, nothing where it is gone; raises OSError where too many files are open to look."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            raise
        return b""
    try:
        pieces = []
        while piece := os.read(descriptor, 65536):
            pieces.append(piece)
        return b"".join(pieces)
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            raise
        return b""
    finally:
        os.close(descriptor)


def read_entry(pid: int) -> ProcessEntry | None:
    """Return a process's entry, or None where there is none (any more).

    Raises:
        OSError: OUT_OF_RESOURCES; as for all that reads here.
    """
    return parse_stat(_read(f"/proc/{pid}/stat"))


def list_pids() -> list[int]:
    """Return every pid of this namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def last_pid() -> int:
    """Return the pid that was given out most recently in this namespace; 0 where the kernel does not say."""
    fields = _read("/proc/loadavg").split()
    return int(fields[4]) if len(fields) > 4 else 0


def pid_max() -> int:
    """Return the number at which pids wrap around."""
    return int(_read("/proc/sys/kernel/pid_max") or b"32768")


def marker_of(pid: int) -> str | None:
    """Return the operation whose marker a process carries, or None."""
    prefix = f"{MARKER_VARIABLE}=".encode()
    for variable in _read(f"/proc/{pid}/environ").split(b"\0"):
        if variable.startswith(prefix):
            return variable[len(prefix) :].decode("utf-8", "replace")
    return None


@functools.cache
def boot_id() -> str:
    """Return the ID of this boot of the machine; read once, so that no lack of descriptors makes it another's."""
    return _read("/proc/sys/kernel/random/boot_id").decode("ascii").strip()


def pid_namespace() -> str:
    """Return the pid namespace that this process lives in."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_running(pid: int, start_ticks: int) -> bool:
    """Return whether the very process still runs."""
    entry = read_entry(pid)
    return entry is not None and entry.start_ticks == start_ticks and entry.is_alive


def open_pidfd(pid: int, start_ticks: int) -> int | None:
    """Return a pidfd of the very process, or None where it is gone or the pid is another's by now."""
    try:
        descriptor = os.pidfd_open(pid)
    except (ProcessLookupError, ValueError):
        return None
    # Compared after opening: from here on the descriptor can't come to mean another process.
    if is_running(pid, start_ticks):
        return descriptor
    os.close(descriptor)
    return None


def signal_process(entry: ProcessEntry, number: signal.Signals) -> bool:
    """Signal the very process; return whether it was there to be signalled."""
    descriptor = open_pidfd(entry.pid, entry.start_ticks)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True


def read_entries(pids: Iterable[int]) -> dict[int, ProcessEntry]:
    """Return the entries of those pids that run, by pid."""
    return {entry.pid: entry for entry in map(read_entry, pids) if entry is not None and entry.is_alive}
