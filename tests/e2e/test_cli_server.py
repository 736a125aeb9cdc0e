"""Commands as clients of a server: named by an option or the environment, or found to serve the state directory."""

from __future__ import annotations

import functools
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.cli import Cli, bash
from tests.support.eventually import eventually

QUICK = ("--grace-seconds", "0.3")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close what a test enters."""
    with ExitStack() as entered:
        yield entered


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@contextmanager
def serving(cli: Cli, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `serve all`, from when the coordinator listens to the end of the block."""
    with cli.start("serve", "all", *QUICK, *flags) as server:
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, b"")
            assert any(line.startswith(b"coordinator listens on ") for line in lines), "it does not begin"
            yield server
        finally:
            server.terminate()
            server.communicate(timeout=20)


def test_a_second_run_is_a_client_of_the_first_that_serves(cli: Cli) -> None:
    script = cli.script(
        [{"text": "I look.", "tool_calls": [bash("echo one")]}, {"expect": "one", "text": "Done."}, {"text": "More."}]
    )
    with serving(cli) as server:
        done = cli.run("run", "-p", "Look around.", "--script", script, "--session", "s1")
        assert (done.code, done.stderr) == (0, "")
        assert "✓ $ echo one" in done.stdout
        assert f"scripted · {cli.workspace}" in done.stdout
        again = cli.run("run", "-p", "more", "--session", "s1", "--output", "jsonl")
        assert (again.code, again.stderr) == (0, "")
        assert again.items[-1]["model_response"]["output"]["items"][0]["message"]["text"] == "More."
        shown = cli.run("sessions", "show", "s1", "--output", "jsonl").items
        assert "coordinator, release" in cli.run("doctor").stdout
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=15) == 0
    assert cli.run("sessions", "show", "s1", "--output", "jsonl").items == shown


@pytest.mark.parametrize("way", ["option", "environment"])
def test_a_server_elsewhere_is_named(cli: Cli, tmp_path: Path, stack: ExitStack, way: str) -> None:
    elsewhere = Cli(_made(tmp_path / "elsewhere"))
    sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="cli-"))  # a socket's path is short
    address = f"unix:{sockets}/coordinator.sock"
    with serving(elsewhere, "--listen", address):
        options = ("--server", address) if way == "option" else ()
        if way == "environment":
            cli.extra["UNREAL_AGENT_SERVER"] = address
        done = cli.run("run", "-p", "x", "--session", "s1", "--script", cli.script([{"text": "Hello."}]), *options)
        assert (done.code, done.stderr) == (0, "")
        assert done.stdout.rstrip().endswith(f"--session s1{' --server ' + address if options else ''} -p '…'")
        assert "M the model's words" in cli.run("sessions", "context", "s1", *options).stdout
        assert "s1" in cli.run("sessions", "list", *options).stdout
        told = cli.run("doctor", *options)
        assert "Bash, ViewImage, SkillUse" in told.stdout
        assert f"{address}: coordinator" in told.stdout
        assert cli.run("input", "s1", "hello", *options).stdout.splitlines()[1].startswith("see the answer: ")
        assert not cli.state.exists()


def test_of_several_managers_one_must_be_named(cli: Cli) -> None:
    manager = f"local=unix:{cli.state}/operation-manager.sock"
    with serving(cli, "--manager", manager, "--manager", "sandbox=attached"):
        job = ("run", "-p", "x", "--session", "s1", "--script", cli.script([{"text": "Hello."}]))
        unnamed = cli.run(*job)
        assert (unnamed.code, unnamed.stderr.count("\n")) == (1, 1)
        assert "none is named: local, sandbox. Name one: unreal-agent run --manager NAME." in unnamed.stderr
        named = cli.run(*job, "--manager", "local")
        assert (named.code, named.stderr) == (0, "")
        assert cli.run(*job, "--manager", "local").code == 0
        other = cli.run(*job, "--manager", "sandbox")
        assert other.code == 1
        assert "stays with its operation manager (s1: local)" in other.stderr


def test_every_command_works_with_a_server(cli: Cli) -> None:
    script = cli.script([{"tool_calls": [bash("echo out; echo err >&2; sleep 60")]}, {"text": "Cancelled."}])
    with serving(cli), cli.start("run", "-p", "x", "--session", "s1", "--script", script) as running:
        operation = _running_operation(cli)
        assert cli.run("operations", "show", "s1", operation).code == 0
        assert cli.run("operations", "output", "s1", operation).stdout == "out\n"
        assert cli.run("operations", "output", "s1", operation, "--stderr", "--tail", "2").stdout == "r\n"
        assert "canceled" in cli.run("operations", "cancel", "s1", operation).stdout
        assert running.wait(timeout=20) == 0
        assert cli.run("sessions", "stop", "s1").stdout == "session s1 is stopped\n"
        assert "Cancelled." in cli.run("sessions", "watch", "s1").stdout
        assert "digest" in cli.run("sessions", "context", "s1").stdout
        assert cli.run("sessions", "fork", "s1", "--as", "s2").stdout.startswith("session s2, forked from s1")
        path = str(cli.directory / "export.jsonl")
        assert cli.run("sessions", "export", "s1", "--to", path).code == 0
        assert cli.run("sessions", "import", path, "--as", "s3").stdout.startswith("session s3, ")
        assert cli.run("sessions", "delete", "s2").stdout.startswith("session s2 is deleted")
        listed = cli.run("sessions", "list", "--output", "jsonl").items
        assert [session["session_id"] for session in listed] == ["s1", "s3"]


async def test_ctrl_c_stops_a_session_that_a_server_runs(cli: Cli) -> None:
    script = cli.script([{"tool_calls": [bash("touch begun; sleep 60")]}, {"text": "Went on."}])
    with serving(cli), cli.start("run", "-p", "x", "--session", "s1", "--script", script) as running:
        await eventually(lambda: (cli.workspace / "begun").exists(), within_s=15)
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=20)
        assert running.returncode == 130
        assert b"--session s1" in told
        assert "stopped" in cli.run("sessions", "list").stdout
        done = cli.run("run", "--session", "s1")
        assert done.code == 0
        assert "Went on." in done.stdout


async def test_a_run_outlives_the_death_of_every_service(cli: Cli) -> None:
    waits = "while [ ! -e go ]; do sleep 0.05; done; echo went"
    script = cli.script([{"tool_calls": [bash(waits)]}, {"expect": "went", "text": "Done."}])
    with serving(cli), cli.start("run", "-p", "x", "--session", "s1", "--script", script, "-o", "jsonl") as running:
        _running_operation(cli)
        for name in ("session_store", "operation_manager", "coordinator"):
            (pid,) = _pids_of(cli, f"services.{name}")
            subprocess.run(["kill", "-9", str(pid)], check=True)
            await eventually(functools.partial(_other_pids, cli, f"services.{name}", pid))
        (cli.workspace / "go").touch()
        output, complaint = running.communicate(timeout=25)
        assert (running.returncode, complaint) == (0, b"")
        shown = cli.run("sessions", "show", "s1", "--output", "jsonl")
        assert output.decode() == shown.stdout
        sequences = [int(item["sequence"]) for item in shown.items]
        assert sequences == list(range(1, len(sequences) + 1))


def test_nobody_at_an_address_is_one_line(cli: Cli) -> None:
    for address, words in (("unix:/nowhere/x.sock", "no coordinator answers"), ("nonsense", "host:port")):
        done = cli.run("sessions", "list", "--server", address)
        assert done.stderr.count("\n") == 1
        assert words in done.stderr
        assert address in done.stderr
        assert done.code in (1, 2)


def test_a_directory_that_is_served_is_served_once(cli: Cli) -> None:
    with serving(cli) as server:
        second = cli.run("serve", "all")
        assert second.code == 1
        assert f"pid {server.pid}" in second.stderr


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _running_operation(cli: Cli) -> str:
    """Return the ID of the session's command once it runs."""
    for _ in range(60):
        listed = cli.run("operations", "list", "s1", "--output", "jsonl")
        for operation in listed.items if listed.code == 0 else []:
            if operation["type"] == "bash" and operation.get("start_time"):
                return str(operation["operation_id"])
    raise AssertionError("the command does not begin")


def _other_pids(cli: Cli, module: str, pid: int) -> set[int]:
    return set(_pids_of(cli, module)) - {pid}


def _pids_of(cli: Cli, module: str) -> list[int]:
    """Return the processes that run a module for this test's state directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if module in words and str(cli.state) in words:
                found.append(int(entry.name))
    return found


def test_a_store_that_serves_the_directory_alone_keeps_commands_off_it(cli: Cli) -> None:
    with cli.start("serve", "session-store") as store:
        try:
            assert store.stdout is not None
            assert b"listens on" in store.stdout.readline()
            done = cli.run("sessions", "list")
            assert (done.code, done.stderr.count("\n")) == (1, 1)
            assert "--server" in done.stderr
        finally:
            store.terminate()
            store.communicate(timeout=15)
    assert cli.run("sessions", "list").code == 0
