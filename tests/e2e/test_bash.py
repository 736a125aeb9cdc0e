"""Commands as a model runs them: text, streams, exits, time limits, directories, through a real manager."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from tests.support.eventually import eventually
from tests.support.operations import acknowledging, adding, bash, carriers, end_of, run, running
from unreal_agent.operation.v1 import operation_pb2

COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
FAILED = operation_pb2.OPERATION_STATUS_FAILED
CANCELED = operation_pb2.OPERATION_STATUS_CANCELED


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[LocalOperationManager]:
    settings = LocalManagerSettings(grace_s=0.5)
    async with LocalOperationManager.open(tmp_path / "state", name="local", settings=settings) as opened:
        yield opened


# --- B01: what holds on in the background ---


@pytest.mark.parametrize(
    "command",
    [
        "sleep 20.1 & echo done",
        "setsid sleep 20.2 & echo done",
        "(while :; do echo x; sleep 0.1; done) & echo done",
        "env -i setsid sleep 20.3 & echo done",
        "bash -c '(setsid sleep 20.4 &)'; echo done",
    ],
)
async def test_background_process_does_not_hold_a_call_and_is_ended(
    manager: LocalOperationManager, workspace: Path, command: str
) -> None:
    began_s = time.monotonic()
    operation = bash(command)
    ended = await run(manager, operation, workspace)
    assert time.monotonic() - began_s < 2
    assert (ended.status, ended.bash.exit_code) == (COMPLETED, 0)
    assert "done\n" in ended.bash.stdout.head
    assert "left running" in ended.bash.leftover_note
    await eventually(lambda: not carriers(operation.operation_id), within_s=5)
    lengths = [length for length in (20.1, 20.2, 20.3, 20.4) if str(length) in command]
    await eventually(lambda: not any(map(_sleepers, lengths)), within_s=5)


def _sleepers(seconds: float) -> list[str]:
    wanted = f"sleep\0{seconds}\0".encode()
    return [name for name in os.listdir("/proc") if name.isdigit() and _command_line(name) == wanted]


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_output_after_the_exit_does_not_change_the_result(
    manager: LocalOperationManager, workspace: Path
) -> None:
    command = "(trap '' TERM; touch ready; sleep 0.2; echo late) & until [ -e ready ]; do :; done; echo done"
    ended = await run(manager, bash(command), workspace)
    assert ended.bash.stdout.total_bytes == 5
    path = Path(ended.bash.stdout.path)
    await eventually(lambda: path.read_bytes() == b"done\nlate\n")
    again = (await manager.add_operations(adding([ended], workspace))).results[0].operation
    assert again == ended


# --- B02: time limits ---


@pytest.mark.parametrize(
    "command",
    [
        "for i in 1 2; do (while :; do :; done) & done; trap '' TERM; sleep 60",
        "setsid sleep 61.7 & sleep 60",
        "bash -c '(setsid sleep 61.8 &)'; sleep 60",
        "env -i setsid sleep 61.9 & sleep 60",
        "trap '' TERM INT HUP; while :; do sleep 1; done",
        "sleep 62.1 & kill -STOP $!; sleep 60",
        "kill -STOP $PPID; sleep 60",
        "read -r _ _ _ launcher _ < /proc/$PPID/stat; kill -STOP $PPID $launcher; sleep 60",
    ],
)
async def test_time_limit_ends_everything(manager: LocalOperationManager, workspace: Path, command: str) -> None:
    began_s = time.monotonic()
    operation = bash(command, timeout_s=0.4)
    ended = await run(manager, operation, workspace)
    assert time.monotonic() - began_s < 4
    assert (ended.status, ended.bash.is_timed_out) == (COMPLETED, True)
    assert carriers(operation.operation_id) == []
    assert not any(_sleepers(seconds) for seconds in (61.7, 61.8, 61.9, 62.1) if str(seconds) in command)


async def test_stopped_command_costs_nothing_and_goes_on(manager: LocalOperationManager, workspace: Path) -> None:
    operation = bash("kill -STOP $$; echo over; exit 3")
    await manager.add_operations(adding([operation], workspace))
    command = psutil.Process((await running(manager, operation.operation_id)).bash.process_id)
    await eventually(lambda: command.status() == psutil.STATUS_STOPPED, within_s=5)
    supervisor = command.parent()
    assert supervisor is not None
    await eventually(lambda: supervisor.status() == psutil.STATUS_SLEEPING, within_s=5)
    command.resume()
    ended = await end_of(manager, operation.operation_id)
    assert (ended.bash.exit_code, ended.bash.stdout.head) == (3, "over\n")


async def test_stopped_supervisor_and_launcher_go_on(manager: LocalOperationManager, workspace: Path) -> None:
    stopping = "read -r _ _ _ launcher _ < /proc/$PPID/stat; kill -STOP $PPID $launcher; echo over; exit 3"
    ended = await run(manager, bash(stopping), workspace)
    assert (ended.status, ended.bash.exit_code, ended.bash.stdout.head) == (COMPLETED, 3, "over\n")
    assert (await run(manager, bash("echo next"), workspace)).bash.stdout.head == "next\n"


async def test_process_that_may_have_escaped_is_told_of_and_ended_with_the_last_that_may_own_it(
    manager: LocalOperationManager, workspace: Path
) -> None:
    other = bash("until [ -e go ]; do sleep 0.02; done")
    await manager.add_operations(adding([other], workspace))
    await running(manager, other.operation_id)
    command = "env -i bash -c '(setsid sleep 63.3 &)'; until pgrep -f 'sleep 63.3$' > /dev/null; do :; done; echo done"
    escaped = await run(manager, bash(command), workspace)
    assert "may have escaped" in escaped.bash.leftover_note
    assert len(_sleepers(63.3)) == 1
    (workspace / "go").touch()
    await end_of(manager, other.operation_id)
    await eventually(lambda: not _sleepers(63.3), within_s=5)


async def test_time_limit_keeps_what_was_written(manager: LocalOperationManager, workspace: Path) -> None:
    ended = await run(manager, bash("trap 'echo trapped; exit 3' TERM; echo first; sleep 60", timeout_s=0.3), workspace)
    assert ended.bash.stdout.head == "first\ntrapped\n"
    assert (ended.bash.exit_code, ended.bash.is_timed_out) == (3, True)


# --- B06: input ---


async def test_command_that_asks_for_input_gets_none(manager: LocalOperationManager, workspace: Path) -> None:
    ended = await run(manager, bash("read -p 'go? ' x; echo got=$x; cat; echo end"), workspace)
    assert ended.bash.stdout.head == "got=\nend\n"
    tty = f"""{sys.executable} -c 'open("/dev/tty").read()'; echo code=$?; tty; ps -o tty= -p $$ 2>/dev/null || true"""
    ended = await run(manager, bash(tty), workspace)
    assert "code=1" in ended.bash.stdout.head
    assert "No such device or address" in ended.bash.stderr.head


async def test_editor_can_not_hang_a_commit(manager: LocalOperationManager, workspace: Path) -> None:
    command = "git init -q . && touch f && git add f && git -c user.name=n -c user.email=e@x commit; echo code=$?"
    ended = await run(manager, bash(command, timeout_s=10), workspace)
    assert not ended.bash.is_timed_out
    assert "code=0" not in ended.bash.stdout.head


# --- B07: signals and exit codes ---


@pytest.mark.parametrize(
    "name, number", [("KILL", 9), ("SEGV", 11), ("TERM", 15), ("INT", 2), ("HUP", 1), ("PIPE", 13)]
)
async def test_death_by_signal_is_told_from_an_exit_code(
    manager: LocalOperationManager, workspace: Path, name: str, number: int
) -> None:
    ended = await run(manager, bash(f"printf before; kill -{name} $$"), workspace)
    state = ended.bash
    assert (ended.status, state.exit_code, state.signal) == (COMPLETED, 128 + number, f"SIG{name}")
    assert state.stdout.head == "before"
    plain = (await run(manager, bash(f"exit {128 + number}"), workspace)).bash
    assert (plain.exit_code, plain.signal) == (128 + number, "")


async def test_signal_of_a_child_is_the_shells_ordinary_exit(manager: LocalOperationManager, workspace: Path) -> None:
    state = (await run(manager, bash("bash -c 'kill -9 $$'; exit $?"), workspace)).bash
    assert (state.exit_code, state.signal) == (137, "")


async def test_kill_of_its_own_group_does_not_reach_the_supervisor(
    manager: LocalOperationManager, workspace: Path
) -> None:
    state = (await run(manager, bash("printf before; kill -9 0"), workspace)).bash
    assert (state.exit_code, state.signal, state.stdout.head) == (137, "SIGKILL", "before")


# --- B08: directories ---


def _replace_by_file(directory: Path) -> None:
    directory.rmdir()
    directory.write_text("")


@pytest.mark.parametrize(
    "spoil, word",
    [
        (shutil.rmtree, "does not exist"),
        (_replace_by_file, "is not a directory"),
    ],
)
async def test_lost_working_directory_is_named_and_another_works(
    manager: LocalOperationManager, tmp_path: Path, workspace: Path, spoil: Callable[[Path], object], word: str
) -> None:
    spoil(workspace)
    ended = await run(manager, bash("echo hi"), workspace)
    assert (ended.status, ended.error.reason) == (FAILED, "WORKING_DIRECTORY_UNAVAILABLE")
    assert str(workspace) in ended.error.message and word in ended.error.message
    ended = await run(manager, bash("pwd", working_directory=str(tmp_path)), workspace)
    assert ended.bash.stdout.head == f"{tmp_path}\n"


async def test_relative_working_directory_is_of_the_workspace(manager: LocalOperationManager, workspace: Path) -> None:
    (workspace / "below dir").mkdir()
    ended = await run(manager, bash("pwd", working_directory="below dir"), workspace)
    assert ended.bash.stdout.head == f"{workspace}/below dir\n"


async def test_managers_own_lost_directory_does_not_matter(tmp_path: Path, workspace: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    before = os.getcwd()
    os.chdir(gone)
    try:
        gone.rmdir()
        async with LocalOperationManager.open(tmp_path / "state", name="local") as manager:
            assert (await run(manager, bash("echo hi"), workspace)).bash.stdout.head == "hi\n"
    finally:
        os.chdir(before)


async def test_missing_bash_is_named(tmp_path: Path, workspace: Path) -> None:
    settings = LocalManagerSettings(environment={"PATH": str(workspace)})
    async with LocalOperationManager.open(tmp_path / "state", name="local", settings=settings) as manager:
        ended = await run(manager, bash("true"), workspace)
    assert (ended.status, ended.error.reason) == (FAILED, "BASH_MISSING")
    assert str(workspace) in ended.error.message


# --- the text and its environment ---


@pytest.mark.parametrize(
    "command, expected",
    [
        ("printf '%s' 'a\\b' \"c'd\" $'e\\tf'", "a\\bc'de\tf"),
        ("cat <<'END'\n$HOME `x` \\\n\nüß 日本 \u2028\nEND\n", "$HOME `x` \\\n\nüß 日本 \u2028\n"),
        ('-e() { :; }; echo "$0" "$#"', "bash 0\n"),
        ("printf '%q' \x01\x02\x7f\x81\x88ä", "$'\\001\\002\\177\\u0081\\u0088ä'"),
        ("# only a comment", ""),
        ("echo a\necho b; exit 0\necho c", "a\nb\n"),
    ],
)
async def test_text_reaches_bash_byte_for_byte(
    manager: LocalOperationManager, workspace: Path, command: str, expected: str
) -> None:
    direct = subprocess.run(["bash", "-c", "--", command, "bash"], capture_output=True, check=False, timeout=10)
    state = (await run(manager, bash(command), workspace)).bash
    assert state.stdout.head == direct.stdout.decode()
    if "%q" not in command:
        assert state.stdout.head == expected


async def test_text_longer_than_an_argument_may_be_runs_from_a_file(
    manager: LocalOperationManager, workspace: Path
) -> None:
    text = "x" * 300_000 + "é"
    command = f"printf '%s' '{text}' > long\nnonsense_command\necho $#"
    state = (await run(manager, bash(command), workspace)).bash
    assert (workspace / "long").read_text() == text
    assert state.stdout.head == "0\n"
    assert "line 2: nonsense_command: command not found" in state.stderr.head


async def test_environment_is_an_allow_list(tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNREAL_AGENT_LLM_API_KEY", "secret-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-key")
    monkeypatch.setenv("https_proxy", "http://user:secret-key@proxy:1")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:1")
    monkeypatch.setenv("LC_TIME", "C")
    async with LocalOperationManager.open(tmp_path / "state", name="local") as manager:
        operation = bash("env; cat /proc/$PPID/environ | tr '\\0' '\\n'")
        text = (await run(manager, operation, workspace)).bash.stdout.head
    assert "secret-key" not in text
    variables = set(text.splitlines())
    assert {
        "TERM=dumb",
        "HTTP_PROXY=http://proxy:1",
        "LC_TIME=C",
        f"UNREAL_AGENT_OPERATION={operation.operation_id}",
    } <= (variables)


async def test_command_inherits_no_descriptor_and_no_ignored_signal(
    manager: LocalOperationManager, workspace: Path
) -> None:
    command = "ls -l /proc/self/fd | grep -c -e '->'; grep -e SigIgn -e SigBlk /proc/self/status; yes | head -1"
    state = (await run(manager, bash(command), workspace)).bash
    count, blocked, ignored, yes = state.stdout.head.splitlines()
    # The listing has its three streams and the directory that it reads.
    assert (count, yes) == ("4", "y")
    # posix_spawn of the C library leaves its own two signals, 32 and 33, ignored.
    assert (int(blocked.split()[1], 16), int(ignored.split()[1], 16) & ~(3 << 31)) == (0, 0)
    assert state.stderr.head == ""


async def test_runaway_output_is_bounded(tmp_path: Path, workspace: Path) -> None:
    settings = LocalManagerSettings(file_size_limit_bytes=1 << 20)
    async with LocalOperationManager.open(tmp_path / "state", name="local", settings=settings) as manager:
        state = (await run(manager, bash("yes; echo code=$? >&2"), workspace)).bash
    assert state.stdout.total_bytes == 1 << 20


# --- B62: many at once ---


@pytest.mark.slow
async def test_many_short_commands_leak_nothing(tmp_path: Path, workspace: Path) -> None:
    settings = LocalManagerSettings(concurrency=16)
    async with LocalOperationManager.open(tmp_path / "state", name="local", settings=settings) as manager:
        await run(manager, bash("true"), workspace)
        descriptors = len(os.listdir("/proc/self/fd"))
        operations = [bash("true") for _ in range(300)]
        await manager.add_operations(adding(operations, workspace))
        for operation in operations:
            ended = await end_of(manager, operation.operation_id)
            assert ended.status == COMPLETED
            await manager.acknowledge_updates(acknowledging(ended))
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 1
        statistics = manager.statistics()
        assert (statistics.remembered - 1, statistics.running, statistics.waiting) == (0, 0, 0)
        assert _zombies() == []


def _zombies() -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_bytes()
            except OSError:
                continue
            fields = stat.rpartition(b") ")[2].split()
            if fields[0] == b"Z" and b"bash" in stat and int(fields[1]) == os.getpid():
                found.append(name)
    return found
