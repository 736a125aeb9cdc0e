"""The files by which launcher, supervisor and manager agree on a command. Standard library only.

One directory per attempt to start a command, made by the manager before it journals the intent:

    claim     pid, start time, boot and pid namespace of the supervisor, or of the manager that made sure that the
              command never starts; appears whole or not at all, once for ever, by an exclusive link
    command   the text, where it is too long for an argument
    out, err  what the command wrote
    started   /proc/self/stat of the process that became the command, written by itself before it execs
    unstarted written by a supervisor that was never told to go, and so started nothing
    ended-by  "timeout", "cancel" or "output" (too much of it), written before the first signal
    sandbox   what bubblewrap says of a command in a sandbox; names an exit code once the command was begun in it
    exit      the marks of out and err, then what the supervisor's shell said of a death by signal, then "exit CODE";
              whole only with that last line
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
from dataclasses import dataclass

from harness import faults
from harness.primitives import output_marks, process_table

# Reached by supervisor.sh, which knows them by name.
faults.declare("supervisor.start.before", "the supervisor was told to go, the command has not been started")
faults.declare("supervisor.start.after", "the command's process is made")
faults.declare("supervisor.exit.before", "the command is over, its exit is not recorded")
faults.declare("supervisor.exit.after", "the command's exit is recorded, the supervisor is not over")

CLAIM = "claim"
COMMAND = "command"
STDOUT = "out"
STDERR = "err"
STARTED = "started"
UNSTARTED = "unstarted"
ENDED_BY = "ended-by"
SANDBOX = "sandbox"
EXIT = "exit"

MAX_RECORD_BYTES = 65536

_EXIT_LINE = re.compile(rb"^exit ([0-9]{1,3})\n", re.MULTILINE)
# What bash prints of a job that a signal ended, in any language:
# "[1]+  Terminated ..." or "FILE: line 6: PID Killed ...".
_SIGNAL_NOTE = re.compile(rb"^(\[1\][+-]?\s|.*: .*\d+: +\d+ )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Claim:
    """Who may start the command, or made sure that nobody does."""

    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: str
    is_supervisor: bool
    """False: the command was never started and never will be."""

    def is_of_this_world(self) -> bool:
        """Return whether its process could still run and be seen: same boot, same pid namespace."""
        return self.boot_id == process_table.boot_id() and self.pid_namespace == process_table.pid_namespace()


@dataclass(frozen=True, slots=True)
class ExitRecord:
    """How the direct child ended."""

    exit_code: int
    signal_name: str
    """For example "SIGKILL"; empty for an ordinary exit."""


def _read(directory: str, name: str) -> bytes | None:
    """Return a record, None where there is none that can be read.

    Raises:
        OSError: OUT_OF_RESOURCES: nothing is known of it. A command that runs would be taken for lost.
    """
    try:
        with open(os.path.join(directory, name), "rb") as file:
            return file.read(MAX_RECORD_BYTES)
    except OSError as error:
        if error.errno in process_table.OUT_OF_RESOURCES:
            raise
        return None


def take_claim(directory: str, claim: Claim) -> bool:
    """Take the claim; return False where somebody has it.

    Raises:
        FileNotFoundError: The directory is gone.
    """
    target = os.path.join(directory, CLAIM)
    temporary = f"{target}.{os.getpid()}.{secrets.token_hex(4)}"
    fields = [claim.pid, claim.start_ticks, claim.boot_id, claim.pid_namespace, claim.is_supervisor]
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            # Closed, and so written whole, before it is linked: a disk may be full.
            file.write(json.dumps(fields).encode())
        os.link(temporary, target)
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    return True


def own_claim() -> Claim:
    """Return the claim by which this process makes sure that a command never starts."""
    entry = process_table.read_entry(os.getpid())
    return Claim(
        pid=os.getpid(),
        start_ticks=entry.start_ticks if entry else 0,
        boot_id=process_table.boot_id(),
        pid_namespace=process_table.pid_namespace(),
        is_supervisor=False,
    )


def read_claim(directory: str) -> Claim | None:
    """Return the claim, or None where nobody has it.

    Raises:
        ValueError: Somebody has spoilt it.
    """
    record = _read(directory, CLAIM)
    if record is None:
        return None
    try:
        fields = json.loads(record)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # By type, not by isinstance: true is no pid.
    if not isinstance(fields, list) or [type(field) for field in fields] != [int, int, str, str, bool]:
        raise ValueError("it is no claim")
    return Claim(*fields)


def read_started(directory: str) -> process_table.ProcessEntry | None:
    """Return the process that became the command, or None where it did not get so far."""
    return process_table.parse_stat(_read(directory, STARTED) or b"")


def is_unstarted(directory: str) -> bool:
    """Return whether the supervisor that has the claim ended without having started the command."""
    return os.path.exists(os.path.join(directory, UNSTARTED))


def has_started(directory: str) -> bool:
    """Return whether a process became the command or was about to, readable or not."""
    return os.path.lexists(os.path.join(directory, STARTED))


def sandbox_failure(directory: str) -> str:
    """Return why no sandbox could be made, so that the command was not begun; empty where none was needed or it was."""
    said = _read(directory, SANDBOX)
    if said is None or b'"exit-code"' in said:
        return ""
    # On a full disk nothing may be said of a command that ran: only what bubblewrap itself complained of counts.
    complaint = (_read(directory, STDERR) or b"").decode("utf-8", "replace").splitlines()
    return complaint[-1] if complaint and complaint[-1].startswith("bwrap: ") else ""


def was_emptied(directory: str, name: str) -> bool:
    """Return whether a stream's file was emptied since the command began; False where that can't be said."""
    return output_marks.was_emptied(os.path.join(directory, name), _read(directory, EXIT) or b"")


def read_exit(directory: str) -> ExitRecord | None:
    """Return the exit record if it is whole."""
    record = _read(directory, EXIT) or b""
    matches = list(_EXIT_LINE.finditer(record))
    if not matches:
        return None
    exit_code = int(matches[-1].group(1))
    said = record[: matches[-1].start()] + record[matches[-1].end() :]
    is_signal = exit_code > 128 and _SIGNAL_NOTE.search(said) is not None
    return ExitRecord(exit_code=exit_code, signal_name=signal_name(exit_code - 128) if is_signal else "")


def signal_name(number: int) -> str:
    """Return for example "SIGKILL", or "SIGNAL 40" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGNAL {number}"


def note_ending(directory: str, why: str) -> None:
    """Record why the command is about to be ended; the first reason stands. On a full disk it is ended all the same."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        descriptor = os.open(os.path.join(directory, ENDED_BY), flags, 0o600)
        try:
            os.write(descriptor, why.encode("ascii"))
        finally:
            os.close(descriptor)


def read_ending(directory: str) -> str:
    """Return "timeout", "cancel" or "output", or "" where the harness did not end the command."""
    return (_read(directory, ENDED_BY) or b"").decode("ascii", "replace")


def output_bytes(directory: str, name: str) -> int:
    """Return the size of a stream's file; 0 where there is none."""
    try:
        return os.stat(os.path.join(directory, name)).st_size
    except OSError:
        return 0


def is_output_full(directory: str, limit_bytes: int) -> bool:
    """Return whether both streams together have reached a limit; 0 means no limit."""
    return 0 < limit_bytes <= output_bytes(directory, STDOUT) + output_bytes(directory, STDERR)
