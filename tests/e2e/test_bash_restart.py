"""Commands and the death of those who run them: manager, launcher, supervisor, machine."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

import harness.operations.local_manager  # noqa: F401 - declares the fault points
from harness import faults
from harness.errors import FailedPreconditionError
from harness.operations.local_manager import LocalOperationManager
from harness.primitives import process_records
from tests.support import manager_process
from tests.support.eventually import eventually
from tests.support.manager_process import SETTINGS, start
from tests.support.operations import acknowledging, adding, bash, cancelling, carriers, end_of, run, running
from unreal_agent.operation.v1 import operation_pb2

COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
CANCELED = operation_pb2.OPERATION_STATUS_CANCELED
UNKNOWN = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN

POINTS = sorted(point for point in faults.points() if point.startswith(("operations.", "primitives.")))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def opened(state: Path) -> contextlib.AbstractAsyncContextManager[LocalOperationManager]:
    return LocalOperationManager.open(state, name="local", settings=SETTINGS)


def attempt(state: Path, operation: operation_pb2.Operation, number: int = 1) -> Path:
    return state / "operations" / operation.operation_id / str(number)


async def killed_while_running(state: Path, workspace: Path, operation: operation_pb2.Operation) -> psutil.Process:
    """Run a manager, kill it in the middle of a command; return the command."""
    manager = await start(state, workspace, operation)
    record = await eventually(lambda: process_records.read_started(str(attempt(state, operation))), within_s=15)
    await eventually(lambda: (attempt(state, operation) / "out").stat().st_size > 0, within_s=15)
    os.kill(manager.pid, signal.SIGKILL)
    await manager.wait()
    return psutil.Process(record.pid)


# --- the manager ---


async def test_command_outlives_its_killed_manager_and_is_found_again(state: Path, workspace: Path) -> None:
    operation = bash("for i in $(seq 40); do echo $i; sleep 0.02; done; echo $$; echo end >&2; exit 3")
    command = await killed_while_running(state, workspace, operation)
    async with opened(state) as manager:
        ended = await end_of(manager, operation.operation_id)
        result = ended.bash
        assert result.stdout.head == "".join(f"{number}\n" for number in range(1, 41)) + f"{command.pid}\n"
        assert (result.process_id, result.exit_code, result.stderr.head) == (command.pid, 3, "end\n")
        await manager.acknowledge_updates(acknowledging(ended))


async def test_command_that_ended_meanwhile_keeps_its_result(state: Path, workspace: Path) -> None:
    operation = bash("echo begun; sleep 0.3; echo over; kill -TERM $$")
    command = await killed_while_running(state, workspace, operation)
    await eventually(lambda: not command.is_running(), within_s=10)
    async with opened(state) as manager:
        result = (await end_of(manager, operation.operation_id)).bash
    assert (result.stdout.head, result.exit_code, result.signal) == ("begun\nover\n", 143, "SIGTERM")


async def test_leftovers_are_ended_without_a_manager(state: Path, workspace: Path) -> None:
    operation = bash("echo begun; setsid sleep 300 & sleep 0.2")
    command = await killed_while_running(state, workspace, operation)
    await eventually(lambda: not command.is_running(), within_s=10)
    await eventually(lambda: not carriers(operation.operation_id), within_s=10)


async def test_time_limit_holds_without_a_manager(state: Path, workspace: Path) -> None:
    operation = bash("echo begun; sleep 300", timeout_s=0.8)
    command = await killed_while_running(state, workspace, operation)
    await eventually(lambda: not command.is_running(), within_s=10)
    async with opened(state) as manager:
        result = (await end_of(manager, operation.operation_id)).bash
    assert (result.is_timed_out, result.stdout.head) == (True, "begun\n")


async def test_time_limit_holds_through_a_restart(state: Path, workspace: Path) -> None:
    operation = bash("echo begun; sleep 300", timeout_s=1.5)
    await killed_while_running(state, workspace, operation)
    async with opened(state) as manager:
        result = (await end_of(manager, operation.operation_id)).bash
    assert (result.is_timed_out, result.stdout.head) == (True, "begun\n")
    assert carriers(operation.operation_id) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("point", POINTS)
async def test_command_never_starts_twice_whenever_the_manager_dies(
    state: Path, workspace: Path, point: str, count: int
) -> None:
    operation = bash("echo x >> count; echo done")
    manager = await start(state, workspace, operation, kill_at=f"{point}:{count}")
    code = await manager.wait()
    assert code in (0, -signal.SIGKILL)
    await manager_process.follow(state, workspace, operation, is_cancelled=False)
    assert (workspace / "count").read_text() == "x\n"
    async with opened(state) as again:
        known = (await again.add_operations(adding([operation], workspace))).results[0].operation
    assert (known.status, known.WhichOneof("state")) == (COMPLETED, None)


@pytest.mark.parametrize(
    "point", ["operations.journal.after", "operations.dispatch.before", "operations.update.before"]
)
async def test_cancellation_before_the_death_ends_as_cancelled(state: Path, workspace: Path, point: str) -> None:
    operation = bash("echo begun; sleep 300")
    # The third time is the cancellation's own step, after the beginning and the start.
    manager = await start(state, workspace, operation, kill_at=f"{point}:{_nth(point)}", is_cancelled=True)
    assert await manager.wait() == -signal.SIGKILL
    async with opened(state) as again:
        ended = await end_of(again, operation.operation_id)
    assert (ended.status, ended.error.message, ended.bash.stdout.head) == (CANCELED, "stop it", "begun\n")
    assert carriers(operation.operation_id) == []


def _nth(point: str) -> int:
    # The journal is also written once for the acceptance.
    return 4 if point.startswith("operations.journal") else 3


# --- launcher and supervisor ---


async def test_killed_launcher_costs_no_command(state: Path, workspace: Path) -> None:
    operation = bash("echo begun; sleep 1; echo over")
    async with opened(state) as manager:
        await manager.add_operations(adding([operation], workspace))
        before = await running(manager, operation.operation_id)
        supervisor = psutil.Process(before.bash.process_id).parent()
        assert supervisor is not None
        launcher = supervisor.parent()
        assert launcher is not None and launcher.name() == "ua-launcher"
        launcher.kill()
        after = await run(manager, bash("echo next"), workspace)
        ended = await end_of(manager, operation.operation_id)
    assert after.bash.stdout.head == "next\n"
    assert (ended.status, ended.bash.stdout.head) == (COMPLETED, "begun\nover\n")
    assert ended.bash.process_id == before.bash.process_id


async def test_supervisor_that_was_stopped_before_a_restart_goes_on(state: Path, workspace: Path) -> None:
    operation = bash("echo begun; until [ -e go ]; do sleep 0.05; done; echo over")
    command = await killed_while_running(state, workspace, operation)
    supervisor = command.parent()
    assert supervisor is not None
    launcher = supervisor.parent()
    assert launcher is not None
    launcher.suspend()
    try:
        supervisor.suspend()
        (workspace / "go").touch()
        async with opened(state) as manager:
            ended = await end_of(manager, operation.operation_id)
    finally:
        launcher.resume()
    assert (ended.status, ended.bash.stdout.head) == (COMPLETED, "begun\nover\n")


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_killed_supervisor_makes_the_outcome_unknown_and_ends_the_command(
    state: Path, workspace: Path, is_restarted: bool
) -> None:
    operation = bash("trap '' TERM; echo begun; setsid sleep 300 & sleep 300")
    async with contextlib.AsyncExitStack() as stack:
        if is_restarted:
            command = await killed_while_running(state, workspace, operation)
        else:
            manager = await stack.enter_async_context(opened(state))
            await manager.add_operations(adding([operation], workspace))
            command = psutil.Process((await running(manager, operation.operation_id)).bash.process_id)
            await eventually(lambda: (attempt(state, operation) / "out").stat().st_size > 0)
        supervisor = command.parent()
        assert supervisor is not None
        supervisor.kill()
        if is_restarted:
            manager = await stack.enter_async_context(opened(state))
        ended = await end_of(manager, operation.operation_id)
    assert (ended.status, ended.error.reason) == (UNKNOWN, "SUPERVISOR_LOST")
    assert ended.bash.stdout.head == "begun\n"
    assert carriers(operation.operation_id) == []


# --- records that lie ---


@pytest.fixture
def sentinel() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


@pytest.fixture
async def interrupted(state: Path, workspace: Path) -> AsyncIterator[operation_pb2.Operation]:
    """A command whose manager, launcher and supervisor are gone; nothing of it runs."""
    operation = bash("echo begun; sleep 300")
    command = await killed_while_running(state, workspace, operation)
    supervisor = command.parent()
    assert supervisor is not None
    launcher = supervisor.parent()
    for process in (launcher, supervisor, command):
        assert process is not None
        process.kill()
    await eventually(lambda: not carriers(operation.operation_id))
    yield operation


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_recycled_pid_is_never_signalled(
    state: Path,
    interrupted: operation_pb2.Operation,
    sentinel: subprocess.Popen[bytes],
    is_cancelled: bool,
) -> None:
    claim = attempt(state, interrupted) / "claim"
    fields = json.loads(claim.read_text())
    claim.write_text(json.dumps([sentinel.pid, *fields[1:]]))
    async with opened(state) as manager:
        if is_cancelled:
            await manager.cancel_operation(cancelling(interrupted.operation_id))
        ended = await end_of(manager, interrupted.operation_id)
    assert ended.status == (CANCELED if is_cancelled else UNKNOWN)
    assert sentinel.poll() is None


async def test_restart_of_the_machine_makes_the_outcome_unknown(
    state: Path, interrupted: operation_pb2.Operation, sentinel: subprocess.Popen[bytes]
) -> None:
    claim = attempt(state, interrupted) / "claim"
    start_ticks = Path(f"/proc/{sentinel.pid}/stat").read_text().rpartition(") ")[2].split()[19]
    fields = json.loads(claim.read_text())
    claim.write_text(json.dumps([sentinel.pid, int(start_ticks), "another-boot", *fields[3:]]))
    with contextlib.closing(sqlite3.connect(state / "journal.sqlite3")) as journal, journal:
        journal.execute("UPDATE operations SET boot_id = 'another-boot'")
    async with opened(state) as manager:
        ended = await end_of(manager, interrupted.operation_id)
    assert (ended.status, ended.error.reason) == (UNKNOWN, "MACHINE_RESTARTED")
    assert ended.bash.stdout.head == "begun\n"
    assert sentinel.poll() is None


async def test_claim_lost_with_the_machine_is_not_taken_for_never_started(
    state: Path, workspace: Path, interrupted: operation_pb2.Operation
) -> None:
    (attempt(state, interrupted) / "claim").unlink()
    with contextlib.closing(sqlite3.connect(state / "journal.sqlite3")) as journal, journal:
        journal.execute("UPDATE operations SET boot_id = 'another-boot'")
    async with opened(state) as manager:
        ended = await end_of(manager, interrupted.operation_id)
    assert (ended.status, ended.error.reason) == (UNKNOWN, "MACHINE_RESTARTED")


async def test_deleted_directory_makes_the_outcome_unknown(state: Path, interrupted: operation_pb2.Operation) -> None:
    shutil.rmtree(attempt(state, interrupted))
    async with opened(state) as manager:
        ended = await end_of(manager, interrupted.operation_id)
    assert (ended.status, ended.error.reason) == (UNKNOWN, "OPERATION_DIRECTORY_MISSING")


@pytest.mark.parametrize("name", ["claim", "started", "exit", "ended-by"])
async def test_spoilt_record_concerns_its_operation_only(
    state: Path, workspace: Path, interrupted: operation_pb2.Operation, name: str
) -> None:
    (attempt(state, interrupted) / name).write_bytes(b"\xff 1 (x) S nonsense")
    async with opened(state) as manager:
        ended = await end_of(manager, interrupted.operation_id)
        assert ended.status == UNKNOWN
        assert (await run(manager, bash("true"), workspace)).status == COMPLETED


def test_claim_that_can_not_be_written_is_not_there_and_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError):
            process_records.take_claim(str(tmp_path), process_records.own_claim())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    assert process_records.take_claim(str(tmp_path), process_records.own_claim())


async def test_torn_exit_record_does_not_count(state: Path, interrupted: operation_pb2.Operation) -> None:
    (attempt(state, interrupted) / "exit").write_text("exit 0")
    async with opened(state) as manager:
        ended = await end_of(manager, interrupted.operation_id)
    assert (ended.status, ended.error.reason) == (UNKNOWN, "SUPERVISOR_LOST")


async def test_state_directory_is_open_in_one_process(state: Path) -> None:
    async with opened(state):
        with pytest.raises(FailedPreconditionError) as refusal:
            async with opened(state):
                pass
    assert refusal.value.reason == "STATE_DIRECTORY_IN_USE"


async def test_start_that_waits_in_a_dead_managers_launcher_is_not_made_twice(state: Path, workspace: Path) -> None:
    operation = bash("echo x >> count; sleep 0.2; echo done")
    manager = await start(state, workspace, operation, kill_at="primitives.launch.after")
    assert await manager.wait() == -signal.SIGKILL
    async with opened(state) as again:
        ended = await end_of(again, operation.operation_id)
    assert (ended.status, ended.bash.stdout.head) == (COMPLETED, "done\n")
    assert (workspace / "count").read_text() == "x\n"
