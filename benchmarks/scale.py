"""Measures what sessions cost in memory: at rest in the coordinator, and out of it; and many with work at random.

`python -m benchmarks.scale`. Memory is the proportional set size of each service. A session has had one turn.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.deployment import deployed
from benchmarks.load import open_loop
from benchmarks.processes import memory_bytes
from benchmarks.results import COLUMNS, Chart, Latencies, Result, Size, Table
from benchmarks.suite import run_alone
from clients.session_store import RemoteSessionStore
from harness.coordinator import Coordinator
from tests.support.eventually import eventually
from tests.support.stack import COORDINATOR, STORE, Stack
from tests.support.world import Script, text_message
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

SCRIPT: Script = [{"text": "done"}]
KIB = 1024
GIB = 2**30
AT_ONCE = 32

_OverTime = Mapping[str, Sequence[tuple[float | str, float]]]
"""Seconds and MiB, by service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How much is measured."""

    resident: int
    """Sessions that had a turn."""

    sessions: int
    """Sessions that there are while work arrives."""

    inputs_per_s: float
    seconds: float
    idle_s: float
    """After this long a session leaves memory, where it may."""


PARAMETERS: dict[Size, Parameters] = {
    "tiny": Parameters(resident=4, sessions=4, inputs_per_s=20, seconds=0.2, idle_s=0.2),
    "quick": Parameters(resident=50, sessions=50, inputs_per_s=20, seconds=1.0, idle_s=0.5),
    "full": Parameters(resident=1_000, sessions=10_000, inputs_per_s=20, seconds=30.0, idle_s=5.0),
}


async def measure(parameters: Parameters) -> Result:
    """Measure both."""
    resident = await _resident(parameters)
    passivated, over_time, latencies = await _passivated_and_work(parameters)
    rows: list[list[str | float]] = [
        [kind, found / KIB, _per_gib(found)] for kind, found in (("resident", resident), ("passivated", passivated))
    ]
    columns = ("sessions", "KiB each, coordinator", "per GiB")
    title = f"{parameters.sessions:,} sessions, {parameters.inputs_per_s:g} inputs/s at random"
    work_rows: list[list[str | float]] = [["input to rest", str(latencies.count), *latencies.row()]]
    tables = [
        Table(title=f"memory of {parameters.resident:,} sessions at rest", columns=columns, rows=rows),
        Table(title=title, columns=("what", "inputs", *COLUMNS), rows=work_rows),
    ]
    chart = Chart(
        name="memory",
        title=f"Memory: {title}",
        x_label="seconds",
        y_label="MiB",
        series=over_time,
    )
    return Result(
        suite="scale",
        figures={
            "resident session KiB": resident / KIB,
            "passivated session KiB": passivated / KIB,
            "input to rest p99 ms": latencies.ms(99),
        },
        tables=tables,
        charts=[chart],
    )


def _per_gib(session_bytes: float) -> str:
    return f"{GIB / session_bytes:,.0f}" if session_bytes >= KIB / 4 else "no bound seen"


async def _resident(parameters: Parameters) -> float:
    """Return what sessions cost that stay in memory."""
    async with deployed(SCRIPT, flags={COORDINATOR: ("--idle-seconds", "3600")}) as deployment:
        return await _bytes_per_session(deployment.stack, parameters, stays=True)


async def _passivated_and_work(parameters: Parameters) -> tuple[float, _OverTime, Latencies]:
    """Return what sessions cost that left memory; memory over time while work arrives; and the time to rest."""
    flags = {COORDINATOR: ("--idle-seconds", str(parameters.idle_s))}
    async with deployed(SCRIPT, flags=flags) as deployment:
        passivated = await _bytes_per_session(deployment.stack, parameters, stays=False)
        return passivated, *await _random_work(deployment.stack, parameters)


async def _bytes_per_session(stack: Stack, parameters: Parameters, *, stays: bool) -> float:
    """Return what the coordinator's memory grew by for each session; the first ones are not counted."""
    async with stack.client() as coordinator:
        pid = stack.pids[COORDINATOR]
        # Those that leave must have been as many before: the allocator keeps what it once needed.
        await _run_sessions(
            stack, coordinator, "warm", max(4, parameters.resident // 10) if stays else parameters.resident
        )
        if not stays:
            await _all_left(stack)
        before = memory_bytes(pid)
        await _run_sessions(stack, coordinator, "s", parameters.resident)
        if not stays:
            await _all_left(stack)
        return max(0.0, (memory_bytes(pid) - before) / parameters.resident)


async def _run_sessions(stack: Stack, coordinator: Coordinator, prefix: str, count: int) -> None:
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            session_id = f"{prefix}{number}"
            settings = session_pb2.SessionSettings(provider="scripted", model="m", workspace=str(stack.workspace))
            await coordinator.create_session(
                coordinator_pb2.CreateSessionRequest(session_id=session_id, settings=settings)
            )
            await _run(coordinator, session_id, "i1")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(some())


async def _run(coordinator: Coordinator, session_id: str, input_id: str) -> None:
    accepted = await coordinator.submit_input(
        coordinator_pb2.SubmitInputRequest(session_id=session_id, input=text_message(input_id, "go on"))
    )
    request = coordinator_pb2.WatchSessionRequest(
        session_id=session_id, after_revision=accepted.revision, until_idle=True
    )
    async for _ in coordinator.watch_session(request):
        pass


async def _all_left(stack: Stack) -> None:
    """Wait until no session is owned by a coordinator any more."""
    async with RemoteSessionStore(stack.addresses[STORE]) as store:

        async def nobody_owns_one() -> bool:
            token = ""
            while True:
                page = await store.list_sessions(store_pb2.ListSessionsRequest(page_size=1_000, page_token=token))
                if any(session.HasField("owner") for session in page.sessions):
                    return False
                token = page.next_page_token
                if not token:
                    return True

        await eventually(nobody_owns_one, within_s=60)


async def _random_work(stack: Stack, parameters: Parameters) -> tuple[_OverTime, Latencies]:
    """Let inputs arrive at sessions chosen at random."""
    rng = random.Random(1)
    await _create_at_rest(stack, parameters.sessions)
    async with stack.client() as coordinator:
        samples: dict[str, list[tuple[float | str, float]]] = {name: [] for name in stack.pids}
        begin = time.perf_counter()

        async def sample() -> None:
            while True:
                for name, pid in stack.pids.items():
                    samples[name].append((time.perf_counter() - begin, memory_bytes(pid) / 2**20))
                await asyncio.sleep(parameters.seconds / 30)

        async with asyncio.TaskGroup() as tasks:
            sampling = tasks.create_task(sample())
            latencies = await open_loop(
                lambda number: _run(coordinator, f"r{rng.randrange(parameters.sessions)}", f"random-{number}"),
                rate=parameters.inputs_per_s,
                seconds=parameters.seconds,
                limit=100_000,
            )
            sampling.cancel()
        return samples, latencies


async def _create_at_rest(stack: Stack, count: int) -> None:
    """Make sessions in the store alone, many at once."""
    settings = session_pb2.SessionSettings(
        provider="scripted", model="m", workspace=str(stack.workspace), manager_name="local"
    )
    async with RemoteSessionStore(stack.addresses[STORE]) as store:
        numbers = iter(range(count))

        async def some() -> None:
            for number in numbers:
                request = store_pb2.CreateSessionRequest(
                    session_id=f"r{number}", requested_settings=settings, initial_settings=settings
                )
                await store.create_session(request)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(some())


if __name__ == "__main__":
    run_alone(measure, PARAMETERS)
