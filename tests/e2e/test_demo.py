"""`make demo` on a machine with no key and no network: it does what it says, and shows it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.demo import COMMAND, ROOT, Demo, environment, run_demo
from tests.support.screen import Screen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

CLAIMS = [
    "one `run` did the whole job and never ended in between",
    "5 commands, each started exactly once",
    "7 tool calls, each with exactly one result in the history",
    "all 10 runs of the tests reached the model, none is lost, none came twice",
    "a test failed before, all pass now",
    "the chart is there",
]

WIDTHS = (80, 120)


@pytest.fixture(scope="module")
def demo() -> Demo:
    return run_demo()


def screen_of(demo: Demo, columns: int) -> str:
    screen = Screen(rows=50, columns=columns, may_wrap=True)
    screen.write(demo.terminals[columns])
    return "\n".join(screen.lines)


def test_every_claim_holds(demo: Demo) -> None:
    assert demo.codes == [0, 0, 0]
    for text in (demo.plain, *(screen_of(demo, columns) for columns in WIDTHS)):
        assert re.findall(r"^  ([✓✗]) (.*[a-z])$", text.partition("Checked, in what they kept:")[2], re.MULTILINE) == [
            ("✓", claim) for claim in CLAIMS
        ]


def test_it_kills_two_processes_and_the_command_runs_on(demo: Demo) -> None:
    started = re.search(
        r"# Three processes: session store \d+, operation manager (\d+), coordinator\s+(\d+)", demo.plain
    )
    assert started is not None
    before, kill, after = demo.plain.partition(f"! kill -9 {started[1]} {started[2]}: ")
    assert kill
    assert "run 10 of 10" not in before
    again = re.search(r"# Both are started again: (\d+) (\d+)$", after, re.MULTILINE)
    assert again is not None
    assert not {*again.groups()} & {*started.groups()}
    assert "the process that ran this session died; going on from its records" in after
    assert after.count("run 10 of 10: all tests pass") == 1


def test_it_shows_the_tests_fail_and_the_change(demo: Demo) -> None:
    assert re.search(r"✗ \$ python3 -m unittest .*exit 1", demo.plain)
    assert "│ FAILED (failures=1)" in demo.plain
    assert "│ +    half = len(ordered) // 2" in demo.plain
    assert "✓ read skill charts" in demo.plain
    assert "│ PNG 640×360" in demo.plain


def test_it_ends_with_what_to_type_next(demo: Demo) -> None:
    following = demo.plain.partition("# What to type next:\n")[2]
    assert "unreal-agent sessions show demo --state-dir " in following
    assert re.search(r"OPENAI_API_KEY=… \S*unreal-agent run -p ", following)
    assert re.search(
        r"unreal-agent serve all --listen 127.0.0.1:(\d+)\n  \S*unreal-agent run --server 127.0.0.1:\1 ", following
    )


def test_it_is_neither_over_at_once_nor_long(demo: Demo) -> None:
    assert 10 < demo.elapsed_s < 70


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_terminal_shows_everything_once_and_nothing_torn(demo: Demo, columns: int) -> None:
    text = screen_of(demo, columns)
    parts = [
        "› A test fails.",
        "✗ $ python3 -m unittest",
        "! kill -9",
        "# Both are started again",
        "Done. `median` is right",
    ]
    for part in (*parts, "# run the tests ten times", "read skill charts", "look at charts/july.png", "Checked, in"):
        assert text.count(part) == 1, part
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    assert "connection lost" not in text, "what is drawn in passing must not stay"
    assert "Ctrl-C stops" not in text


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_live_output_goes_on_behind_the_break(demo: Demo, columns: int) -> None:
    """Rows of the live region, which the final result replaces."""
    after = demo.terminals[columns].partition("# Both are started again")[2].partition("✓")[0]
    assert re.search(r"│ run (6|7|8|9|10) of 10", after)


@pytest.fixture
def running() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=ROOT, env=environment(), start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("moment", ["# Three processes", "Mended. ", "! kill -9"])
def test_ctrl_c_ends_and_removes_everything(running: subprocess.Popen[bytes], moment: str) -> None:
    assert running.stdout is not None
    said = ""
    while moment not in said:
        line = running.stdout.readline().decode()
        assert line, said
        said += line
    os.killpg(running.pid, signal.SIGINT)  # the keyboard's reaches the whole foreground
    said += running.stdout.read().decode()
    assert running.wait() == 130
    assert said.endswith("\n# Interrupted: all is ended and removed.\n")
    directories = set(re.findall(r"/\S*/agent-demo-\w+", said))
    assert not [path for path in directories if Path(path).exists()]
    for directory in directories:
        assert not processes_that_name(directory)


def processes_that_name(directory: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if directory.encode() in (path / "cmdline").read_bytes() or os.readlink(path / "cwd").startswith(directory):
                found.append(path.name)
    return found


def test_it_leaves_the_project_as_it_was(demo: Demo) -> None:
    text = (ROOT / "examples" / "weather" / "weather" / "readings.py").read_text()
    assert "return ordered[len(ordered) // 2]" in text
    assert not (ROOT / "examples" / "weather" / "charts").exists()
