"""The demo: an agent mends a small project; in the middle two of its three services are killed with SIGKILL.

The model is a script (examples/demo_script.yaml), so that no key and no network is needed. The services, the commands,
the files, the history on disk and the kill are real, and what is claimed at the end is checked first.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from typing import Any, Final

from clients.cli.style import environment_style
from examples.demo_processes import (
    AGENT,
    COORDINATOR,
    ENDING_S,
    MANAGER,
    ROOT,
    STORE,
    DemoError,
    Interrupted,
    Interruption,
    Place,
    Services,
    environment,
    go_on_after_stop,
    kept_terminal,
    set_aside,
    start_run,
)

PROMPT: Final = "A test fails. Find out why, mend it, and draw July as a chart."
SESSION: Final = "demo"
SCRIPT: Final = "examples/demo_script.yaml"

RUNS: Final = 10
KILL_AFTER_RUNS: Final = 5
RUNS_ALONE: Final = 2
"""Runs that the command makes while neither coordinator nor operation manager lives."""

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130

_MAX_WIDTH = 96


def main() -> int:
    """Run the demo and return the exit code."""
    say(
        "unreal-agent runs AI agents so that nothing is lost, whatever dies. Here one mends a small project. The model"
        " is a script: no key, no network. All else is real, also the kill -9 in the middle."
    )
    interruption = Interruption()
    with interruption.noted():
        place = Place.make()
        services = Services(place, interruption)
        try:
            failed_before = run_tests(place) != 0
            code = mend(place, services, interruption)
            services.end()
        except (Interrupted, DemoError) as error:
            interruption.begin_end()
            services.end()
            if isinstance(error, DemoError):
                say(f"The demo failed: {error}. See {place.directory}", mark="!")
                return EXIT_FAILED
            shutil.rmtree(place.directory, ignore_errors=True)
            say("Interrupted: all is ended and removed.")
            return EXIT_INTERRUPTED
        return tell(place, code, failed_before=failed_before)


def mend(place: Place, services: Services, interruption: Interruption) -> int:
    """Let the agent do its job, killing what it needs in the middle; return the exit code of `run`."""
    services.start(STORE, MANAGER, COORDINATOR)
    pids = [f"{name.replace('-', ' ')} {services.pid(name)}" for name in (STORE, MANAGER, COORDINATOR)]
    say(f"Three processes: {', '.join(pids)}")
    arguments = ["run", "--server", place.address, "--session", SESSION, "--script", SCRIPT]
    arguments += ["--workspace", str(place.workspace), "-p", PROMPT]
    show_command(arguments)
    with kept_terminal():
        run = start_run(arguments)
        try:
            wait_for_runs(place, KILL_AFTER_RUNS, run, interruption)
            with set_aside(run):
                dead = services.pid(MANAGER), services.pid(COORDINATOR)
                services.kill(MANAGER, COORDINATOR)
                say("kill -9 {} {}: manager and coordinator are dead; the command runs on".format(*dead), mark="!")
            wait_for_runs(place, len(place.runs()) + RUNS_ALONE, run, interruption)
            services.start(MANAGER, COORDINATOR)
            with set_aside(run):
                say(f"Both are started again: {services.pid(MANAGER)} {services.pid(COORDINATOR)}")
            interruption.wait_until(lambda: has_ended(run), "the agent's job")
        except (Interrupted, DemoError):
            interruption.begin_end()
            end_early(place, services, run, interruption)
            raise
    return run.returncode


def wait_for_runs(place: Place, count: int, run: subprocess.Popen[bytes], interruption: Interruption) -> None:
    """Wait until the long command has made so many runs of the tests."""

    def has_made() -> bool:
        if has_ended(run):
            raise DemoError(f"`run` ended before run {count} of the tests")
        return len(place.runs()) >= count

    interruption.wait_until(has_made, f"run {count} of the tests")


def has_ended(run: subprocess.Popen[bytes]) -> bool:
    """Return whether `run` has ended; one that Ctrl-Z stopped goes on together with the demo."""
    go_on_after_stop(run)
    return run.poll() is not None


def end_early(place: Place, services: Services, run: subprocess.Popen[bytes], interruption: Interruption) -> None:
    """End `run`, and by the services what it had begun: commands outlive both."""
    services.start_dead()
    if not interruption.came_from_keyboard:
        run.terminate()
    try:
        interruption.wait_until(lambda: has_ended(run), "the end of `run`", within_s=ENDING_S)
    except DemoError:
        run.kill()
        run.wait()
    stop = [str(AGENT), "sessions", "stop", SESSION, "--server", place.address]
    stopping = subprocess.Popen(
        stop, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        stopping.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        stopping.kill()
        stopping.wait()


def run_tests(place: Place) -> int:
    """Return the exit code of the project's tests."""
    command = [sys.executable, "-B", "-m", "unittest", "-q"]
    return subprocess.run(command, cwd=place.workspace, env=environment(), capture_output=True).returncode


def tell(place: Place, code: int, *, failed_before: bool) -> int:
    """Check what the demo is about, print it, and return the exit code."""
    state = ["--state-dir", str(place.state)]
    items = records("sessions", "show", SESSION, *state)
    calls = [
        entry["tool_call"]["call_id"]
        for item in items
        for entry in item.get("model_response", {}).get("output", {}).get("items", [])
        if "tool_call" in entry
    ]
    results = [item["tool_call_status"] for item in items if "result" in item.get("tool_call_status", {})]
    commands = [one["operation_id"] for one in records("operations", "list", SESSION, *state) if one["type"] == "bash"]
    shown = [line for result in results for line in text_of(result).splitlines() if line.endswith("all tests pass")]
    claims = {
        "one `run` did the whole job and never ended in between": code == 0,
        f"{len(commands)} commands, each started exactly once": Counter(place.starts()) == Counter(commands),
        f"{len(calls)} tool calls, each with exactly one result in the history": (
            Counter(result["call_id"] for result in results) == Counter(calls)
        ),
        f"all {RUNS} runs of the tests reached the model, none is lost, none came twice": (
            shown == place.runs() == [f"run {number} of {RUNS}: all tests pass" for number in range(1, RUNS + 1)]
        ),
        "a test failed before, all pass now": failed_before and run_tests(place) == 0,
        "the chart is there": (place.workspace / "charts" / "july.png").stat().st_size > 0,
    }
    say("The services are ended too. Checked, in what they kept:")
    style = environment_style(sys.stdout.encoding, is_terminal=sys.stdout.isatty())
    for claim, holds in claims.items():
        mark = style.good(style.marks.good) if holds else style.bad(style.marks.bad)
        print(f"  {mark} {claim}")
    agent = shlex.quote(os.path.relpath(AGENT))
    say("What to type next:")
    print(f"  {agent} sessions show {SESSION} --state-dir {place.state}")
    print(f"  {agent} doctor")
    say("With a model: all in one process, or as services with any number of clients:")
    print(f'  OPENAI_API_KEY=… {agent} run -p "What is in this directory?"')
    print(f"  OPENAI_API_KEY=… {agent} serve all --listen 127.0.0.1:7777")
    print(f'  {agent} run --server 127.0.0.1:7777 -p "What is in this directory?"', flush=True)
    return 0 if all(claims.values()) else EXIT_FAILED


def records(*command: str) -> list[dict[str, Any]]:
    """Return what a command of `unreal-agent` tells to programs."""
    arguments = [str(AGENT), *command, "--output", "jsonl"]
    done = subprocess.run(arguments, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def text_of(status: dict[str, Any]) -> str:
    """Return what the model was shown as a call's result."""
    return "\n".join(part.get("text", {}).get("text", "") for part in status["result"]["parts"])


def say(text: str, mark: str = "#") -> None:
    """Print a paragraph of the demo's own, so that it can be told from the agent's, below an empty line."""
    style = environment_style(sys.stdout.encoding, is_terminal=sys.stdout.isatty())
    emphasise = style.bad if mark == "!" else style.accent
    lines = textwrap.wrap(f"{mark} {text}", width(), subsequent_indent="  ", break_long_words=False)
    # One write, so that what another process writes comes before or after it.
    sys.stdout.write("\n" + "".join(f"{emphasise(line)}\n" for line in lines))
    sys.stdout.flush()


def show_command(arguments: list[str]) -> None:
    """Print a command as it could be typed, folded to the terminal."""
    words = [os.path.relpath(AGENT), *arguments]
    pieces = [" ".join(shlex.quote(word) for word in words[:2])]
    pieces += [f"{flag} {shlex.quote(value)}" for flag, value in zip(words[2::2], words[3::2], strict=True)]
    lines = [f"$ {pieces[0]}"]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) + 3 <= width():
            lines[-1] += f" {piece}"
        else:
            lines[-1] += " \\"
            lines.append(f"    {piece}")
    sys.stdout.write("\n" + "\n".join(lines) + "\n\n")
    sys.stdout.flush()


def width() -> int:
    """Return the cells that a line of the demo's own may take."""
    columns = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else _MAX_WIDTH
    return max(40, min(columns, _MAX_WIDTH))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
