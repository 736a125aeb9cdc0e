"""The demo's processes: three services and the `run` that works with them, how they are killed, how they end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clients.cli.style import environment_style

ROOT: Final = Path(__file__).resolve().parents[1]
AGENT: Final = Path(sys.executable).with_name("unreal-agent")

STORE: Final = "session-store"
MANAGER: Final = "operation-manager"
COORDINATOR: Final = "coordinator"

MAX_WAIT_S: Final = 60.0
POLL_S: Final = 0.02
ENDING_S: Final = 12.0
"""What a process may take to end in order."""

# Read by every bash that runs a command, before the command: an account that the agent has no part in.
_COUNT_STARTS = '[ -z "$BASH_EXECUTION_STRING" ] || echo "$UNREAL_AGENT_OPERATION" >>"${BASH_ENV%/*}/starts"\n'

# The path of a socket has at most 107 bytes.
_MAX_TEMPORARY_BYTES = 50


class Interrupted(Exception):  # noqa: N818  # a person's wish, no error
    """Raised by waiting once Ctrl-C or another signal asked for the end."""


class DemoError(Exception):
    """Raised where the demo can't go on; the text says what to look at."""


class Interruption:
    """Notes the signals that ask for the end, so that nothing is left half done."""

    def __init__(self) -> None:
        """Note nothing yet."""
        self._received: signal.Signals | None = None
        self._is_ending = False

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note signals in the block."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def came_from_keyboard(self) -> bool:
        """True where the whole foreground got it, `run` too."""
        return self._received is signal.SIGINT

    def begin_end(self) -> None:
        """Let waits of the clean-up be."""
        self._is_ending = True

    def wait_until(self, condition: Callable[[], bool], what: str, within_s: float = MAX_WAIT_S) -> None:
        """Wait for something.

        Raises:
            Interrupted: The end was asked for.
            DemoError: It does not happen.
        """
        end_s = time.monotonic() + within_s
        while True:
            # First: what is waited for may have ended by the same Ctrl-C.
            if self._received is not None and not self._is_ending:
                raise Interrupted
            if condition():
                return
            if time.monotonic() > end_s:
                raise DemoError(f"{what} takes too long")
            time.sleep(POLL_S)

    def _note(self, number: int, _frame: object) -> None:
        self._received = signal.Signals(number)


@dataclass(frozen=True)
class Place:
    """Where the demo happens: a new directory."""

    directory: Path

    @staticmethod
    def make() -> Place:
        """Return a place with the project in it, as it is before the agent came."""
        is_short = len(os.fsencode(tempfile.gettempdir())) <= _MAX_TEMPORARY_BYTES
        place = Place(Path(tempfile.mkdtemp(prefix="agent-demo-", dir=None if is_short else "/tmp")))
        shutil.copytree(ROOT / "examples" / "weather", place.workspace, ignore=shutil.ignore_patterns("__pycache__"))
        place.logs.mkdir()
        place.count_starts.write_text(_COUNT_STARTS)
        return place

    @property
    def workspace(self) -> Path:
        return self.directory / "weather"

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def count_starts(self) -> Path:
        return self.logs / "count-starts.sh"

    @property
    def address(self) -> str:
        """The coordinator's."""
        return f"unix:{self.state / 'coordinator.sock'}"

    def starts(self) -> list[str]:
        """Return the operation of each start of a command."""
        return _text(self.logs / "starts").split()

    def runs(self) -> list[str]:
        """Return what the long command has done."""
        return _text(self.workspace / "runs.log").splitlines()


@dataclass
class Services:
    """Session store, operation manager and coordinator, each a process of its own."""

    place: Place
    interruption: Interruption
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        """Start services together and return once each of them listens."""
        ends = {name: len(self._log(name)) for name in names}
        for name in names:
            with (self.place.logs / f"{name}.log").open("ab") as log:
                # A session of its own: Ctrl-C is for `run`, whose stop the services then carry out.
                self._processes[name] = subprocess.Popen(
                    [str(AGENT), "serve", name, "--state-dir", self.place.state, *self._flags(name)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment(),
                    start_new_session=True,
                )
        for name in names:
            self.interruption.wait_until(lambda name=name: self._listens(name, ends[name]), f"the start of {name}")  # type: ignore[misc]

    def start_dead(self) -> None:
        """Start those that were killed and not started again."""
        self.start(*(name for name, process in self._processes.items() if process.poll() is not None))

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def kill(self, *names: str) -> None:
        """End services as a power cut would."""
        for name in names:
            self._processes[name].kill()
        for name in names:
            self._processes[name].wait()

    def end(self) -> None:
        """End what runs, in order: each before those that it uses."""
        for name in reversed(self._processes):
            end(self._processes[name], signal.SIGTERM)

    def _flags(self, name: str) -> list[str]:
        counted = ["--command-environment", f"BASH_ENV={self.place.count_starts}"]
        # Long enough for the tests of the project on a slow machine: the script counts on their result.
        patient = ["--grace-seconds", "2.5"]
        return ["--log-level", "warning", *(counted if name == MANAGER else patient if name == COORDINATOR else ())]

    def _listens(self, name: str, since: int) -> bool:
        if self._processes[name].poll() is not None:
            raise DemoError(f"{name} ended instead of listening: {self._log(name)[since:]}")
        return " listens on " in self._log(name)[since:]

    def _log(self, name: str) -> str:
        return _text(self.place.logs / f"{name}.log")


def start_run(arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start `unreal-agent` as it would be typed here; it writes to this terminal and reads from it."""
    stdin = None if sys.stdin.isatty() else subprocess.DEVNULL
    return subprocess.Popen([os.path.relpath(AGENT), *arguments], env=own_environment(), stdin=stdin)


@contextlib.contextmanager
def set_aside(run: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let what `run` draws give way to lines of the demo's own in the block, as Ctrl-Z and `fg` would."""
    if not is_live():
        yield
        return
    run.send_signal(signal.SIGTSTP)
    end_s = time.monotonic() + 1.0
    while not _is_stopped(run) and run.poll() is None and time.monotonic() < end_s:
        time.sleep(0.001)
    try:
        yield
    finally:
        run.send_signal(signal.SIGCONT)


def go_on_after_stop(run: subprocess.Popen[bytes]) -> None:
    """Let `run` go on where Ctrl-Z stopped it and not the demo: nobody else will."""
    if _is_stopped(run):
        run.send_signal(signal.SIGCONT)


def end(process: subprocess.Popen[bytes], number: signal.Signals, within_s: float = ENDING_S) -> None:
    """End a process, by force where it takes too long."""
    process.send_signal(number)
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def kept_terminal() -> Iterator[None]:
    """Put the terminal right afterwards, whatever became of what drew on it."""
    saved = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    try:
        yield
    finally:
        if saved is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)
        if is_live():
            # Cursor on, bracketed paste and synchronised update off.
            sys.stdout.write("\x1b[?25h\x1b[?2004l\x1b[?2026l")
            sys.stdout.flush()


def is_live() -> bool:
    """Return whether `run` draws on a terminal."""
    return environment_style(sys.stdout.encoding, is_terminal=sys.stdout.isatty()).has_escapes


def environment() -> dict[str, str]:
    """Return what services are started with: this Python, which has Pillow, is their commands' python3."""
    return own_environment() | {"PATH": f"{AGENT.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def own_environment() -> dict[str, str]:
    """Return the environment without what a person has set up for agents: the demo needs, and uses, none of it."""
    return {name: value for name, value in os.environ.items() if not name.startswith("UNREAL_AGENT_")}


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _text(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""
