"""`unreal-agent run` on a real terminal: what stands on it, what is typed into it, and how it is given back."""

from __future__ import annotations

import contextlib
import re
import signal
import sqlite3
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from tests.support.cli import Cli, bash
from tests.support.eventually import eventually
from tests.support.screen import Screen
from unreal_agent.session.v1 import session_pb2

WAIT_FOR_GO = "echo begun >> log; while [ ! -e go ]; do sleep 0.05; done; echo ended >> log; echo result"


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


class Terminal:
    """A command on a terminal, and the screen of it."""

    def __init__(self, cli: Cli, *arguments: str, columns: int = 80, rows: int = 24, has_shell: bool = False) -> None:
        self.screen = Screen(rows=rows, columns=columns, may_wrap=True)
        self.child = cli.on_terminal(*arguments, columns=columns, rows=rows, has_shell=has_shell)

    def wait_for(self, pattern: str, within_s: float = 15.0) -> None:
        """Read on until the screen shows something."""
        end_s = time.monotonic() + within_s
        while not re.search(pattern, self.text):
            assert time.monotonic() < end_s, f"not shown: {pattern}\n{self.text}"
            self.read()

    def wait_for_end(self) -> int:
        """Read to the end and return the exit code."""
        while self.read():
            pass
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else -int(self.child.signalstatus or 0)

    @property
    def text(self) -> str:
        return "\n".join(self.screen.lines)

    def has_echo_and_lines(self) -> bool:
        """Return whether the terminal is as a shell expects it."""
        flags = int(termios.tcgetattr(self.child.child_fd)[3])
        return bool(flags & termios.ECHO) and bool(flags & termios.ICANON)

    def read(self) -> bool:
        """Take in what was written; return False at the end."""
        try:
            self.screen.write(self.child.read_nonblocking(65536, timeout=0.2))
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        return True


@pytest.fixture
def terminals(cli: Cli) -> Iterator[list[Terminal]]:
    """Terminals that a test opened; what still runs in them is ended."""
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.child.close(force=True)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_run_leaves_the_same_on_the_screen_as_plain_lines(cli: Cli, terminals: list[Terminal], columns: int) -> None:
    script = cli.script(
        [{"text": "I look.", "tool_calls": [bash("seq 20"), bash("sleep 0.3; exit 1")]}, {"text": "Done."}]
    )
    terminal = Terminal(cli, "run", "-p", "Look.", "--session", "s1", "--script", script, columns=columns)
    terminals.append(terminal)
    assert terminal.wait_for_end() == 0
    lines = [line.strip() for line in terminal.screen.lines if line.strip()]
    assert [line.split("  ")[0] for line in lines[1:11]] == [
        "› Look.",
        "I look.",
        "✓ $ seq 20",
        "│ … 16 lines above",
        "│ 17",
        "│ 18",
        "│ 19",
        "│ 20",
        "✗ $ sleep 0.3; exit 1",
        "Done.",
    ]
    assert lines[11].startswith("done · 2 turns · ")
    assert "run --session s1 -p '…'" in "".join(lines[12:])


def test_running_calls_are_shown_with_time_and_output(cli: Cli, terminals: list[Terminal]) -> None:
    script = cli.script(
        [{"tool_calls": [bash(f"echo some output; {WAIT_FOR_GO}"), bash(WAIT_FOR_GO)]}, {"text": "Done."}]
    )
    terminal = Terminal(cli, "run", "-p", "x", "--session", "s1", "--script", script)
    terminals.append(terminal)
    terminal.wait_for(r"some output\n")
    terminal.wait_for(r"\$ echo some output.* 1\.\d s")
    terminal.wait_for(r"type to steer, Ctrl-C stops|Ctrl-C stops")
    (cli.workspace / "go").touch()
    assert terminal.wait_for_end() == 0
    assert "type to steer" not in terminal.text


def test_a_line_that_is_typed_steers(cli: Cli, terminals: list[Terminal]) -> None:
    script = cli.script(
        [{"tool_calls": [bash(WAIT_FOR_GO)]}, {"expect": "use tabs", "text": "With tabs, then."}, {"text": "Done."}]
    )
    terminal = Terminal(cli, "run", "-p", "x", "--session", "s1", "--script", script)
    terminals.append(terminal)
    terminal.wait_for(r"\$ echo begun")
    terminal.child.send("use tavs\x7f\x7fbs")
    terminal.wait_for(r"› use tabs$")
    terminal.child.send("\r")
    terminal.wait_for(r"With tabs, then\.")
    (cli.workspace / "go").touch()
    assert terminal.wait_for_end() == 0
    items = cli.run("sessions", "show", "s1", "--output", "jsonl").items
    said = [
        item["input"]["content"]["parts"][0]["text"]["text"] for item in items if "content" in item.get("input", {})
    ]
    assert said == ["x", "use tabs"]


def test_a_line_that_was_not_sent_is_told(cli: Cli, terminals: list[Terminal]) -> None:
    script = cli.script([{"tool_calls": [bash(WAIT_FOR_GO)]}, {"text": "Done."}])
    terminal = Terminal(cli, "run", "-p", "x", "--session", "s1", "--script", script)
    terminals.append(terminal)
    terminal.wait_for(r"\$ echo begun")
    terminal.child.send("half a line")
    terminal.wait_for(r"› half a line$")
    (cli.workspace / "go").touch()
    assert terminal.wait_for_end() == 0
    assert "not sent, the run is over: half a line" in terminal.text


async def test_a_line_that_comes_too_late_is_not_left_unanswered(cli: Cli, terminals: list[Terminal]) -> None:
    script = cli.script([{"tool_calls": [bash(WAIT_FOR_GO)]}, {"text": "word " * 30_000}])
    terminal = Terminal(cli, "run", "-p", "x", "--session", "s1", "--script", script)
    terminals.append(terminal)
    terminal.wait_for(r"\$ echo begun")
    (cli.workspace / "go").touch()
    # Nobody reads, so the last of the output waits; the session comes to rest all the same.
    with contextlib.closing(sqlite3.connect(cli.state / "sessions.db")) as store:
        state = "SELECT session_state FROM sessions"
        await eventually(lambda: store.execute(state).fetchone() == (session_pb2.SESSION_STATE_IDLE,), within_s=10)
    terminal.child.send("late\r")
    assert "late" in terminal.child.read()
    (session,) = cli.run("sessions", "list", "--output", "jsonl").items
    assert session["rest"]["session_state"] == "SESSION_STATE_IDLE"


def test_an_interrupt_stops_everything_and_names_the_resume(cli: Cli, terminals: list[Terminal]) -> None:
    command = "trap 'echo told >> log' TERM; echo begun >> log; sleep 60 & wait; echo late >> log"
    script = cli.script([{"tool_calls": [bash(command)]}, {"expect": "Go on", "text": "Done."}])
    terminal = Terminal(cli, "run", "-p", "x", "--session", "s1", "--script", script)
    terminals.append(terminal)
    terminal.wait_for(r"\$ trap")
    terminal.child.send("\x03")
    assert terminal.wait_for_end() == 130
    assert "cancelled" in terminal.text
    assert "unreal-agent: interrupted. Resume: " in terminal.text
    assert "run --session s1" in terminal.text.replace("\n", "")
    assert cli.run("operations", "list", "s1", "--unsettled").stdout == "No operation runs.\n"
    assert "Done." in cli.run("run", "--session", "s1").stdout


def test_a_second_interrupt_leaves_at_once_and_the_command_runs_on(cli: Cli, terminals: list[Terminal]) -> None:
    # It does not end when asked to, so that the first interrupt has to wait for it.
    command = f"trap '' TERM; {WAIT_FOR_GO}"
    script = cli.script([{"tool_calls": [bash(command)]}, {"text": "Done."}])
    terminal = Terminal(cli, "run", "-p", "x", "--session", "s1", "--script", script)
    terminals.append(terminal)
    terminal.wait_for(r"\$ trap.*\d s")
    terminal.child.send("\x03")
    terminal.wait_for("stopping; Ctrl-C again leaves at once")
    begin_s = time.monotonic()
    terminal.child.send("\x03")
    assert terminal.wait_for_end() == 130
    assert time.monotonic() - begin_s < 2
    assert "Resume: " in terminal.text
    # The stop that was asked for is finished first, then the session goes on; nothing ran twice.
    resumed = cli.run("run", "--session", "s1")
    assert resumed.code == 0
    assert "Done." in resumed.stdout
    assert (cli.workspace / "log").read_text() == "begun\n"


def test_the_terminal_is_given_back(cli: Cli, terminals: list[Terminal]) -> None:
    script = cli.script([{"tool_calls": [bash(WAIT_FOR_GO)]}, {"text": "Done."}])
    for end in ("finish", "term", "interrupts"):
        (cli.workspace / "go").unlink(missing_ok=True)
        terminal = Terminal(cli, "run", "-p", "x", "--session", f"s-{end}", "--script", script)
        terminals.append(terminal)
        terminal.wait_for(r"\$ echo begun")
        assert not terminal.has_echo_and_lines()
        if end == "finish":
            (cli.workspace / "go").touch()
        elif end == "term":
            terminal.child.kill(signal.SIGTERM)
        else:
            terminal.child.send("\x03\x03")
        while terminal.child.isalive():
            terminal.read()
        assert terminal.has_echo_and_lines()
        (cli.workspace / "go").touch()


def test_a_stopped_terminal_job_goes_on_where_it_was(cli: Cli, terminals: list[Terminal]) -> None:
    script = cli.script([{"tool_calls": [bash(WAIT_FOR_GO)]}, {"text": "Done."}])
    terminal = Terminal(cli, "run", "-p", "x", "--session", "s1", "--script", script)
    terminals.append(terminal)
    terminal.wait_for(r"\$ echo begun")
    terminal.child.kill(signal.SIGSTOP)
    terminal.child.kill(signal.SIGCONT)
    (cli.workspace / "go").touch()
    assert terminal.wait_for_end() == 0
    assert "Done." in terminal.text


def test_ctrl_z_leaves_a_clean_screen_and_fg_draws_it_again(cli: Cli, terminals: list[Terminal]) -> None:
    script = cli.script([{"tool_calls": [bash(WAIT_FOR_GO)]}, {"text": "Done."}])
    terminal = Terminal(cli, "run", "-p", "x", "--session", "s1", "--script", script, has_shell=True)
    terminals.append(terminal)
    terminal.wait_for(r"\$ echo begun")
    terminal.child.send("\x1a")
    terminal.wait_for(r"Stopped")
    assert "$ echo begun" not in terminal.text
    assert "Ctrl-C stops" not in terminal.text
    terminal.child.send("fg\n")
    terminal.wait_for(r"\$ echo begun")
    (cli.workspace / "go").touch()
    terminal.wait_for(r"go on: ")
    terminal.child.send("exit\n")
    assert terminal.wait_for_end() == 0
    for part in ("$ echo begun", "Done."):
        assert terminal.text.count(part) == 1
    assert "Ctrl-C stops" not in terminal.text


def test_ctrl_z_without_a_shell_does_not_freeze_the_run(cli: Cli, terminals: list[Terminal]) -> None:
    script = cli.script([{"tool_calls": [bash(WAIT_FOR_GO)]}, {"text": "Done."}])
    terminal = Terminal(cli, "run", "-p", "x", "--session", "s1", "--script", script)
    terminals.append(terminal)
    terminal.wait_for(r"\$ echo begun")
    terminal.child.send("\x1a")
    (cli.workspace / "go").touch()
    assert terminal.wait_for_end() == 0
    assert "Done." in terminal.text


def test_a_dumb_terminal_gets_plain_lines(cli: Cli, terminals: list[Terminal]) -> None:
    cli.extra["TERM"] = "dumb"
    terminal = Terminal(cli, "run", "-p", "x", "--session", "s1", "--script", cli.script([{"text": "Done."}]))
    terminals.append(terminal)
    written = ""
    with pytest.raises(pexpect.EOF):
        while True:
            written += terminal.child.read_nonblocking(65536, timeout=15)
    assert "\x1b" not in written
    assert "Done." in written


@pytest.mark.parametrize("columns", [40, 100])
def test_the_context_is_drawn_to_the_width_of_the_terminal(cli: Cli, columns: int) -> None:
    script = cli.script([{"text": "I look.", "tool_calls": [bash("seq 2000")]}, {"text": "Done."}])
    assert cli.run("run", "-p", "Look.", "--session", "s1", "--script", script).code == 0
    terminal = Terminal(cli, "sessions", "context", "s1", columns=columns)
    assert terminal.wait_for_end() == 0
    (bar,) = [line for line in terminal.screen.lines if line.startswith("[P")]
    assert len(bar) == min(columns, 74)
    assert re.fullmatch(r"\[P+Y+M+R+\]", bar), "the model's window is not known: what is sent is the whole"
    assert any(re.match(r"  R results +[0-9,]+ +[0-9.]+ %", line) for line in terminal.screen.lines)
