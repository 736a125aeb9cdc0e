"""Measures the operation manager: starts, commands at once, exit to result, live output, huge output, cancelling.

`python -m benchmarks.operations`. A command says when it ended or wrote by bash's own clock, which is this machine's.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.load import at_once
from benchmarks.processes import PeakMemory
from benchmarks.results import COLUMNS, Chart, Latencies, Result, Size, Table
from benchmarks.suite import run_alone
from clients.operation_manager import DialledLink, ProxyOperationManager
from harness.operations import OperationManager, is_terminal
from harness.primitives.streams import closing
from tests.support.manager_service import ManagerProcess, manager_process
from tests.support.operations import acknowledging, adding, bash, cancelling
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

MIB = 2**20
TREE = "for i in $(seq 10); do (sleep 600 & sleep 600 & wait) & done; echo up; wait"
"""Thirty processes below one command."""

SAYS_WHEN_IT_ENDS = 'printf %s "$EPOCHREALTIME"'
SPEAKS = 'for i in $(seq {count}); do echo "$EPOCHREALTIME"; read -t 0.05 <> <(:) || :; done'
"""A line each 50 ms without a program beside bash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How much is measured."""

    starts: int
    at_once: int
    """Commands that sleep."""

    samples: int
    lines: int
    output_bytes: int
    cancels: int


PARAMETERS: dict[Size, Parameters] = {
    "tiny": Parameters(starts=4, at_once=4, samples=2, lines=2, output_bytes=MIB, cancels=1),
    "quick": Parameters(starts=64, at_once=50, samples=5, lines=5, output_bytes=10 * MIB, cancels=1),
    "full": Parameters(starts=1_000, at_once=2_000, samples=100, lines=40, output_bytes=1_024 * MIB, cancels=10),
}


@dataclass(slots=True)
class _Found:
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[list[str | float]] = field(default_factory=list)
    latencies: dict[str, Latencies] = field(default_factory=dict)


class _Manager:
    """A manager's process, and its reports as they come in."""

    def __init__(self, proxy: OperationManager, process: ManagerProcess, workspace: Path) -> None:
        self.proxy = proxy
        self.process = process
        self.workspace = workspace
        self._ends: dict[str, asyncio.Future[tuple[operation_pb2.Operation, float]]] = {}
        self._runs: dict[str, asyncio.Event] = {}

    async def follow(self) -> None:
        """Take reports for ever."""
        async with closing(self.proxy.watch_operations(manager_pb2.WatchOperationsRequest())) as reports:
            async for report in reports:
                now = time.time()
                operation = report.update.operation
                if operation.bash.process_id and operation.operation_id in self._runs:
                    self._runs[operation.operation_id].set()
                end = self._ends.get(operation.operation_id)
                if end is not None and is_terminal(operation) and not end.done():
                    end.set_result((operation, now))

    async def add(self, *operations: operation_pb2.Operation) -> None:
        """Hand operations over."""
        for one in operations:
            self._ends[one.operation_id] = asyncio.get_running_loop().create_future()
            self._runs[one.operation_id] = asyncio.Event()
        await self.proxy.add_operations(adding(operations, self.workspace))

    async def runs(self, operation: operation_pb2.Operation) -> None:
        """Wait until a command runs."""
        await self._runs[operation.operation_id].wait()

    async def end(self, operation: operation_pb2.Operation) -> tuple[operation_pb2.Operation, float]:
        """Return an operation's last state and the wall time at which it was reported."""
        ended, when = await self._ends[operation.operation_id]
        del self._ends[operation.operation_id], self._runs[operation.operation_id]
        await self.proxy.acknowledge_updates(acknowledging(ended))
        return ended, when

    async def run(self, operation: operation_pb2.Operation) -> tuple[operation_pb2.Operation, float]:
        """Run an operation to its end."""
        await self.add(operation)
        return await self.end(operation)


@asynccontextmanager
async def _manager(*flags: str) -> AsyncIterator[_Manager]:
    with tempfile.TemporaryDirectory() as directory:
        async with (
            manager_process(Path(directory) / "m", *flags) as process,
            ProxyOperationManager(DialledLink(process.address)) as proxy,
            asyncio.TaskGroup() as tasks,
        ):
            manager = _Manager(proxy, process, Path(directory))
            following = tasks.create_task(manager.follow())
            yield manager
            following.cancel()


async def measure(parameters: Parameters) -> Result:
    """Measure everything, on three managers."""
    found = _Found()
    async with _manager() as manager:
        await _starts(found, manager, parameters)
        await _exits(found, manager, parameters)
        await _live_output(found, manager, parameters)
        await _cancels(found, manager, parameters)
    async with _manager("--concurrency", str(parameters.at_once)) as manager:
        await _many(found, manager, parameters)
    async with _manager() as manager:
        await _huge_output(found, manager, parameters)
    rows: list[list[str | float]] = [[name, *one.row()] for name, one in found.latencies.items()]
    tables = [
        Table(title="operations: times", columns=("what", *COLUMNS), rows=rows),
        Table(title="operations: figures", columns=("what", "figure"), rows=found.rows),
    ]
    charts = [
        Chart(
            name="operations",
            title="Operations: distribution of times",
            x_label="percentile",
            y_label="ms",
            is_log_y=True,
            series={name: one.spread() for name, one in found.latencies.items()},
        )
    ]
    return Result(suite="operations", figures=found.figures, tables=tables, charts=charts)


def _note(found: _Found, name: str, figure: float) -> None:
    found.figures[name] = figure
    found.rows.append([name, figure])


async def _starts(found: _Found, manager: _Manager, parameters: Parameters) -> None:
    async def bare(_: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *("/bin/bash", "-c", "true"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        await process.wait()

    callers = min(64, parameters.starts)
    _, bare_rate = await at_once(bare, callers=callers, count=parameters.starts // callers)

    async def whole(_: int) -> None:
        await manager.run(bash("true"))

    _, rate = await at_once(whole, callers=callers, count=parameters.starts // callers)
    _note(found, "starts/s bare asyncio", bare_rate)
    _note(found, "starts/s manager", rate)
    _note(found, "starts / bare", rate / bare_rate)


async def _exits(found: _Found, manager: _Manager, parameters: Parameters) -> None:
    exits, runs = Latencies(), Latencies()
    for _ in range(parameters.samples):
        begin = time.perf_counter()
        operation, reported = await manager.run(bash(SAYS_WHEN_IT_ENDS))
        runs.record(time.perf_counter() - begin)
        exits.record(reported - float(operation.bash.stdout.head))
    found.latencies["exit to result"] = exits
    found.latencies["add to result of `true`"] = runs
    found.figures["exit to result p50 ms"] = exits.ms(50)


async def _live_output(found: _Found, manager: _Manager, parameters: Parameters) -> None:
    latencies = Latencies()
    operation = bash(SPEAKS.format(count=parameters.lines))
    await manager.add(operation)
    await manager.runs(operation)
    request = manager_pb2.ReadOutputRequest(
        operation_id=operation.operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT, follow=True
    )
    async for piece in manager.proxy.read_output(request):
        now = time.time()
        for line in piece.data.split():
            latencies.record(now - float(line))
    await manager.end(operation)
    found.latencies["live output"] = latencies
    found.figures["live output p50 ms"] = latencies.ms(50)


async def _cancels(found: _Found, manager: _Manager, parameters: Parameters) -> None:
    latencies = Latencies()
    for _ in range(parameters.cancels):
        operation = bash(TREE)
        await manager.add(operation)
        request = manager_pb2.ReadOutputRequest(
            operation_id=operation.operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT, follow=True
        )
        await manager.runs(operation)
        async with closing(manager.proxy.read_output(request)) as pieces:
            await anext(pieces)
        begin = time.perf_counter()
        await manager.proxy.cancel_operation(cancelling(operation.operation_id))
        await manager.end(operation)
        latencies.record(time.perf_counter() - begin)
    found.latencies["cancel of 31 processes"] = latencies
    found.figures["cancel a tree p50 ms"] = latencies.ms(50)


async def _many(found: _Found, manager: _Manager, parameters: Parameters) -> None:
    commands = [bash("read <> <(sleep 600)") for _ in range(parameters.at_once)]
    async with PeakMemory(manager.process.process.pid) as memory:
        begin = time.perf_counter()
        await manager.add(*commands)
        for one in commands:
            await manager.runs(one)
        elapsed = time.perf_counter() - begin
    _note(found, "commands at once", len(commands))
    _note(found, "seconds until all run", elapsed)
    _note(found, "manager KiB per command", (memory.peak_bytes - memory.before_bytes) / 1024 / len(commands))
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for one in commands:
            tasks.create_task(manager.proxy.cancel_operation(cancelling(one.operation_id)))
    for one in commands:
        await manager.end(one)
    _note(found, "seconds until all are cancelled", time.perf_counter() - begin)


async def _huge_output(found: _Found, manager: _Manager, parameters: Parameters) -> None:
    await manager.run(bash("true"))
    async with PeakMemory(manager.process.process.pid) as memory:
        operation, _ = await manager.run(bash(f"head -c {parameters.output_bytes} /dev/zero | tr '\\0' x"))
    _note(found, "MiB of output", operation.bash.stdout.total_bytes / MIB)
    _note(found, "manager grows by MiB", (memory.peak_bytes - memory.before_bytes) / MIB)


if __name__ == "__main__":
    run_alone(measure, PARAMETERS)
