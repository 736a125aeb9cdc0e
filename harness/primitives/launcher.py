"""The launcher: a small process that starts commands and ends what they leave behind.

Started once by a manager before anything else, as `python -I -S launcher.py`, with a socket as file descriptor 3. It
imports the standard library and its neighbours here, never gRPC or protobuf. It is the child subreaper: what a command
orphans becomes its child. It outlives the manager until the last command is over, then exits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    # Isolated mode leaves out the directory of the package; nothing else is taken from there.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness import faults
from harness.primitives import launcher_protocol as protocol
from harness.primitives import output_marks
from harness.primitives import process_records as records
from harness.primitives import process_table as table
from harness.primitives.process_ending import Ending, Snapshot, Target, take_snapshot

BEFORE_SPAWN = faults.declare("launcher.spawn.before", "a start was asked for, there is no supervisor")
BEFORE_CLAIM = faults.declare("launcher.claim.before", "a supervisor waits, nobody has the claim")
AFTER_CLAIM = faults.declare("launcher.claim.after", "a supervisor has the claim and is not told to go")
AFTER_GO = faults.declare("launcher.go.after", "a supervisor is told to go")
BEFORE_EXIT = faults.declare("launcher.exit.before", "a supervisor is reaped, the manager has not been told")
AFTER_EXIT = faults.declare("launcher.exit.after", "the manager was told that a command is over")

MANAGER_DESCRIPTOR = 3
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NAME = 15

# A single argument of exec is limited to 128 KiB; longer texts go through a file.
MAX_ARGUMENT_BYTES = 96 * 1024

# Time between two looks at how much the commands have written: a runaway would fill the disk until its time limit.
OUTPUT_LOOK_S = 1.0

# After a look at the processes the next waits this many times as long as it took.
PAUSE_FACTOR = 4

LONGEST_WAIT_S = 86_400.0

DEFAULT_SIGNALS = sorted(set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})


@dataclass(slots=True)
class Running:
    """A command of this launcher whose supervisor runs."""

    operation_id: str
    directory: str
    supervisor: table.ProcessEntry
    deadline_s: float
    """Monotonic: when it is ended if no manager is here to do it; infinite: never."""


@dataclass(slots=True)
class Launcher:
    """One process, one loop; every method is called from `run`."""

    manager: socket.socket | None
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    environment: dict[str, str] = field(default_factory=dict)
    grace_s: float = 5.0
    file_size_limit_bytes: int = 0
    running: dict[int, Running] = field(default_factory=dict)
    """By the supervisor's pid."""

    endings: dict[str, Ending] = field(default_factory=dict)
    """By operation ID."""

    unbegun: list[Ending] = field(default_factory=list)
    """Those of the endings whose processes have not been looked for."""

    next_round_s: float = 0.0
    next_output_look_s: float = 0.0
    received: bytearray = field(default_factory=bytearray)
    told: bytearray = field(default_factory=bytearray)
    started_read: int = -1
    started_write: int = -1
    bash: str | None = None
    supervisor_script: str = ""

    def run(self) -> None:
        """Serve until the manager is gone and nothing runs any more."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self.started_read, self.started_write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.started_read, False)
        self.supervisor_script = str(Path(__file__).with_name("supervisor.sh"))
        assert self.manager is not None
        self.selector.register(self.manager, selectors.EVENT_READ)
        self.selector.register(wake_read, selectors.EVENT_READ)
        self.selector.register(self.started_read, selectors.EVENT_READ)
        while self.manager is not None or self.running or self.endings:
            for key, _ in self.selector.select(self._wait_s()):
                if key.fileobj is self.manager:
                    self._receive()
                elif key.fd == wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
            # Always both, in this order: a start is told before the exit that may follow at once.
            self._tell_started()
            self._reap()
            self._end_overdue()
            self._end_runaways()
            self._begin_endings()
            self._go_on_ending()

    def _wait_s(self) -> float | None:
        wake_s = math.inf
        if self.endings:
            wake_s = max(self.next_round_s, min(ending.next_look_s for ending in self.endings.values()))
        if self.manager is None:
            due = [c.deadline_s for c in self.running.values() if c.operation_id not in self.endings]
            wake_s = min([wake_s, *due])
        if self.running and self.file_size_limit_bytes:
            wake_s = min(wake_s, self.next_output_look_s)
        # The selector takes no infinity, and no more than weeks.
        return None if wake_s == math.inf else min(max(0.0, wake_s - time.monotonic()), LONGEST_WAIT_S)

    def _end_overdue(self) -> None:
        """Keep the time limits of a manager that is gone: it may never come back."""
        if self.manager is not None:
            return
        now_s = time.monotonic()
        for command in self.running.values():
            if command.deadline_s <= now_s and command.operation_id not in self.endings:
                self._end_own(command, "timeout")

    def _end_runaways(self) -> None:
        """End commands that have written too much, also without a manager.

        The kernel's limit is of each file, and refuses what is beyond; it ends nobody who tries again for ever.
        """
        now_s = time.monotonic()
        if now_s < self.next_output_look_s:
            return
        self.next_output_look_s = now_s + OUTPUT_LOOK_S
        for command in self.running.values():
            if command.operation_id not in self.endings and records.is_output_full(
                command.directory, self.file_size_limit_bytes
            ):
                self._end_own(command, "output")

    def _end_own(self, command: Running, why: str) -> None:
        records.note_ending(command.directory, why)
        self._plan_ending(Target(operation_id=command.operation_id, supervisor=command.supervisor, is_foreign=False))

    def _plan_ending(self, target: Target) -> None:
        ending = self.endings[target.operation_id] = Ending(target=target, grace_s=self.grace_s)
        # Begun after all requests that are there have been read: one look serves them all.
        self.unbegun.append(ending)

    # --- the manager ---

    def _receive(self) -> None:
        assert self.manager is not None
        try:
            piece = self.manager.recv(1 << 20)
        except OSError:
            piece = b""
        if not piece:
            self._lose_manager()
            return
        self.received += piece
        while len(self.received) >= protocol.LENGTH.size:
            (length,) = protocol.LENGTH.unpack_from(self.received)
            end = protocol.LENGTH.size + length
            if len(self.received) < end:
                return
            request: protocol.Request = json.loads(self.received[protocol.LENGTH.size : end])
            del self.received[:end]
            self._serve(request)

    def _lose_manager(self) -> None:
        if self.manager is not None:
            self.selector.unregister(self.manager)
            self.manager.close()
            self.manager = None

    def _tell(self, report: protocol.Report) -> None:
        if self.manager is None:
            return
        try:
            self.manager.sendall(protocol.encode(report))
        except OSError:
            self._lose_manager()

    def _serve(self, request: protocol.Request) -> None:
        match request["do"]:
            case "configure":
                self.environment = request["environment"]
                self.grace_s = request["grace_s"]
                self.file_size_limit_bytes = request["file_size_limit_bytes"]
                self.bash = shutil.which("bash", path=self.environment.get("PATH", os.defpath))
            case "start":
                self._start(request)
            case "end":
                self._end(request)

    # --- starting ---

    def _start(self, request: protocol.Start) -> None:
        operation_id = request["operation_id"]
        refusal = self._why_not(request)
        if refusal is None:
            try:
                self._spawn(request)
            except OSError as error:
                refusal = ("CANNOT_START", f"the command could not be started: {error.strerror or error}")
        if refusal is not None:
            self._tell({"event": "refused", "operation_id": operation_id, "reason": refusal[0], "message": refusal[1]})

    def _why_not(self, request: protocol.Start) -> tuple[str, str] | None:
        wanted = request["working_directory"]
        if self.bash is None:
            return "BASH_MISSING", f"bash was not found in PATH ({self.environment.get('PATH', os.defpath)})"
        if not os.path.isdir(request["directory"]):
            return "OPERATION_DIRECTORY_MISSING", f"the operation's own directory {request['directory']} is gone"
        try:
            is_directory = os.path.isdir(wanted)
        except ValueError:
            is_directory = False
        if is_directory and os.access(wanted, os.X_OK):
            return None
        if is_directory:
            why = "may not be entered"
        elif os.path.lexists(wanted):
            why = "is not a directory"
        else:
            why = "does not exist"
        return "WORKING_DIRECTORY_UNAVAILABLE", f"the working directory {wanted!r} {why}"

    def _spawn(self, request: protocol.Start) -> None:
        operation_id, directory = request["operation_id"], request["directory"]
        if os.path.lexists(os.path.join(directory, records.CLAIM)):
            # The manager's journal is older than the command: its files are not to be touched.
            self._tell({"event": "claim_lost", "operation_id": operation_id})
            return
        text = request["command"].encode()
        if len(text) > MAX_ARGUMENT_BYTES:
            self._write(os.path.join(directory, records.COMMAND), text)
            text = b""
        marks = b"".join(self._make_output(os.path.join(directory, name)) for name in (records.STDOUT, records.STDERR))
        self._write(os.path.join(directory, records.EXIT), marks)
        assert self.bash is not None
        limit_kib = str(self.file_size_limit_bytes // 1024) if self.file_size_limit_bytes else "unlimited"
        command = [self.bash, "--norc", "--noprofile", self.supervisor_script, operation_id, directory]
        arguments: list[str | bytes] = [*command, request["working_directory"], self.bash, limit_kib, text]
        limits = request["limits"] or ["", ""]
        arguments += ["\n".join(request["cgroups"]), *limits, *request["sandbox"]]
        environment = {**self.environment, table.MARKER_VARIABLE: operation_id}
        if faults.KILL_VARIABLE in os.environ:
            # The supervisor's alone: it keeps it from its command.
            environment[faults.KILL_VARIABLE] = os.environ[faults.KILL_VARIABLE]
        go_read, go_write = os.pipe2(os.O_CLOEXEC)
        faults.reach(BEFORE_SPAWN)
        try:
            pid = os.posix_spawn(
                self.bash,
                arguments,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, go_read, 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_DUP2, self.started_write, 3),
                ],
                setsid=True,
                setsigmask=(),
                setsigdef=DEFAULT_SIGNALS,
            )
            faults.reach(BEFORE_CLAIM)
            if self._claim(request, pid):
                faults.reach(AFTER_CLAIM)
                os.write(go_write, b"go\n")
                faults.reach(AFTER_GO)
            else:
                self._tell({"event": "claim_lost", "operation_id": operation_id})
        finally:
            os.close(go_read)
            os.close(go_write)

    @staticmethod
    def _make_output(path: str) -> bytes:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            return output_marks.mark(descriptor)
        finally:
            os.close(descriptor)

    @staticmethod
    def _write(path: str, content: bytes) -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)

    def _claim(self, request: protocol.Start, pid: int) -> bool:
        operation_id, directory = request["operation_id"], request["directory"]
        supervisor = table.read_entry(pid)
        # Its parent is here and has not reaped it: the entry can't be missing nor another's.
        assert supervisor is not None
        claim = records.Claim(
            pid=pid,
            start_ticks=supervisor.start_ticks,
            boot_id=table.boot_id(),
            pid_namespace=table.pid_namespace(),
            is_supervisor=True,
        )
        if not records.take_claim(directory, claim):
            return False
        timeout_s = request["timeout_s"]
        self.running[pid] = Running(
            operation_id=operation_id,
            directory=directory,
            supervisor=supervisor,
            deadline_s=math.inf if timeout_s is None else time.monotonic() + timeout_s,
        )
        return True

    def _tell_started(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.started_read, 65536):
                self.told += piece
        *lines, rest = bytes(self.told).split(b"\n")
        self.told = bytearray(rest)
        for line in lines:
            operation_id, _, pid = line.decode("ascii", "replace").partition(" ")
            if pid.isdigit():
                self._tell({"event": "started", "operation_id": operation_id, "pid": int(pid)})

    # --- ending ---

    def _reap(self) -> None:
        over = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                # A supervisor that stands still records no exit: the call would never end. All else may stand.
                if pid in self.running:
                    table.signal_process(self.running[pid].supervisor, signal.SIGCONT)
                continue
            command = self.running.pop(pid, None)
            if command is not None:
                over.append((command, os.waitstatus_to_exitcode(status)))
        if over:
            # A start told by a process that was reaped just now is in the pipe.
            self._tell_started()
            self._finish(over)

    def _finish(self, over: Sequence[tuple[Running, int]]) -> None:
        """Tell of commands that are over, and begin to end what they left."""
        faults.reach(BEFORE_EXIT)
        targets = [
            Target(operation_id=command.operation_id, supervisor=command.supervisor, is_foreign=False)
            for command, _ in over
        ]
        snapshot = self._snapshot(targets)
        for (command, code), target in zip(over, targets, strict=True):
            leftovers, strangers = target.find(snapshot)
            if command.operation_id not in self.endings and leftovers:
                ending = self.endings[command.operation_id] = Ending(target=target, grace_s=self.grace_s)
                ending.begin(leftovers)
            self._tell(
                {
                    "event": "exited",
                    "operation_id": command.operation_id,
                    "status": code,
                    "stdout_bytes": records.output_bytes(command.directory, records.STDOUT),
                    "stderr_bytes": records.output_bytes(command.directory, records.STDERR),
                    # The sandbox itself may take a moment longer than the command.
                    "leftovers": sum(not entry.is_sandbox for entry in leftovers),
                    "strangers": len(strangers),
                }
            )
        faults.reach(AFTER_EXIT)

    def _snapshot(self, targets: Sequence[Target]) -> Snapshot:
        running = {pid: command.supervisor for pid, command in self.running.items()}
        return take_snapshot(targets, os.getpid(), running)

    def _end(self, request: protocol.End) -> None:
        operation_id = request["operation_id"]
        if request["why"] != "leftovers":
            records.note_ending(request["directory"], request["why"])
        ending = self.endings.get(operation_id)
        if ending is None:
            own = next((c.supervisor for c in self.running.values() if c.operation_id == operation_id), None)
            target = Target(
                operation_id=operation_id,
                supervisor=own or self._find_supervisor(request),
                is_foreign=own is None,
            )
            self._plan_ending(target)
        else:
            self._tell({"event": "ending", "operation_id": operation_id, "leftovers": ending.found})

    def _begin_endings(self) -> None:
        unbegun, self.unbegun = self.unbegun, []
        if not unbegun:
            return
        snapshot = self._snapshot([ending.target for ending in unbegun])
        for ending in unbegun:
            ending.begin(ending.target.find(snapshot)[0])
            operation_id = ending.target.operation_id
            self._tell({"event": "ending", "operation_id": operation_id, "leftovers": ending.found})

    @staticmethod
    def _find_supervisor(request: protocol.End) -> table.ProcessEntry | None:
        supervisor = table.read_entry(request["supervisor_pid"]) if request["supervisor_pid"] else None
        is_same = supervisor is not None and supervisor.start_ticks == request["supervisor_start_ticks"]
        return supervisor if is_same else None

    def _go_on_ending(self) -> None:
        began_s = time.monotonic()
        if began_s < self.next_round_s:
            return
        due = []
        for ending in self.endings.values():
            if ending.next_look_s <= began_s:
                if ending.needs_snapshot():
                    due.append(ending)
                else:
                    ending.wait()
        if not due:
            return
        snapshot = self._snapshot([ending.target for ending in due])
        for ending in due:
            if ending.look(snapshot):
                operation_id = ending.target.operation_id
                del self.endings[operation_id]
                self._tell({"event": "ended", "operation_id": operation_id, "survivors": ending.survivors})
        now_s = time.monotonic()
        # However many there are: most of the time is for starting and reaping.
        self.next_round_s = now_s + PAUSE_FACTOR * (now_s - began_s)


def main() -> None:
    """Set the process up and serve."""
    keep = {0, 1, 2, MANAGER_DESCRIPTOR}
    for name in os.listdir("/proc/self/fd"):
        # What the manager's process left inheritable would else live in every command.
        if int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
    manager = socket.socket(fileno=MANAGER_DESCRIPTOR)
    manager.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        # It ends by losing its manager and its last command, so that no command is left without it.
        signal.signal(number, signal.SIG_IGN)
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    # Not "python3": a command that ends all Python processes by name shall not take its own supervision along.
    library.prctl(PR_SET_NAME, b"ua-launcher", 0, 0, 0)
    os.chdir("/")
    faults.install_from_environment()
    Launcher(manager=manager).run()


if __name__ == "__main__":
    main()
