"""What images hold beside the services: the probe for health, and the init, here as pid 1 of a namespace of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from services._server.server import ServerSettings, serve
from tests.support.eventually import eventually

# A service that leaves an orphan which ends at once and one which goes on, and says who it is.
SERVICE = """
import os, pathlib, subprocess, sys, time
here = pathlib.Path(sys.argv[1])
with (here / "starts").open("a") as starts:
    starts.write(f"{os.getpid()} {os.getppid()}\\n")
if not (here / "orphan").exists():
    subprocess.run(["bash", "-c", "true & sleep 60 & echo $! > " + str(here / "orphan")])
time.sleep(60)
"""


@asynccontextmanager
async def init(directory: Path, *arguments: str, text: str = SERVICE) -> AsyncIterator[asyncio.subprocess.Process]:
    (directory / "pretended.py").write_text(text)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.init", "pretended", str(directory), *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{directory}:{Path.cwd()}"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if (directory / "orphan").exists():
            orphan = int((directory / "orphan").read_text())
            if psutil.pid_exists(orphan):
                os.kill(orphan, signal.SIGKILL)


def starts(directory: Path) -> Sequence[Sequence[int]]:
    path = directory / "starts"
    return [[int(number) for number in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


async def test_a_service_that_dies_is_started_again_beside_its_commands(tmp_path: Path) -> None:
    async with init(tmp_path) as process:
        await eventually((tmp_path / "orphan").exists, within_s=10)
        orphan = psutil.Process(await eventually(lambda: int((tmp_path / "orphan").read_text() or 0), within_s=10))
        await eventually(lambda: orphan.ppid() == process.pid, within_s=10)
        os.kill(starts(tmp_path)[0][0], signal.SIGKILL)
        await eventually(lambda: len(starts(tmp_path)) == 2, within_s=10)
        assert orphan.is_running()
        assert [parent for _, parent in starts(tmp_path)] == [process.pid, process.pid]
        # Whatever ended is reaped: only the service and the orphan are left.
        await eventually(lambda: len(psutil.Process(process.pid).children()) == 2, within_s=10)
        orphan.kill()
        await eventually(lambda: len(psutil.Process(process.pid).children()) == 1, within_s=10)


async def test_a_signal_goes_to_the_service_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    text = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    text += "open(sys.argv[1] + '/ready', 'w').close()\ntime.sleep(60)\n"
    async with init(tmp_path, text=text) as process:
        await eventually((tmp_path / "ready").exists, within_s=10)
        process.terminate()
        assert await process.wait() == 7


async def test_a_setting_that_cannot_be_used_ends_the_container(tmp_path: Path) -> None:
    async with init(tmp_path, text="import sys\nsys.exit(2)\n") as process:
        assert await process.wait() == 2


def probe(address: str) -> int:
    return subprocess.run([sys.executable, "-m", "services.health", address], capture_output=True).returncode


async def test_the_probe_tells_whether_a_service_serves(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 's'}"
    assert await asyncio.to_thread(probe, address) == 1
    async with serve(ServerSettings(addresses=(address,)), []):
        assert await asyncio.to_thread(probe, address) == 0
    assert await asyncio.to_thread(probe, address) == 1
