"""One system under fire: three services, a client and the commands, of which one after another is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from harness.faults import KILL_VARIABLE
from tests.faults.kill_matrix import victims
from tests.faults.kill_matrix.diary import DiaryReader, Line
from tests.faults.kill_matrix.scripted_model import ScriptedModel
from tests.faults.kill_matrix.victims import CLIENT, LAUNCHER, SERVICES, SUPERVISOR
from tests.support.eventually import eventually
from tests.support.provider import scripted_provider
from tests.support.stack import COORDINATOR, MANAGER, Stack, three_services

ROOT: Final = Path(__file__).resolve().parents[3]
RANDOM_TIME: Final = "(random time)"

REACH_S: Final = 60.0
"""How long a point may take to be reached."""

GO_ON_S: Final = 60.0
"""How long the whole may take to go on."""

END_S: Final = 120.0
"""How long all sessions may take to come to rest at the end."""

LONGEST_PEACE_S: Final = 0.3
DOUBLE_SHARE: Final = 0.2
"""Of the kills so many are followed by the next before the whole goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A kill that is wanted."""

    kind: str
    point: str = RANDOM_TIME
    number: int = 1
    """At which of the times that the point is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A kill that was done."""

    order: Order
    is_done: bool
    """False: the point was not reached, or there was nobody to kill."""

    go_on_s: float | None = None
    """From death to going on; None: the next death came first."""

    at_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """All that a checker needs of one system."""

    directory: Path
    kills: list[Kill] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    """What was wrong while it ran."""

    supervisor_victims: set[str] = field(default_factory=set)
    """Operations whose supervisor was killed."""

    requests: int = 0


def plan(kills: int, points: Sequence[tuple[str, str]], chance: random.Random) -> list[Order]:
    """Return orders: every point in turn for half of the kills, and once at least; the rest at random times."""
    named = max(len(points), kills // 2)
    rounds = [points[number % len(points)] for number in range(named)]
    orders = [
        Order(kind=kind, point=point, number=1 if kind == SUPERVISOR else chance.randint(1, 3))
        for point, kind in rounds
    ]
    kinds = (CLIENT, *SERVICES, *SERVICES, LAUNCHER, SUPERVISOR)
    orders += [Order(kind=chance.choice(kinds)) for _ in range(kills - named)]
    chance.shuffle(orders)
    return orders


async def fire(
    directory: Path,
    orders: Sequence[Order],
    chance: random.Random,
    *,
    sessions: int,
    double_share: float = DOUBLE_SHARE,
) -> Outcome:
    """Carry out orders upon a fresh system, and bring it to rest."""
    outcome = Outcome(directory=directory)
    model = ScriptedModel()
    (directory / "workspace").mkdir(parents=True)
    async with scripted_provider(model.reply) as provider:
        environment = {
            KILL_VARIABLE: f"@{directory / 'order'}",
            "UNREAL_AGENT_LLM_PROVIDER": "openai-compatible",
            "UNREAL_AGENT_LLM_BASE_URL": provider.base_url,
            "UNREAL_AGENT_LLM_API_KEY": "test-key",
            "UNREAL_AGENT_LLM_MODEL": "m1",
        }
        async with three_services(directory, environment=environment) as stack:
            client = ClientProcess(stack, directory, sessions)
            async with client.running():
                system = _System(stack, client, outcome, chance, double_share)
                for order in orders:
                    await system.carry_out(order)
                await system.come_to_rest()
        outcome.requests = model.requests
        outcome.violations += model.violations
    return outcome


class ClientProcess:
    """The client under fire; started again it goes on with its diary."""

    def __init__(self, stack: Stack, directory: Path, sessions: int) -> None:
        """Prepare."""
        self.diary_path = directory / "diary"
        self.stop_file = directory / "stop"
        self._stack = stack
        self._sessions = sessions
        self._log_path = directory / "client.log"
        self.process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have it run while the block does."""
        await self.start()
        try:
            yield
        finally:
            assert self.process is not None
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()

    async def start(self) -> None:
        """Start it."""
        module = "tests.faults.kill_matrix.client_program"
        arguments = ["--address", self._stack.address, "--diary", str(self.diary_path)]
        arguments += ["--workspaces", str(self._stack.workspace), "--stop-file", str(self.stop_file)]
        arguments += ["--sessions", str(self._sessions)]
        with self._log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments),
                cwd=ROOT,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._stack.environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
            )

    def log(self) -> str:
        """Return what it has said."""
        return self._log_path.read_text()


class _System:
    def __init__(
        self, stack: Stack, client: ClientProcess, outcome: Outcome, chance: random.Random, double_share: float
    ) -> None:
        self._stack = stack
        self._client = client
        self._outcome = outcome
        self._chance = chance
        self._double_share = double_share
        self._reader = DiaryReader(client.diary_path)
        self._order_path = outcome.directory / "order"
        self._token = 0

    async def carry_out(self, order: Order) -> None:
        """Kill as ordered, start again what was killed, and mostly wait until the whole goes on."""
        await asyncio.sleep(self._chance.uniform(0, LONGEST_PEACE_S))
        died = await (self._kill_now(order.kind) if order.point == RANDOM_TIME else self._kill_at(order))
        if died is None:
            self._outcome.kills.append(Kill(order=order, is_done=False))
            return
        at_s, wall_s = died
        await self._start_again(order.kind)
        go_on_s = None
        if self._chance.random() >= self._double_share:
            go_on_s = await self._go_on(order, at_s, wall_s)
        self._outcome.kills.append(Kill(order=order, is_done=True, go_on_s=go_on_s, at_s=at_s))

    async def come_to_rest(self) -> None:
        """Let the client finish; after it nothing is under way."""
        self._client.stop_file.touch()
        process = self._client.process
        assert process is not None
        try:
            async with asyncio.timeout(END_S):
                if await process.wait() != 0:
                    self._outcome.violations.append(f"the client failed: {self._client.log()[-2000:]}")
        except TimeoutError:
            self._outcome.violations.append("the sessions do not come to rest")

    # --- killing ---

    async def _kill_now(self, kind: str) -> tuple[float, float] | None:
        """Kill whoever is there; return when."""
        if kind == CLIENT:
            assert self._client.process is not None
            self._client.process.kill()
            await self._client.process.wait()
        elif kind in SERVICES:
            await self._stack.kill(kind)
        elif not await self._kill_helper(kind):
            return None
        return time.monotonic(), time.time()

    async def _kill_helper(self, kind: str) -> bool:
        def find_supervisors() -> list[victims.Supervisor]:
            launcher = victims.find_launcher(self._stack.pids[MANAGER])
            return list(victims.find_supervisors(launcher.pid)) if launcher is not None else []

        try:
            if kind == LAUNCHER:
                launcher = await eventually(lambda: victims.find_launcher(self._stack.pids[MANAGER]), within_s=REACH_S)
                return victims.kill(launcher)
            chosen = self._chance.choice(await eventually(find_supervisors, within_s=REACH_S))
        except AssertionError:
            return False
        self._outcome.supervisor_victims.add(chosen.operation_id)
        return victims.kill(chosen.entry)

    async def _kill_at(self, order: Order) -> tuple[float, float] | None:
        """Have whoever reaches a point first die there; return when."""
        self._token += 1
        fired_path = self._order_path.with_suffix(f".{self._token}")
        fresh = self._order_path.with_suffix(".new")
        fresh.write_text(f"{order.point}:{order.number}:{self._token}\n")
        os.replace(fresh, self._order_path)
        with suppress(AssertionError):
            await eventually(fired_path.exists, within_s=REACH_S)
        self._order_path.unlink()
        with suppress(FileExistsError):
            # Whoever has just read the order finds it carried out.
            fired_path.touch(exist_ok=False)
            return None
        died = time.monotonic(), time.time()
        if order.kind == SUPERVISOR:
            # A shell makes a file before it writes into it.
            victim = await eventually(lambda: fired_path.read_text().strip(), within_s=REACH_S)
            self._outcome.supervisor_victims.add(victim)
        return died

    async def _start_again(self, kind: str) -> None:
        if kind == CLIENT:
            assert self._client.process is not None
            code = await self._client.process.wait()
            if code != -signal.SIGKILL:
                self._outcome.violations.append(f"the client ended with {code}: {self._client.log()[-2000:]}")
            await self._client.start()
        elif kind in SERVICES:
            code = await self._stack.wait(kind)
            if code != -signal.SIGKILL:
                self._outcome.violations.append(f"{kind} ended with {code}: {self._stack.log(kind)[-2000:]}")
            await self._stack.start(kind)

    # --- going on ---

    async def _go_on(self, order: Order, at_s: float, wall_s: float) -> float | None:
        """Return how long it took from a death until the client saw that the work of the dead goes on."""
        is_sign = _signs(order.kind, at_s, wall_s)
        try:
            line = await eventually(lambda: next(filter(is_sign, self._reader.new_lines()), None), within_s=GO_ON_S)
        except AssertionError:
            self._outcome.violations.append(f"nothing goes on {GO_ON_S:g} s after the death of {order}")
            return None
        return line["at_s"] - at_s


def _signs(kind: str, at_s: float, wall_s: float) -> Callable[[Line], bool]:
    """Return what tells that the work of a kind of process goes on after a death."""

    def is_seen(line: Line) -> bool:
        return line["at_s"] > at_s and line["what"] in {"change", "accepted"}

    def is_written(line: Line) -> bool:
        return line["what"] == "change" and line["written_s"] > wall_s

    def is_ended(line: Line) -> bool:
        return line["what"] == "change" and line["ended_s"] > wall_s

    if kind == CLIENT:
        return is_seen
    return is_written if kind in {COORDINATOR, "session-store"} else is_ended
