"""A manager that may open nothing more, or write nothing more, takes no command that runs for lost."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from harness.primitives import output_capture, process_records, process_table
from harness.primitives.primitives import Event, ProcessExited, StartProcess, WatchProcess
from harness.primitives.processes import Place, Processes, ProcessSettings
from tests.support.eventually import eventually

COUNTING = "until [ -e goes_on ]; do sleep 0.02; done; echo $$ >> count; echo whole; exit 3"


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_can_not_be_looked_at_is_not_taken_for_missing(tmp_path: Path) -> None:
    assert process_records.take_claim(str(tmp_path), process_records.own_claim())
    (tmp_path / process_records.EXIT).write_text("exit 3\n")
    looks: list[Callable[[], object]] = [
        lambda: process_records.read_claim(str(tmp_path)),
        lambda: process_records.read_exit(str(tmp_path)),
        lambda: process_table.read_entry(os.getpid()),
        lambda: process_table.is_running(os.getpid(), 1),
        lambda: output_capture.capture(str(tmp_path / process_records.EXIT), 100),
    ]
    boot = process_table.boot_id()
    with no_descriptors():
        for look in looks:
            with pytest.raises(OSError, match="Too many open files"):
                look()
        assert process_table.boot_id() == boot
    assert all(look() is not None for look in looks)


@asynccontextmanager
async def commands(directory: Path) -> AsyncIterator[tuple[Processes, asyncio.Queue[Event]]]:
    """Run commands as a manager does; what becomes of them comes out of the queue."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    settings = ProcessSettings(environment=dict(os.environ), grace_s=0.5, launcher_log=directory / "log")
    async with asyncio.TaskGroup() as tasks:
        processes = Processes(settings, lambda _, event: events.put_nowait(event), tasks)
        runner = tasks.create_task(processes.run())
        yield processes, events
        await processes.aclose()
        runner.cancel()


@pytest.mark.parametrize("is_over", [False, True], ids=["it runs", "it is over"])
async def test_a_command_is_found_once_descriptors_are_there_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_over: bool
) -> None:
    directory, place = tmp_path / "operation", Place(workspace=str(tmp_path), working_directory=str(tmp_path))
    directory.mkdir()
    async with commands(tmp_path) as (processes, events):
        processes.start(
            "o1",
            str(directory),
            place,
            StartProcess(command=COUNTING, working_directory="", timeout_s=None, max_output_chars=99),
        )
        started = await events.get()
    if is_over:
        (tmp_path / "goes_on").touch()
        await eventually(lambda: process_records.read_exit(str(directory)) is not None)
    async with commands(tmp_path) as (processes, events):
        with no_descriptors():
            processes.watch(
                "o1", str(directory), process_table.boot_id(), WatchProcess(timeout_s=None, max_output_chars=99)
            )
            await eventually(lambda: "commands can't be looked at" in caplog.text)
            assert events.empty()
        if not is_over:
            assert await events.get() == started
        (tmp_path / "goes_on").touch()
        ended = await events.get()
    assert isinstance(ended, ProcessExited)
    assert (ended.exit_code, ended.stdout.head) == (3, "whole\n")
    assert len((tmp_path / "count").read_text().split()) == 1


def test_a_claim_is_found_where_no_more_can_be_written(tmp_path: Path) -> None:
    assert process_records.take_claim(str(tmp_path), process_records.own_claim())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        process_records.note_ending(str(tmp_path), "cancel")
        assert process_records.read_claim(str(tmp_path)) == process_records.own_claim()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert process_records.read_ending(str(tmp_path)) == ""
