"""What a restarted manager finds: records deleted, forged or moved, an older journal, a set clock, runaways, trees."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from harness.clock import SystemClock
from harness.coordinator.protocol import OperationRefused
from harness.errors import FailedPreconditionError
from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from harness.primitives import output_marks, process_records
from tests.support.eventually import eventually
from tests.support.manager_process import SETTINGS, start
from tests.support.operations import adding, bash, cancelling, carriers, end_of, run, running
from tests.support.session_scenes import results, session_with_calls, status_of
from unreal_agent.operation.v1 import operation_pb2

COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
CANCELED = operation_pb2.OPERATION_STATUS_CANCELED
UNKNOWN = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN

COUNTING = "for i in $(seq 40); do echo $i; sleep 0.03; done; echo $$ >> count; echo end >&2; exit 3"
COUNTED = "".join(f"{number}\n" for number in range(1, 41))

SMALL = replace(SETTINGS, file_size_limit_bytes=1 << 20)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def sentinel() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


@contextlib.asynccontextmanager
async def opened(state: Path, settings: LocalManagerSettings = SETTINGS) -> AsyncIterator[LocalOperationManager]:
    async with LocalOperationManager.open(state, name="local", settings=settings) as manager:
        yield manager


def attempt(state: Path, operation: operation_pb2.Operation) -> Path:
    return state / "operations" / operation.operation_id / "1"


async def abandoned(state: Path, workspace: Path, operation: operation_pb2.Operation) -> list[psutil.Process]:
    """Kill a manager while a command runs that has written; return the command, its supervisor and its launcher."""
    manager = await start(state, workspace, operation)
    started = await eventually(lambda: process_records.read_started(str(attempt(state, operation))), within_s=15)
    await eventually(lambda: (attempt(state, operation) / "out").stat().st_size > 0, within_s=15)
    os.kill(manager.pid, signal.SIGKILL)
    await manager.wait()
    command = psutil.Process(started.pid)
    return [command, *command.parents()[:2]]


def wholly_counted(ended: operation_pb2.Operation, command: psutil.Process, workspace: Path) -> bool:
    """Whether a counting command ran once, to its end, in the same process, and nothing of its output is lost."""
    result = ended.bash
    assert (workspace / "count").read_text() == f"{command.pid}\n"
    shown = (result.stdout.head, result.stderr.head, result.exit_code, Path(result.stdout.path).read_text())
    return shown == (COUNTED, "end\n", 3, COUNTED)


# --- records that are gone, forged or elsewhere ---


async def test_command_that_lost_manager_launcher_and_supervisor_is_ended_and_unknown(
    state: Path, workspace: Path
) -> None:
    operation = bash("trap '' TERM; echo begun; setsid sleep 300 & sleep 300")
    _, supervisor, launcher = await abandoned(state, workspace, operation)
    launcher.kill()
    supervisor.kill()
    assert carriers(operation.operation_id)
    async with opened(state) as manager:
        ended = await end_of(manager, operation.operation_id)
    assert (ended.status, ended.error.reason, ended.bash.stdout.head) == (UNKNOWN, "SUPERVISOR_LOST", "begun\n")
    assert carriers(operation.operation_id) == []


async def test_command_whose_launcher_died_with_the_manager_is_found_again(state: Path, workspace: Path) -> None:
    operation = bash(COUNTING)
    command, _, launcher = await abandoned(state, workspace, operation)
    launcher.kill()
    async with opened(state) as manager:
        ended = await end_of(manager, operation.operation_id)
    assert (ended.status, ended.bash.process_id) == (COMPLETED, command.pid)
    assert wholly_counted(ended, command, workspace)


@pytest.mark.parametrize("times", [1, 2])
async def test_command_whose_claim_was_deleted_is_not_started_again(state: Path, workspace: Path, times: int) -> None:
    operation = bash("echo x >> count; echo begun; sleep 300")
    await abandoned(state, workspace, operation)
    (attempt(state, operation) / "claim").unlink()
    if times == 2:
        # A manager that took the free claim and died before it had told of it.
        assert process_records.take_claim(str(attempt(state, operation)), process_records.own_claim())
    async with opened(state) as manager:
        ended = await end_of(manager, operation.operation_id)
    assert (ended.status, ended.error.reason, ended.bash.stdout.head) == (UNKNOWN, "CLAIM_MISSING", "begun\n")
    assert (workspace / "count").read_text() == "x\n"
    assert carriers(operation.operation_id) == []


async def test_process_of_another_pid_namespace_is_never_signalled(
    state: Path, workspace: Path, sentinel: subprocess.Popen[bytes]
) -> None:
    operation = bash("echo begun; sleep 300")
    for process in reversed(await abandoned(state, workspace, operation)):
        process.kill()
    await eventually(lambda: not carriers(operation.operation_id))
    claim = attempt(state, operation) / "claim"
    fields = json.loads(claim.read_text())
    start_ticks = int(Path(f"/proc/{sentinel.pid}/stat").read_text().rpartition(") ")[2].split()[19])
    claim.write_text(json.dumps([sentinel.pid, start_ticks, fields[2], "pid:[1]", True]))
    async with opened(state) as manager:
        ended = await end_of(manager, operation.operation_id)
    assert (ended.status, ended.error.reason) == (UNKNOWN, "MACHINE_RESTARTED")
    assert sentinel.poll() is None


async def test_command_with_a_whole_exit_record_is_over_though_its_supervisor_still_runs(
    state: Path, workspace: Path
) -> None:
    operation = bash("echo begun; sleep 300")
    await abandoned(state, workspace, operation)
    with (attempt(state, operation) / "exit").open("a") as record:
        record.write("exit 7\n")
    async with opened(state) as manager:
        ended = await end_of(manager, operation.operation_id)
        await eventually(lambda: not carriers(operation.operation_id), within_s=10)
    assert (ended.status, ended.bash.stdout.head) == (COMPLETED, "begun\n")
    # The supervisor may add its own, which counts then: who can write the one may have written it too early.
    assert ended.bash.exit_code in (7, 143)


async def test_command_goes_on_in_a_state_directory_that_was_moved(state: Path, workspace: Path) -> None:
    operation = bash(COUNTING)
    command, _, _ = await abandoned(state, workspace, operation)
    elsewhere = state.with_name("elsewhere")
    state.rename(elsewhere)
    async with opened(elsewhere) as manager:
        ended = await end_of(manager, operation.operation_id)
    assert ended.bash.stdout.path == str(attempt(elsewhere, operation) / "out")
    assert wholly_counted(ended, command, workspace)


class SetClock(SystemClock):
    """A wall clock that somebody set."""

    def __init__(self, by: timedelta) -> None:
        self._by = by

    def now(self) -> datetime:
        return super().now() + self._by


@pytest.mark.parametrize("years", [pytest.param(-10, marks=pytest.mark.long), 10])
async def test_set_clock_ends_no_command_and_removes_no_output(state: Path, workspace: Path, years: int) -> None:
    operation = bash(COUNTING, timeout_s=60)
    command, _, _ = await abandoned(state, workspace, operation)
    clock = SetClock(timedelta(days=365 * years))
    async with LocalOperationManager.open(state, name="local", settings=SETTINGS, clock=clock) as manager:
        ended = await end_of(manager, operation.operation_id)
    assert not ended.bash.is_timed_out
    assert wholly_counted(ended, command, workspace)


# --- the journal ---


async def test_manager_that_lost_its_journal_is_another_instance(state: Path, workspace: Path) -> None:
    operation = bash("echo begun; echo x >> count; until [ -e go ]; do sleep 0.02; done", timeout_s=20)
    await abandoned(state, workspace, operation)
    with contextlib.closing(sqlite3.connect(state / "journal.sqlite3")) as journal:
        (before,) = journal.execute("SELECT value FROM meta WHERE key = 'instance_id'").fetchone()
    for file in state.glob("journal.sqlite3*"):
        file.unlink()
    async with opened(state) as manager:
        request = adding([operation], workspace)
        request.instance_id = before
        with pytest.raises(FailedPreconditionError):
            await manager.add_operations(request)
        assert manager.instance_id != before
        # Whoever adds it all the same gets the command that runs.
        await manager.add_operations(adding([operation], workspace))
        await running(manager, operation.operation_id)
        (workspace / "go").touch()
        ended = await end_of(manager, operation.operation_id)
    assert (ended.status, ended.bash.stdout.head) == (COMPLETED, "begun\n")
    assert (workspace / "count").read_text() == "x\n"


@pytest.mark.parametrize("is_over", [False, True])
async def test_older_copy_of_the_journal_starts_nothing_twice(state: Path, workspace: Path, is_over: bool) -> None:
    operation = bash(COUNTING)
    command, _, _ = await abandoned(state, workspace, operation)
    if is_over:
        await eventually(lambda: not command.is_running(), within_s=15)
    with contextlib.closing(sqlite3.connect(state / "journal.sqlite3")) as journal, journal:
        # As it was when the operation was accepted.
        accepted = operation.SerializeToString()
        journal.execute("UPDATE operations SET operation = ?, attempt = 0, boot_id = '', has_files = 0", [accepted])
    async with opened(state) as manager:
        ended = await end_of(manager, operation.operation_id)
    assert ended.status == COMPLETED
    assert wholly_counted(ended, command, workspace)


async def test_command_that_an_older_journal_does_not_know_is_unknown_and_not_failed(
    state: Path, workspace: Path
) -> None:
    driver = session_with_calls("c1")
    operation_id = driver.operation_of("c1")
    driver.step(driver.reported(operation_id, operation_pb2.OPERATION_STATUS_AWAITING))
    driver.wait(60)
    async with opened(state) as manager:
        request = adding([driver.operations[operation_id]], workspace)
        refusal = (await manager.add_operations(request)).results[0].refusal
    assert "under way" in refusal.message
    driver.step(OperationRefused(operation_id=operation_id, error=refusal))
    assert status_of(driver, "c1") == ("OUTCOME_UNKNOWN", "INVALID_OPERATION")
    assert "may or may not have" in results(driver)["c1"][1]


# --- a cancellation ends the whole tree ---


@pytest.mark.parametrize(
    "is_restarted", [pytest.param(False, marks=pytest.mark.long), True], ids=["same manager", "after a restart"]
)
@pytest.mark.parametrize(
    "command",
    [
        "setsid sleep 300 & nohup sleep 300 & echo begun; sleep 300",
        "(setsid bash -c 'trap \"\" TERM; (sleep 300 & sleep 300) & sleep 300' &); echo begun; sleep 300",
        "echo begun; kill -STOP $$",
        "sleep 300 & kill -STOP $!; echo begun; wait",
        "for i in $(seq 60); do setsid sleep 300 & done; echo begun; wait",
    ],
    ids=["sessions", "double fork", "stopped", "stopped child", "many"],
)
async def test_cancellation_ends_everything(state: Path, workspace: Path, command: str, is_restarted: bool) -> None:
    operation = bash(command)
    if is_restarted:
        await abandoned(state, workspace, operation)
    async with opened(state) as manager:
        if not is_restarted:
            await manager.add_operations(adding([operation], workspace))
            await eventually(lambda: _written(state, operation) > 0, within_s=10)
        assert carriers(operation.operation_id)
        await manager.cancel_operation(cancelling(operation.operation_id))
        ended = await end_of(manager, operation.operation_id)
        assert (ended.status, ended.bash.stdout.head) == (CANCELED, "begun\n")
        assert carriers(operation.operation_id) == []


def _written(state: Path, operation: operation_pb2.Operation) -> int:
    return process_records.output_bytes(str(attempt(state, operation)), process_records.STDOUT)


# --- output without end ---

READS_ITSELF = "head -c 100000 /dev/zero | tr '\\0' x; tail -c +1 -F $(readlink /proc/$$/fd/1)"
ENDLESS = "while :; do head -c 1000000 /dev/zero; done"


@pytest.mark.parametrize(
    "command",
    [ENDLESS, f"{ENDLESS} >&2", "trap '' XFSZ; yes", READS_ITSELF],
    ids=["stdout", "stderr", "signal ignored", "reads itself"],
)
async def test_runaway_is_ended_and_told_of(state: Path, workspace: Path, command: str) -> None:
    operation = bash(command)
    async with opened(state, SMALL) as manager:
        ended = await run(manager, operation, workspace)
    result = ended.bash
    assert "reached the limit of 1,048,576 bytes" in result.leftover_note
    assert (1 << 20) <= result.stdout.total_bytes + result.stderr.total_bytes <= (2 << 20)
    assert not result.is_timed_out
    assert carriers(operation.operation_id) == []


@pytest.mark.parametrize("dies", ["manager", "manager and launcher"])
async def test_runaway_is_ended_through_a_restart(state: Path, workspace: Path, dies: str) -> None:
    operation = bash(f"echo begun; until [ -e go ]; do sleep 0.02; done; {ENDLESS}")
    _, _, launcher = await abandoned(state, workspace, operation)
    if dies == "manager and launcher":
        launcher.kill()
    async with opened(state, SMALL) as manager:
        await running(manager, operation.operation_id)
        # The launcher that lives knows the limit that it was started with, which is larger.
        (workspace / "go").touch()
        ended = await end_of(manager, operation.operation_id)
    assert "its output reached the limit" in ended.bash.leftover_note
    assert carriers(operation.operation_id) == []


async def test_output_that_was_refused_is_told_of_though_the_command_ended(state: Path, workspace: Path) -> None:
    async with opened(state, SMALL) as manager:
        result = (await run(manager, bash("yes; exit 0"), workspace)).bash
    assert (result.exit_code, result.stdout.total_bytes) == (0, 1 << 20)
    assert "stdout reached the limit of 1,048,576 bytes; what was written beyond is lost." in result.leftover_note


# --- output that the command itself emptied ---


def can_mark(directory: Path) -> bool:
    """Whether the file system can tell that a file was emptied."""
    with (directory / "probe").open("wb+") as file:
        return bool(output_marks.mark(file.fileno()))


@pytest.mark.parametrize(
    ("command", "lost"),
    [
        ("echo a; echo b > /dev/stdout", "stdout"),
        ("echo a; exec > /dev/stdout; echo b", "stdout"),
        ("echo a >&2; echo b | tee /dev/stderr", "stderr"),
        ("echo a >&2; bash -c 'echo b > /proc/self/fd/2'", "stderr"),
    ],
)
async def test_output_that_a_command_emptied_is_told_of(state: Path, workspace: Path, command: str, lost: str) -> None:
    async with opened(state) as manager:
        result = (await run(manager, bash(command), workspace)).bash
    assert getattr(result, lost).head == "b\n"
    other = {"stdout": "stderr", "stderr": "stdout"}[lost]
    assert (f"{lost} was opened anew" in result.leftover_note) == can_mark(workspace)
    assert f"{other} was opened anew" not in result.leftover_note


async def test_output_that_was_only_appended_to_is_not_said_to_be_lost(state: Path, workspace: Path) -> None:
    command = "echo a; echo b >> /dev/stdout; echo c >&2; echo d >> /dev/stderr; head -c 3000000 /dev/zero; sync -d $0"
    async with opened(state) as manager:
        result = (await run(manager, bash(command), workspace)).bash
    assert (result.stdout.total_bytes, result.stderr.head[:4]) == (3_000_004, "c\nd\n")
    assert result.leftover_note == ""


async def test_emptied_output_is_told_of_through_a_restart_and_not_of_a_copy(state: Path, workspace: Path) -> None:
    operation = bash("echo a; until [ -e go ]; do sleep 0.02; done; echo b > /dev/stdout")
    command, _, _ = await abandoned(state, workspace, operation)
    (workspace / "go").touch()
    await eventually(lambda: not command.is_running(), within_s=10)
    copy = state.with_name("copy")
    shutil.copytree(state, copy, ignore=shutil.ignore_patterns("*.lock"))
    async with opened(state) as manager, opened(copy) as restored:
        result = (await end_of(manager, operation.operation_id)).bash
        copied = (await end_of(restored, operation.operation_id)).bash
    assert ("stdout was opened anew" in result.leftover_note) == can_mark(workspace)
    assert (copied.stdout.head, copied.leftover_note) == ("b\n", "")
