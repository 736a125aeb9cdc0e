"""The demo: an agent repairs a small project; in the middle it is killed with SIGKILL and goes on in a new process.

The model is a script (examples/demo_script.yaml), so that no key and no network is needed. The commands, the files, the
history on disk and the kill are real, and what is claimed at the end is checked first.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
AGENT = Path(sys.executable).with_name("unreal-agent")
PROMPT = "A test fails. Find out why, mend it, and draw the temperatures of July as a chart."
SESSION = "demo"

KILL_AFTER_RUNS = 5
RUNS_ON = 2
"""Runs that the command makes on its own, while no agent lives."""

MAX_WAIT_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where the demo happens: a new directory, which stays to be looked at."""

    directory: Path

    @property
    def workspace(self) -> Path:
        return self.directory / "weather"

    @property
    def state(self) -> Path:
        return self.directory / "state"

    def completed_runs(self) -> int:
        return self._log().count("all tests pass")

    def starts(self) -> int:
        return self._log().count("started")

    def _log(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.workspace / "runs.log").read_text()
        return ""


def main() -> int:
    """Run the demo and return the exit code."""
    place = Place(Path(tempfile.mkdtemp(prefix="agent-demo-")))
    shutil.copytree(EXAMPLES / "weather", place.workspace, ignore=shutil.ignore_patterns("__pycache__"))
    say("unreal-agent runs AI agents so that nothing is lost, whatever dies. Here one mends a")
    say("small project. The model is a script: no key, no network. All else is real, also the")
    say("kill -9 in the middle.")
    failed_before = run_tests(place) != 0

    arguments = ["run", "-p", PROMPT, "--session", SESSION, "--script", str(EXAMPLES / "demo_script.yaml")]
    with kept_terminal():
        first = start(place, [*arguments, "--workspace", str(place.workspace)])
        wait_for_runs(place, KILL_AFTER_RUNS, first)
        first.send_signal(signal.SIGKILL)
        first.wait()
    runs_at_kill = place.completed_runs()
    print()
    say(f"kill -9 {first.pid}: the agent is dead, in the middle of a command. The command runs on:", mark="!")
    wait_for_runs(place, runs_at_kill + RUNS_ON, None)
    for line in (place.workspace / "runs.log").read_text().splitlines()[-RUNS_ON:]:
        print(f"    {line}", flush=True)
    say("The same session, in a new process:")
    with kept_terminal():
        code = start(place, ["run", "--session", SESSION]).wait()
    return tell(place, code, failed_before=failed_before)


def say(text: str, mark: str = "#") -> None:
    """Print a line of the demo's own, so that it can be told from the agent's."""
    line = f"{mark} {text}"
    print(f"\x1b[36m{line}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else line, flush=True)


def start(place: Place, arguments: list[str]) -> subprocess.Popen[bytes]:
    """Start an agent in a process of its own; it writes to this terminal."""
    command = [os.path.relpath(AGENT), *arguments, "--state-dir", str(place.state)]
    shown = " ".join(f"'{word}'" if " " in word else word for word in command)
    print(f"\n$ {shown.replace(str(EXAMPLES.parent) + '/', '')}\n", flush=True)
    return subprocess.Popen(command, env=environment(), stdin=None if sys.stdin.isatty() else subprocess.DEVNULL)


def environment() -> dict[str, str]:
    """Return what agents are started with: this Python, which has Pillow, as python3."""
    return {
        **os.environ,
        "PATH": f"{AGENT.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def wait_for_runs(place: Place, count: int, agent: subprocess.Popen[bytes] | None) -> None:
    """Wait until the long command has made so many runs."""
    end = time.monotonic() + MAX_WAIT_S
    while place.completed_runs() < count:
        if (agent is not None and agent.poll() is not None) or time.monotonic() > end:
            raise SystemExit(f"the demo did not get to run {count}: see the output above, and {place.directory}")
        time.sleep(0.05)


@contextlib.contextmanager
def kept_terminal() -> Iterator[None]:
    """Put the terminal right afterwards: what is killed can't do it."""
    saved = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    try:
        yield
    finally:
        if saved is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)
        if sys.stdout.isatty():
            # Cursor on, bracketed paste and synchronised update off, the empty input line gone.
            sys.stdout.write("\x1b[?25h\x1b[?2004l\x1b[?2026l\r\x1b[K")
            sys.stdout.flush()


def run_tests(place: Place) -> int:
    """Return the exit code of the project's tests."""
    command = [sys.executable, "-m", "unittest", "-q"]
    return subprocess.run(command, cwd=place.workspace, env=environment(), capture_output=True).returncode


def tell(place: Place, code: int, *, failed_before: bool) -> int:
    """Check what the demo is about, print it, and return the exit code."""
    show = [str(AGENT), "sessions", "show", SESSION, "--state-dir", str(place.state)]
    output = subprocess.run(
        [*show, "--output", "jsonl"], env=environment(), capture_output=True, text=True, check=True
    ).stdout
    items = [json.loads(line) for line in output.splitlines()]
    calls = [
        entry["tool_call"]["call_id"]
        for item in items
        for entry in item.get("model_response", {}).get("output", {}).get("items", [])
        if "tool_call" in entry
    ]
    ends = Counter(
        item["tool_call_status"]["call_id"] for item in items if "result" in item.get("tool_call_status", {})
    )
    claims = {
        "the agent finished its job": code == 0,
        "a test failed before, all pass now": failed_before and run_tests(place) == 0,
        f"the command that was running at the kill started {times(place.starts())} and ran to its end": (
            place.starts() == 1 and place.completed_runs() == 10
        ),
        f"{len(calls)} tool calls, each with exactly one result in the history": ends == Counter(calls),
        "the chart is there": (place.workspace / "charts" / "july.png").stat().st_size > 0,
    }
    print()
    say("Checked:")
    for claim, holds in claims.items():
        print(f"  {'✓' if holds else '✗'} {claim}")
    agent = os.path.relpath(AGENT)
    print()
    say("What to type next:")
    print(f"  {agent} sessions show {SESSION} --state-dir {place.state}")
    print(f"  {agent} doctor")
    print(f'  OPENAI_API_KEY=… {agent} run -p "What is in this directory?"')
    return 0 if all(claims.values()) else 1


def times(count: int) -> str:
    """Return "once", "2 times"."""
    return "once" if count == 1 else f"{count} times"


if __name__ == "__main__":
    sys.exit(main())
