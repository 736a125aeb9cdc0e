"""`python -m services`: three processes that are started, watched, started again and ended as one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from clients.cli.state_dir import StateDirectory
from clients.coordinator import CoordinatorClient
from tests.support.eventually import eventually
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2

ROOT = Path(__file__).resolve().parents[2]

NAMES = {"coordinator", "operation_manager", "session_store"}


class Services:
    """The command, and what it has started."""

    def __init__(self, process: asyncio.subprocess.Process, state: StateDirectory) -> None:
        self.process = process
        self.state = state

    def children(self) -> dict[str, psutil.Process]:
        """Return the services that run, by name."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
                words = [word for word in child.cmdline() if word.startswith("services.")]
                # One that is still being forked has its parent's words.
                if len(words) == 2:
                    found[words[1].removeprefix("services.")] = child
        return found

    @property
    def output(self) -> str:
        """What was written to standard output so far."""
        return self.state.path.with_suffix(".out").read_text()

    @property
    def complaint(self) -> str:
        """What was written to standard error so far."""
        return self.state.path.with_suffix(".err").read_text()

    async def instance(self) -> str:
        """Return which process the coordinator is; waits until it is there."""
        async with CoordinatorClient(self.state.server_address() or "", patience_s=10) as client:
            return (await client.get_server_info(coordinator_pb2.GetServerInfoRequest())).info.instance_id


@asynccontextmanager
async def services(state_path: Path, *flags: str) -> AsyncIterator[Services]:
    """Run them until the end of the block."""
    command = [sys.executable, "-m", "services", "--state-dir", str(state_path), *flags]
    state_path.parent.mkdir(exist_ok=True)
    out_path, err_path = state_path.with_suffix(".out"), state_path.with_suffix(".err")
    with out_path.open("w") as out, err_path.open("w") as err:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=err, stdin=asyncio.subprocess.DEVNULL
        )
    state = StateDirectory(path=state_path, is_default=False)
    try:
        await eventually(lambda: state.server_address(), within_s=10)
        yield Services(process, state)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def test_each_says_where_it_listens_and_all_end_together(tmp_path: Path) -> None:
    async with services(tmp_path / "state", "--listen", "127.0.0.1:0") as running:
        await eventually(lambda: running.output.count(" listens on ") == 4)
        children = running.children()
        assert set(children) == NAMES
        running.process.terminate()
        assert (await running.process.wait(), running.complaint) == (0, "")
        listening = {line.split(" listens on ")[0] for line in running.output.splitlines() if " listens on " in line}
        assert listening == {"coordinator", "operation-manager", "session-store"}
        assert running.output.count("coordinator listens on 127.0.0.1:") == 1
        assert not any(child.is_running() for child in children.values())
    assert running.state.server_address() is None
    with running.state.hold():
        pass


async def test_what_dies_is_started_again(tmp_path: Path) -> None:
    async with services(tmp_path / "state") as running:
        before = await running.instance()
        children = running.children()
        for child in children.values():
            child.kill()
        await eventually(lambda: _are_new(running, children), within_s=10)
        assert await running.instance() != before
        assert running.process.returncode is None
        running.process.terminate()
        await running.process.wait()
        assert running.complaint.count("ended (signal SIGKILL); it is started again in 0.1 s") == 3


def _are_new(running: Services, old: dict[str, psutil.Process]) -> bool:
    now = running.children()
    return set(now) == NAMES and not {child.pid for child in now.values()} & {child.pid for child in old.values()}


async def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    async with services(tmp_path / "state") as running:
        await running.instance()
        await eventually(lambda: set(running.children()) == NAMES)
        children = running.children()
        children["coordinator"].suspend()  # it can't answer the first
        await eventually(lambda: _is_ended(running.process), within_s=10)
        assert await running.process.wait() == 1
        await eventually(lambda: not any(_runs(child) for child in children.values()))


async def test_children_of_a_killed_parent_end_and_hold_the_directory_until_then(tmp_path: Path) -> None:
    async with services(tmp_path / "state") as running:
        await running.instance()
        await eventually(lambda: set(running.children()) == NAMES)
        children = running.children()
        children["session_store"].suspend()
        running.process.kill()
        await running.process.wait()
        assert running.state.holder() is not None
        children["session_store"].resume()
        await eventually(lambda: not any(_runs(child) for child in children.values()), within_s=10)
        await eventually(lambda: running.state.holder() is None)
        assert running.state.server_address() is None
        assert "forced" not in running.complaint


async def test_what_can_not_be_started_is_told_and_ends_all(tmp_path: Path) -> None:
    for flags, code, word in (
        (["--listen", "nonsense"], 2, "'nonsense'"),
        (["--script", str(tmp_path / "missing.json")], 1, "missing.json"),
        (["--nonsense"], 2, "--nonsense"),
    ):
        command = [sys.executable, "-m", "services", "--state-dir", str(tmp_path / "state"), *flags]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=20)
        assert done.returncode == code
        assert word in done.stderr
        assert done.stderr.endswith("services: coordinator could not be started; all is ended\n")


async def test_a_long_path_has_its_sockets_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / ("long-" * 20) / "state"
    async with services(path) as running:
        assert await running.instance()
        place = running.state.socket_directory()
        assert place != path
        assert place.stat().st_mode & 0o077 == 0
        assert place.stat().st_uid == os.getuid()


async def test_the_example_of_a_client_asks_and_is_answered(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(
        '{"responses": [{"tool_calls": [{"name": "Bash", "arguments": {"command": "echo one"}}]},'
        ' {"expect": "one", "text": "Done."}]}'
    )
    async with services(tmp_path / "state", "--script", str(script)) as running:
        await running.instance()
        address = running.state.server_address() or ""
        command = [sys.executable, str(ROOT / "examples" / "client.py"), address, "Say one."]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, cwd=tmp_path, timeout=20
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert [line.strip() for line in done.stdout.splitlines() if line.strip()][0] == "one"
        assert done.stdout.endswith("Done.\n")


def _is_ended(process: asyncio.subprocess.Process) -> bool:
    """Send SIGTERM, again and again: two that come at once are one."""
    if process.returncode is None:
        # Not by the process's own method: that would collect it, and its exit code would be lost (Python 3.11).
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
    return process.returncode is not None


def _runs(child: psutil.Process) -> bool:
    # Nobody may be there to collect a child whose parent was killed.
    return child.is_running() and child.status() != psutil.STATUS_ZOMBIE
