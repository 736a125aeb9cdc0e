"""Measures one tool turn beside the bare pipeline: input, response, commit, dispatch, `true`, result, response.

`python -m benchmarks.turn` prints p50, p99, turns per second and CPU per turn by process, for 1, 16 and 64 sessions, of
the product in one process and as three services, each right after the floor of its kind. Sessions are warm: each has
had a turn before the clock starts.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.deployment import deployed
from benchmarks.embedded import embedded
from benchmarks.floor.one_process import OneProcessFloor
from benchmarks.floor.three_services import ThreeServicesFloor
from benchmarks.processes import CpuMeter
from benchmarks.results import Chart, Latencies, Result, Size, Table
from benchmarks.script import script_of, scripted_turns
from benchmarks.suite import run_alone
from harness.coordinator import Coordinator
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

Turn = Callable[[int, int], Awaitable[None]]
"""Runs one tool turn of a session to its end, by the session's number and the turn's."""

PROCESSES = ("caller", "coordinator", "session-store", "operation-manager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How much is measured."""

    turns_by_sessions: Mapping[int, int]
    """How many turns each of so many sessions at once makes."""

    rounds: int
    """How often floor and product take turns; of each the round with the median rate counts."""


PARAMETERS: dict[Size, Parameters] = {
    "tiny": Parameters(turns_by_sessions={2: 1}, rounds=1),
    "quick": Parameters(turns_by_sessions={1: 5, 64: 1}, rounds=1),
    "full": Parameters(turns_by_sessions={1: 150, 16: 20, 64: 10}, rounds=3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run gave."""

    latencies: Latencies
    turns_per_s: float
    cpu_ms: Mapping[str, float]
    """CPU per turn by process; the commands' own CPU goes to who runs them."""


class Measurement(Protocol):
    """Measures one pipeline."""

    async def __call__(self, *, sessions: int, turns: int) -> Figures:
        """Run `turns` turns on each of `sessions` at once."""
        ...


async def measure_turns(turn: Turn, *, sessions: int, turns: int, pids: Mapping[str, int]) -> Figures:
    """Run `turns` turns on each session, the sessions at once, after one turn each that is not counted."""
    latencies = Latencies()

    async def one_session(session: int, first: int, count: int, into: Latencies) -> None:
        for number in range(first, first + count):
            begin = time.perf_counter()
            await turn(session, number)
            into.record(time.perf_counter() - begin)

    async def all_sessions(first: int, count: int, into: Latencies) -> None:
        async with asyncio.TaskGroup() as tasks:
            for session in range(sessions):
                tasks.create_task(one_session(session, first, count, into))

    await all_sessions(0, 1, Latencies())
    gc.collect()
    cpu, begin = CpuMeter(pids), time.perf_counter()
    await all_sessions(1, turns, latencies)
    elapsed, used = time.perf_counter() - begin, cpu.used()
    return Figures(
        latencies=latencies,
        turns_per_s=latencies.count / elapsed,
        cpu_ms={name: seconds / latencies.count * 1000 for name, seconds in used.items()},
    )


async def measure_floor(*, sessions: int, turns: int) -> Figures:
    """Measure the bare pipeline."""
    with tempfile.TemporaryDirectory() as directory:
        floor = OneProcessFloor(Path(directory), scripted_turns(turns))
        try:
            return await measure_turns(floor.turn, sessions=sessions, turns=turns, pids={})
        finally:
            await floor.close()


async def measure_embedded(*, sessions: int, turns: int) -> Figures:
    """Measure the product in one process."""
    async with embedded(scripted_turns(turns)) as world:
        await create_sessions(world.coordinator, sessions, world.workspace)
        return await measure_turns(turn_of(world.coordinator), sessions=sessions, turns=turns, pids={})


async def measure_floor_of_services(*, sessions: int, turns: int) -> Figures:
    """Measure the bare pipeline of three gRPC servers."""
    async with ThreeServicesFloor.open(turns) as floor:
        return await measure_turns(floor.turn, sessions=sessions, turns=turns, pids=floor.pids)


async def measure_services(*, sessions: int, turns: int) -> Figures:
    """Measure the product as three processes, called over gRPC."""
    async with deployed(script_of(turns)) as deployment, deployment.stack.client() as coordinator:
        await create_sessions(coordinator, sessions, deployment.stack.workspace)
        return await measure_turns(turn_of(coordinator), sessions=sessions, turns=turns, pids=deployment.stack.pids)


async def create_sessions(coordinator: Coordinator, sessions: int, workspace: Path) -> None:
    """Make sessions that `turn_of` runs turns of."""
    settings = session_pb2.SessionSettings(provider="scripted", model="m", workspace=str(workspace))
    for session in range(sessions):
        await coordinator.create_session(
            coordinator_pb2.CreateSessionRequest(session_id=f"s{session}", settings=settings)
        )


def turn_of(coordinator: Coordinator) -> Turn:
    """Return what submits an input and waits until the session rests."""

    async def turn(session: int, number: int) -> None:
        session_id = f"s{session}"
        part = llm_pb2.ContentPart(text=llm_pb2.TextPart(text="go on"))
        message = item_pb2.Input(input_id=f"i{number}", content=item_pb2.Content(parts=[part]))
        accepted = await coordinator.submit_input(
            coordinator_pb2.SubmitInputRequest(session_id=session_id, input=message)
        )
        request = coordinator_pb2.WatchSessionRequest(
            session_id=session_id, after_revision=accepted.revision, until_idle=True
        )
        async for event in coordinator.watch_session(request):
            if event.HasField("rest_reached"):
                assert event.rest_reached.rest.session_state == session_pb2.SESSION_STATE_IDLE

    return turn


PAIRS: tuple[tuple[str, Measurement, str, Measurement], ...] = (
    ("floor, one process", measure_floor, "embedded", measure_embedded),
    ("floor, three servers", measure_floor_of_services, "three services", measure_services),
)


async def measure(parameters: Parameters) -> Result:
    """Measure the four pipelines, floor and product in alternation."""
    found: dict[tuple[str, int], Figures] = {}
    ratios: dict[str, float] = {}
    for sessions, turns in parameters.turns_by_sessions.items():
        for floor_name, measure_bare, name, measure_ours in PAIRS:
            bare: list[Figures] = []
            ours: list[Figures] = []
            for _ in range(parameters.rounds):
                bare.append(await measure_bare(sessions=sessions, turns=turns))
                ours.append(await measure_ours(sessions=sessions, turns=turns))
            floor, product = _middle(bare), _middle(ours)
            found[floor_name, sessions], found[name, sessions] = floor, product
            ratios[f"{name} {sessions} p50 / floor"] = product.latencies.ms(50) / floor.latencies.ms(50)
            ratios[f"{name} {sessions} turns/s / floor"] = product.turns_per_s / floor.turns_per_s
    return _result(found, ratios)


def _middle(runs: Sequence[Figures]) -> Figures:
    return sorted(runs, key=lambda one: one.turns_per_s)[len(runs) // 2]


def _result(found: Mapping[tuple[str, int], Figures], ratios: Mapping[str, float]) -> Result:
    figures = dict(ratios)
    rows: list[list[str | float]] = []
    for (name, sessions), one in found.items():
        p50, _, p99, _ = one.latencies.row()
        cpu = [one.cpu_ms.get(process, 0.0) for process in PROCESSES]
        rows.append([name, str(sessions), p50, p99, one.turns_per_s, sum(cpu), *cpu])
        figures |= {f"{name} {sessions} p50 ms": p50, f"{name} {sessions} turns/s": one.turns_per_s}
        figures[f"{name} {sessions} CPU ms per turn"] = sum(cpu)
    columns = ("pipeline", "sessions", "p50 ms", "p99 ms", "turns/s", "CPU ms/turn", *PROCESSES)
    table = Table(title="one tool turn: 4 durable commits, 2 scripted answers, 1 `true`", columns=columns, rows=rows)
    ratio_rows: list[list[str | float]] = [[name, ratio] for name, ratio in ratios.items()]
    beside = Table(title="beside the floor of the same run", columns=("what", "ratio"), rows=ratio_rows)
    most = max(sessions for _, sessions in found)
    names = list(dict.fromkeys(name for name, _ in found))
    counts = list(dict.fromkeys(sessions for _, sessions in found))
    charts = [
        Chart(
            name="turns-per-second",
            title="Tool turns per second",
            x_label="sessions at once",
            y_label="turns per second",
            kind="bars",
            series={name: [(str(count), found[name, count].turns_per_s) for count in counts] for name in names},
        ),
        Chart(
            name="turn-latency",
            title="One tool turn, median",
            x_label="sessions at once",
            y_label="ms",
            kind="bars",
            series={name: [(str(count), found[name, count].latencies.ms(50)) for count in counts] for name in names},
        ),
        Chart(
            name="turn-cpu",
            title=f"CPU per tool turn by process, {most} sessions",
            x_label="CPU ms per turn",
            y_label="",
            kind="stacked",
            series={
                process: [(name, found[name, most].cpu_ms.get(process, 0.0)) for name in names] for process in PROCESSES
            },
        ),
    ]
    return Result(suite="turn", figures=figures, tables=[table, beside], charts=charts)


if __name__ == "__main__":
    run_alone(measure, PARAMETERS)
