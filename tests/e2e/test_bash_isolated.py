"""The scenarios of commands again, each command in a sandbox; and what a restart of the manager does to those."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clients.operation_manager import DialledLink, ProxyOperationManager
from harness.operations.local_manager import LocalOperationManager
from tests.e2e.test_bash import (  # noqa: F401  # the same scenarios, over this file's own manager
    test_background_process_does_not_hold_a_call_and_is_ended,
    test_editor_can_not_hang_a_commit,
    test_output_after_the_exit_does_not_change_the_result,
    test_relative_working_directory_is_of_the_workspace,
    test_signal_of_a_child_is_the_shells_ordinary_exit,
    test_text_longer_than_an_argument_may_be_runs_from_a_file,
    test_text_reaches_bash_byte_for_byte,
    test_time_limit_ends_everything,
    test_time_limit_keeps_what_was_written,
    workspace,
)
from tests.e2e.test_bash_output import (  # noqa: F401
    test_bytes_that_are_no_utf8_are_replaced_and_kept_in_the_file,
    test_long_lines_are_counted_on_both_streams,
    test_output_of_exactly_the_limit_is_whole,
    test_ten_megabytes_without_a_newline_on_both_streams,
)
from tests.support.eventually import eventually
from tests.support.isolation import isolated_manager, refusal
from tests.support.manager_service import manager_process
from tests.support.operations import adding, bash, cancelling, carriers, end_of, run, running
from unreal_agent.operation.v1 import operation_pb2

COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
CANCELED = operation_pb2.OPERATION_STATUS_CANCELED

SANDBOXED = ("--isolation", "bubblewrap", "--kill-grace-seconds", "0.5")


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[LocalOperationManager]:
    """Give a manager with sandboxes; one without where it was refused, which the refusal's own test checks."""
    async with isolated_manager(tmp_path / "state") as isolated:
        if isolated is not None:
            yield isolated
            return
    async with LocalOperationManager.open(tmp_path / "state", name="local") as opened:
        yield opened


@pytest.mark.parametrize("code", [0, 1, 3, 126, 137, 255])
async def test_exit_codes_are_the_commands_own(manager: LocalOperationManager, workspace: Path, code: int) -> None:  # noqa: F811
    ended = await run(manager, bash(f"echo 'bwrap: told' >&2; exit {code}"), workspace)
    assert (ended.status, ended.bash.exit_code, ended.bash.stderr.head) == (COMPLETED, code, "bwrap: told\n")


async def test_a_command_that_tidies_up_when_ended_is_waited_for(
    manager: LocalOperationManager,
    workspace: Path,  # noqa: F811
) -> None:
    operation = bash("trap 'sleep 0.2; echo tidied; exit 7' TERM; touch ready; while :; do sleep 0.05; done")
    await manager.add_operations(adding([operation], workspace))
    await eventually(lambda: (workspace / "ready").exists(), within_s=10)
    await manager.cancel_operation(cancelling(operation.operation_id))
    ended = await end_of(manager, operation.operation_id)
    assert (ended.status, ended.bash.stdout.head, ended.bash.exit_code) == (CANCELED, "tidied\n", 7)


async def test_a_cancelled_tree_is_gone_whatever_it_did(
    manager: LocalOperationManager,
    workspace: Path,  # noqa: F811
) -> None:
    operation = bash(
        "trap '' TERM; (setsid bash -c \"trap '' TERM; sleep 71.1 & wait\" &) ; env -i setsid sleep 71.2 & "
        "touch ready; while :; do sleep 1; done"
    )
    await manager.add_operations(adding([operation], workspace))
    await eventually(lambda: (workspace / "ready").exists(), within_s=10)
    assert carriers(operation.operation_id)
    await manager.cancel_operation(cancelling(operation.operation_id))
    assert (await end_of(manager, operation.operation_id)).status == CANCELED
    assert carriers(operation.operation_id) == []
    assert not [name for name in os.listdir("/proc") if name.isdigit() and _is_sleep(name, b"71.1", b"71.2")]


def _is_sleep(pid: str, *lengths: bytes) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[:1] == [b"sleep"] and words[1] in lengths


# --- a manager that dies ---


async def test_a_sandboxed_command_outlives_its_killed_manager(tmp_path: Path, workspace: Path) -> None:  # noqa: F811
    if refusal():
        return
    async with manager_process(tmp_path / "state", *SANDBOXED) as service:
        operation = bash("touch ready; until [ -e go ]; do sleep 0.02; done; echo over; echo end >&2; exit 3")
        async with ProxyOperationManager(DialledLink(service.address)) as proxy:
            await proxy.add_operations(adding([operation], workspace))
            begun = await running(proxy, operation.operation_id)
            await eventually(lambda: (workspace / "ready").exists(), within_s=10)
        await service.end(signal.SIGKILL)
        await service.start()
        (workspace / "go").touch()
        async with ProxyOperationManager(DialledLink(service.address)) as proxy:
            ended = await end_of(proxy, operation.operation_id)
        assert (ended.bash.process_id, ended.bash.exit_code) == (begun.bash.process_id, 3)
        assert (ended.bash.stdout.head, ended.bash.stderr.head) == ("over\n", "end\n")
        await eventually(lambda: not carriers(operation.operation_id), within_s=10)


async def test_a_sandboxed_command_is_ended_by_the_next_manager(tmp_path: Path, workspace: Path) -> None:  # noqa: F811
    if refusal():
        return
    async with manager_process(tmp_path / "state", *SANDBOXED) as service:
        operation = bash(
            "trap 'echo tidied; exit 7' TERM; setsid sleep 72.1 & touch ready; while :; do sleep 0.1; done"
        )
        async with ProxyOperationManager(DialledLink(service.address)) as proxy:
            await proxy.add_operations(adding([operation], workspace))
            await eventually(lambda: (workspace / "ready").exists(), within_s=10)
        await service.end(signal.SIGKILL)
        await service.start()
        async with ProxyOperationManager(DialledLink(service.address)) as proxy:
            await proxy.cancel_operation(cancelling(operation.operation_id))
            ended = await end_of(proxy, operation.operation_id)
        assert (ended.status, ended.bash.stdout.head) == (CANCELED, "tidied\n")
        assert carriers(operation.operation_id) == []
