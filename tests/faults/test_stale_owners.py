"""Two coordinators and one session: one turn at a time and one set of effects, whoever is stopped for how long.

Requests are counted at the provider's socket, effects in a file that each command appends its operation's ID to.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.faults import STOP_VARIABLE
from tests.support.eventually import eventually
from tests.support.invariants import check_history
from tests.support.provider import Pause, RecordedRequest, Reply, ScriptedProvider, scripted_provider
from tests.support.provider_replies import whole_stream
from tests.support.stack import COORDINATOR, Stack, three_services
from tests.support.world import World
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import session_pb2

SECOND = "second"
LEASE_S = 1.0
FLAGS = ("--lease-seconds", str(LEASE_S), "--idle-seconds", "0.3")
CALLS = 4
THINKS_S = 0.25


@dataclass(slots=True)
class Thinker:
    """A model that makes so many calls, one a turn, and then is done; it knows when it was asked."""

    calls: int = CALLS
    thinks_s: float = THINKS_S
    asked_s: list[float] = field(default_factory=list)

    def reply(self, request: RecordedRequest) -> Reply:
        """Answer by what the conversation holds."""
        self.asked_s.append(asyncio.get_running_loop().time())
        results = sum(one.get("type") == "function_call_output" for one in json.loads(request.body)["input"])
        if results >= self.calls:
            stream = whole_stream("openai-responses", text="all is done")
        else:
            command = json.dumps({"command": f"echo $UNREAL_AGENT_OPERATION >> effects; sleep 0.1; echo {results}"})
            stream = whole_stream("openai-responses", tool_calls=[(f"call-{results}", "Bash", command)])
        return Reply(steps=[Pause(self.thinks_s), stream])

    def overlaps(self, since_s: float = 0.0) -> list[float]:
        """Return the times at which it was asked while it thought."""
        asked = [one for one in self.asked_s if one >= since_s]
        return [
            second - since_s
            for first, second in zip(asked, asked[1:], strict=False)
            if second - first < self.thinks_s * 0.9
        ]


@asynccontextmanager
async def two_coordinators(
    directory: Path, thinker: Thinker, first_environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[Stack, ScriptedProvider]]:
    """Run two coordinators over one store and one manager, and the model that both ask."""
    async with scripted_provider(thinker.reply) as provider:
        environment = {
            "UNREAL_AGENT_LLM_PROVIDER": "openai",
            "UNREAL_AGENT_LLM_MODEL": "m1",
            "UNREAL_AGENT_LLM_BASE_URL": provider.base_url,
            "UNREAL_AGENT_LLM_API_KEY": "test-key",
        }
        flags = {COORDINATOR: FLAGS}
        async with three_services(directory, flags=flags, environment=environment, starts=False) as stack:
            stack.set_environment(COORDINATOR, first_environment or {})
            async with asyncio.TaskGroup() as tasks:
                for name in ("session-store", "operation-manager", COORDINATOR):
                    tasks.create_task(stack.start(name))
            await stack.add_coordinator(SECOND, *FLAGS)
            yield stack, provider


async def rest_of(world: World) -> session_pb2.Rest:
    """Return how the session stands, as the store has it; that loads nothing."""
    request = coordinator_pb2.GetSessionRequest(session_id=world.session_id)
    return (await world.coordinator.get_session(request)).session.rest


async def is_done(world: World) -> bool:
    """Return whether the session rests."""
    return (await rest_of(world)).session_state == session_pb2.SESSION_STATE_IDLE


async def check(world: World, calls: int = CALLS) -> None:
    """Check the history, and that each command ran once."""
    items, operations = await world.items(), await world.operations()
    check_history(items, operations)
    answers = [item.model_response for item in items if item.HasField("model_response")]
    assert answers[-1].output.items[0].message.text == "all is done"
    assert len(operations) == calls
    effects = Counter((world.workspace / "effects").read_text().split())
    assert effects == Counter(one.operation_id for one in operations), "a command ran twice or never"


@pytest.mark.timeout(90)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
async def test_two_coordinators_that_are_both_asked_never_run_two_turns_at_a_time(tmp_path: Path, seed: int) -> None:
    dice, thinker = random.Random(seed), Thinker(calls=8)
    async with (
        two_coordinators(tmp_path, thinker) as (stack, _),
        stack.world() as one,
        stack.world(SECOND) as other,
    ):
        one.provider = other.provider = "openai"
        await one.create()
        other.session_id = one.session_id
        for number in range(12):
            world = dice.choice((one, other))
            response = await world.say(f"input {number}", input_id=f"i{number}", after_turn=True)
            assert not response.duplicate
            # Now and then long enough for the session to leave memory, so that the other may take it.
            await asyncio.sleep(dice.choice((0.0, 0.02, 0.1, 0.3)))
        await eventually(lambda: is_done(one), within_s=40)
        ids = [item.input.input_id for item in await one.items() if item.HasField("input")]
        assert ids == [f"i{number}" for number in range(12)]
        await check(one, calls=8)
    assert thinker.overlaps() == []


POINTS = (
    "coordinator.commit.after:3",
    "coordinator.request.before:2",
    "coordinator.commit.before:4",
    "coordinator.commit.after:5",
    "coordinator.effects.after:4",
    "coordinator.request.after:2",
    "coordinator.dispatch.before:2",
    "coordinator.dispatch.after:2",
    "coordinator.update.before:3",
    "coordinator.acknowledge.before:2",
)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "point",
    [POINTS[0], *(pytest.param(one, marks=pytest.mark.long) for one in POINTS[1:])],
)
async def test_a_process_that_is_stopped_at_a_point_beyond_its_lease_does_no_harm(tmp_path: Path, point: str) -> None:
    thinker = Thinker(thinks_s=0.6)
    async with (
        two_coordinators(tmp_path, thinker, {STOP_VARIABLE: point}) as (stack, _),
        stack.world() as world,
        stack.world(SECOND) as other,
    ):
        await _begin(world)
        await eventually(lambda: _is_stopped(stack.pids[COORDINATOR]), within_s=20)
        asked = len(thinker.asked_s)
        await eventually(lambda: len(thinker.asked_s) > asked, within_s=20)
        await _go_on_and_check(stack, thinker, other)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12))])
async def test_a_process_that_is_stopped_at_any_moment_beyond_its_lease_does_no_harm(tmp_path: Path, seed: int) -> None:
    dice, thinker = random.Random(seed), Thinker(thinks_s=0.6)
    async with (
        two_coordinators(tmp_path, thinker) as (stack, _),
        stack.world() as world,
        stack.world(SECOND) as other,
    ):
        await _begin(world)
        await asyncio.sleep(dice.uniform(0.0, 2.0))
        stack.signal(COORDINATOR, signal.SIGSTOP)
        asked = len(thinker.asked_s)
        await eventually(lambda: len(thinker.asked_s) > asked, within_s=20)
        await asyncio.sleep(dice.uniform(0.0, 0.5))
        await _go_on_and_check(stack, thinker, other)


async def _begin(world: World) -> None:
    world.provider = "openai"
    await world.create()
    await world.say("go", input_id="task")


async def _go_on_and_check(stack: Stack, thinker: Thinker, other: World) -> None:
    """Let the former owner go on while the new one's request is in flight."""
    taken_s = thinker.asked_s[-1]
    stack.signal(COORDINATOR, signal.SIGCONT)
    await eventually(lambda: is_done(other), within_s=30)
    # The former owner serves on: what it is asked about the session comes from the new one.
    async with stack.world() as world:
        again = await world.say("go", input_id="task")
        assert again.duplicate
        assert (await world.until_rest()).session_state == session_pb2.SESSION_STATE_IDLE
        assert await world.items() == await other.items()
    await check(other)
    assert thinker.overlaps(taken_s) == [], "two asked at a time after the takeover"


async def _is_stopped(pid: int) -> bool:
    return _state_of(pid) == "T"


def _state_of(pid: int) -> str:
    fields: Sequence[str] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0]
