"""Measures the time from SIGKILL of a service, restarted at once, until a turn that was begun meanwhile is done.

`python -m benchmarks.recovery`. The turn is a whole tool turn, and the client is not told of anything.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass

from benchmarks.deployment import deployed
from benchmarks.results import COLUMNS, Chart, Latencies, Result, Size, Table
from benchmarks.script import script_of
from benchmarks.suite import run_alone
from benchmarks.turn import create_sessions, turn_of
from tests.support.stack import COORDINATOR, MANAGER, STORE, Stack

SERVICES = (STORE, MANAGER, COORDINATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How much is measured."""

    kills: int
    """Of each service."""


PARAMETERS: dict[Size, Parameters] = {
    "tiny": Parameters(kills=1),
    "quick": Parameters(kills=1),
    "full": Parameters(kills=20),
}


async def measure(parameters: Parameters) -> Result:
    """Kill each service in turn."""
    found = {name: Latencies() for name in SERVICES}
    undisturbed = Latencies()
    turns = parameters.kills * len(SERVICES) * 2 + 1
    async with deployed(script_of(turns)) as deployment, deployment.stack.client() as coordinator:
        await create_sessions(coordinator, 1, deployment.stack.workspace)
        turn = turn_of(coordinator)
        await turn(0, 0)
        number = 0
        for _ in range(parameters.kills):
            for name in SERVICES:
                begin = time.perf_counter()
                await turn(0, number := number + 1)
                undisturbed.record(time.perf_counter() - begin)
                begin = time.perf_counter()
                deployment.stack.signal(name, signal.SIGKILL)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_restart(deployment.stack, name))
                    await turn(0, number := number + 1)
                    found[name].record(time.perf_counter() - begin)
    rows: list[list[str | float]] = [["no kill", *undisturbed.row()]]
    rows += [[name, *one.row()] for name, one in found.items()]
    chart = Chart(
        name="recovery",
        title="From SIGKILL to a turn that is done",
        x_label="percentile",
        y_label="ms",
        series={"no kill": undisturbed.spread(), **{name: one.spread() for name, one in found.items()}},
    )
    return Result(
        suite="recovery",
        figures={
            **{f"{name} p50 ms": one.ms(50) for name, one in found.items()},
            "slowest service p50 ms": max(one.ms(50) for one in found.values()),
        },
        tables=[Table(title="SIGKILL to going on", columns=("service", *COLUMNS), rows=rows)],
        charts=[chart],
    )


async def _restart(stack: Stack, name: str) -> None:
    await stack.wait(name)
    await stack.start(name)


if __name__ == "__main__":
    run_alone(measure, PARAMETERS)
