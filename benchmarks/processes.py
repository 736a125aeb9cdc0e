"""CPU time and memory of processes and of what they started."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import psutil


def cpu_s(pid: int) -> float:
    """Return CPU seconds of a process and its descendants, those that it waited for included."""
    total = 0.0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


class CpuMeter:
    """CPU seconds of named processes, children of this one, since it was made."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = self._now()

    def used(self) -> dict[str, float]:
        """Return seconds by name; "caller" is this process without the named ones."""
        now = self._now()
        return {name: now[name] - self._before[name] for name in now}

    def _now(self) -> dict[str, float]:
        named = {name: cpu_s(pid) for name, pid in self._pids.items()}
        return {"caller": cpu_s(os.getpid()) - sum(named.values()), **named}


def memory_bytes(pid: int) -> int:
    """Return the private memory of a process: what would be free without it."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError("no Pss in smaps_rollup")


class PeakMemory:
    """Watches a process's memory, with `async with`; `peak_bytes` is the highest seen, also by the kernel."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.before_bytes = 0
        self.peak_bytes = 0
        self._tasks = asyncio.TaskGroup()
        self._watching: asyncio.Task[None]

    async def __aenter__(self) -> PeakMemory:
        self.before_bytes = self.peak_bytes = psutil.Process(self._pid).memory_info().rss
        await self._tasks.__aenter__()
        self._watching = self._tasks.create_task(self._watch())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._look()
        self._watching.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(0.02)

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, psutil.Process(self._pid).memory_info().rss)
