"""Measures one tool turn beside the bare pipeline: input, response, commit, dispatch, `true`, result, response.

`python -m benchmarks.turn` prints p50, p99 and turns per second for 1 and 64 sessions, and the ratios to the floor of
the same run. Sessions are warm: each has had a turn before the clock starts.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.floor.one_process import OneProcessFloor
from benchmarks.floor.three_services import ThreeServicesFloor
from benchmarks.script import script_text, scripted_turns
from clients.coordinator import CoordinatorClient
from harness.app import open_coordinator
from harness.coordinator import Coordinator, CoordinatorConfig
from harness.operations.local_manager import LocalOperationManager
from harness.session_store.sqlite import SqliteSessionStore
from harness.tools.registry import default_registry
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

Turn = Callable[[int, int], Awaitable[None]]
"""Runs one tool turn of a session to its end, by the session's number and the turn's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run gave."""

    p50_ms: float
    p99_ms: float
    turns_per_s: float
    cpu_ms_per_turn: float


class Measurement(Protocol):
    """Measures one pipeline."""

    async def __call__(self, *, sessions: int, turns: int) -> Figures:
        """Run `turns` turns on each of `sessions` at once."""
        ...


async def measure(turn: Turn, *, sessions: int, turns: int) -> Figures:
    """Run `turns` turns on each session, the sessions at once, after one turn each that is not counted."""
    latencies: list[float] = []

    async def one_session(session: int, first: int, count: int) -> None:
        for number in range(first, first + count):
            begin = time.perf_counter()
            await turn(session, number)
            latencies.append(time.perf_counter() - begin)

    async def all_sessions(first: int, count: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for session in range(sessions):
                tasks.create_task(one_session(session, first, count))

    await all_sessions(0, 1)
    latencies.clear()
    gc.collect()
    begin, cpu = time.perf_counter(), time.process_time()
    await all_sessions(1, turns)
    elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
    ordered = sorted(latencies)
    return Figures(
        p50_ms=statistics.median(ordered) * 1000,
        p99_ms=ordered[int(len(ordered) * 0.99)] * 1000,
        turns_per_s=len(ordered) / elapsed,
        cpu_ms_per_turn=cpu / len(ordered) * 1000,
    )


async def measure_floor(*, sessions: int, turns: int) -> Figures:
    """Measure the bare pipeline."""
    with tempfile.TemporaryDirectory() as directory:
        floor = OneProcessFloor(Path(directory), scripted_turns(turns))
        try:
            return await measure(floor.turn, sessions=sessions, turns=turns)
        finally:
            await floor.close()


async def measure_embedded(*, sessions: int, turns: int) -> Figures:
    """Measure the product in one process."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workspace = directory / "workspace"
        workspace.mkdir()
        store = await stack.enter_async_context(SqliteSessionStore.open(directory / "store.sqlite"))
        manager = await stack.enter_async_context(LocalOperationManager.open(directory / "operations", name="local"))
        coordinator = await stack.enter_async_context(
            open_coordinator(
                store=store,
                managers={"local": manager},
                open_adapter=lambda _: scripted_turns(turns),
                tools=default_registry(),
                config=CoordinatorConfig(),
            )
        )
        await _create_sessions(coordinator, sessions, workspace)
        return await measure(_turn_of(coordinator), sessions=sessions, turns=turns)


async def measure_floor_of_services(*, sessions: int, turns: int) -> Figures:
    """Measure the bare pipeline of three gRPC servers."""
    async with ThreeServicesFloor.open(turns) as floor:
        return await measure(floor.turn, sessions=sessions, turns=turns)


async def measure_services(*, sessions: int, turns: int) -> Figures:
    """Measure the product as three processes, called over gRPC."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workspace, state = directory / "workspace", directory / "state"
        workspace.mkdir()
        script = directory / "script.json"
        script.write_text(script_text(turns))
        await stack.enter_async_context(_three_services(state, script))
        coordinator = await stack.enter_async_context(CoordinatorClient(f"unix:{state / 'coordinator.sock'}"))
        await _create_sessions(coordinator, sessions, workspace)
        return await measure(_turn_of(coordinator), sessions=sessions, turns=turns)


@asynccontextmanager
async def _three_services(state: Path, script: Path) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services", "--state-dir", str(state), "--script", str(script)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def _create_sessions(coordinator: Coordinator, sessions: int, workspace: Path) -> None:
    settings = session_pb2.SessionSettings(provider="scripted", model="m", workspace=str(workspace))
    for session in range(sessions):
        await coordinator.create_session(
            coordinator_pb2.CreateSessionRequest(session_id=f"s{session}", settings=settings)
        )


def _turn_of(coordinator: Coordinator) -> Turn:
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


async def main(turns_alone: int, turns_each: int) -> None:
    """Measure and print."""
    print("one tool turn: 4 durable commits, 2 scripted answers, 1 `true`; CPU is the caller's process alone")
    print(f"{'':31}{'p50 ms':>9}{'p99 ms':>9}{'turns/s':>9}{'CPU ms':>9}")
    for sessions, turns in ((1, turns_alone), (64, turns_each)):
        for floor_name, measure_bare, name, measure_ours in PAIRS:
            floor = await measure_bare(sessions=sessions, turns=turns)
            ours = await measure_ours(sessions=sessions, turns=turns)
            for label, figures in ((floor_name, floor), (name, ours)):
                print(
                    f"{label:21}{sessions:>3} at once{figures.p50_ms:>8.1f}{figures.p99_ms:>9.1f}"
                    f"{figures.turns_per_s:>9.0f}{figures.cpu_ms_per_turn:>9.1f}"
                )
            print(
                f"  {name} / floor: p50 x {ours.p50_ms / floor.p50_ms:.2f}, "
                f"turns per second x {ours.turns_per_s / floor.turns_per_s:.2f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns-alone", type=int, default=200)
    parser.add_argument("--turns-each", type=int, default=15)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.turns_alone, arguments.turns_each))
