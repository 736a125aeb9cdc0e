"""Counts forks in a process that serves an operation manager. `python -m tests.support.counted_forks DIRECTORY`.

libc runs what is registered with `pthread_atfork` before every fork, and for neither vfork nor posix_spawn.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path

import psutil
from PIL import Image

from tests.support.eventually import eventually
from tests.support.manager_service import served_manager
from tests.support.operations import bash, other, run
from unreal_agent.operation.v1 import operation_pb2

_forks: list[int] = []
_before_fork = ctypes.CFUNCTYPE(None)(lambda: _forks.append(os.getpid()))


def launchers() -> list[psutil.Process]:
    """Return the launchers of this process."""
    return [one for one in psutil.Process().children() if _is_launcher(one)]


def _is_launcher(child: psutil.Process) -> bool:
    try:
        return "launcher.py" in " ".join(child.cmdline())
    except psutil.NoSuchProcess:  # ended while it was looked at; a zombie counts as such
        return False


async def main(directory: Path) -> None:
    """Have the service execute whatever it may, then fork."""
    image = Image.new("RGB", (8, 8))
    image.save(directory / "dot.png")
    async with served_manager(directory / "state") as (_, manager):
        ctypes.CDLL(None).__register_atfork(_before_fork, None, None, None)
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(run(manager, bash("true"), directory)) for _ in range(11)]
        view = other("view_image", operation_pb2.ViewImageState(path="dot.png"))
        ended = [one.result() for one in runs] + [await run(manager, view, directory)]
        (launcher,) = launchers()
        launcher.send_signal(signal.SIGKILL)
        await eventually(lambda: launchers() not in ([], [launcher]))
        ended.append(await run(manager, bash("true"), directory))
        assert all(one.status == operation_pb2.OPERATION_STATUS_COMPLETED for one in ended), ended
        sys.stdout.write(f"12 commands, 1 image, 2 launchers: {len(_forks)} forks\n")
        sys.stdout.flush()
    if os.fork() == 0:
        os._exit(0)
    sys.stdout.write(f"then {len(_forks)} fork\n")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
