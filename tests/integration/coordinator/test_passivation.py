"""Sessions with nothing to do leave memory and come back: by the next call, when they are due, for their watchers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harness.coordinator import CoordinatorConfig
from harness.coordinator.session_actor import SessionActor
from harness.coordinator.state import SessionState
from harness.primitives.streams import closing
from tests.support.eventually import eventually
from tests.support.world import Script, World, bash, embedded_world
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import session_pb2

QUICK = CoordinatorConfig(grace_s=0.3, idle_s=0.1, long_wait_s=0.5, takes_runnable_sessions=True)


def residents() -> int:
    """Return how many sessions are in memory."""
    return sum(isinstance(one, SessionActor) for one in gc.get_objects())


def states() -> int:
    """Return how many states of sessions are in memory."""
    return sum(isinstance(one, SessionState) for one in gc.get_objects())


async def is_empty() -> bool:
    """Return whether no session is in memory."""
    gc.collect()
    return residents() == 0


async def session_of(world: World) -> session_pb2.Session:
    """Return the session as the store has it; that loads nothing."""
    request = coordinator_pb2.GetSessionRequest(session_id=world.session_id)
    return (await world.coordinator.get_session(request)).session


async def test_an_idle_session_is_given_back_and_comes_back_with_the_next_input(tmp_path: Path) -> None:
    async with embedded_world(tmp_path, [{"text": "One."}, {"text": "Two."}], config=QUICK) as world:
        await world.create()
        await world.run("hi")
        await eventually(is_empty)
        await eventually(lambda: _is_free(world))
        first = await session_of(world)
        assert (await world.run("again")).session_state == session_pb2.SESSION_STATE_IDLE
        assert (await session_of(world)).epoch == first.epoch + 1
        assert not [item for item in await world.items() if item.input.HasField("crash")]


async def _is_free(world: World) -> bool:
    return not (await session_of(world)).HasField("owner")


async def test_inputs_that_come_while_a_session_leaves_are_all_taken_once(tmp_path: Path) -> None:
    config = CoordinatorConfig(grace_s=0.0, idle_s=0.001, takes_runnable_sessions=True)
    async with embedded_world(tmp_path, [{"text": str(number)} for number in range(40)], config=config) as world:
        await world.create()
        for number in range(40):
            response = await world.say("hi", input_id=f"i{number}")
            assert not response.duplicate
            await world.until_rest()
            await asyncio.sleep(0.0004 * (number % 8))  # about when the session leaves
        ids = [item.input.input_id for item in await world.items() if item.HasField("input")]
        assert ids == [f"i{number}" for number in range(40)]
        assert sum(item.HasField("turn") for item in await world.items()) == 40


async def test_a_session_with_a_command_stays_until_the_command_ends(tmp_path: Path) -> None:
    script: Script = [{"tool_calls": [bash("while [ ! -e go ]; do sleep 0.05; done; echo went")]}, {"text": "Done."}]
    async with embedded_world(tmp_path, script, config=QUICK) as world:
        await world.create()
        await world.say("go")
        await eventually(lambda: _has_command(world))
        epoch = (await session_of(world)).epoch
        await asyncio.sleep(5 * QUICK.idle_s)
        (world.workspace / "go").touch()
        await world.until_rest()
        assert (await session_of(world)).epoch == epoch


async def _has_command(world: World) -> bool:
    return any(one.HasField("start_time") for one in await world.operations())


async def test_the_end_of_a_command_of_a_failed_session_is_recorded_though_nobody_asks(tmp_path: Path) -> None:
    script: Script = [
        {"tool_calls": [bash("echo quick"), bash("while [ ! -e go ]; do sleep 0.05; done; echo went")]},
        {"error": {"class": "invalid_request"}},
    ]
    async with embedded_world(tmp_path, script, config=QUICK) as world:
        await world.create()
        assert (await world.run("go")).session_state == session_pb2.SESSION_STATE_FAILED
        assert len(await world.results()) == 1
    async with embedded_world(tmp_path, script, config=QUICK) as world:
        (world.workspace / "go").touch()

        async def is_recorded() -> bool:
            return len(await world.results()) == 2

        await eventually(is_recorded)
        await eventually(is_empty)


async def test_a_session_that_waits_for_long_leaves_memory_and_goes_on_when_it_is_due(tmp_path: Path) -> None:
    script: Script = [{"error": {"class": "rate_limit", "retry_after_seconds": 3}}, {"text": "Done."}]
    async with embedded_world(tmp_path, script, config=QUICK) as world:
        await world.create()
        await world.say("hi")
        await eventually(lambda: _waits(world))
        await eventually(is_empty)
        assert (await session_of(world)).rest.state == session_pb2.REST_STATE_WAITING_UNTIL
        await eventually(lambda: _is_idle(world), within_s=10)
        failed, answered = [item for item in await world.items() if item.HasField("turn")]
        waited_s = answered.record_time.ToDatetime() - failed.record_time.ToDatetime()
        assert 2.9 < waited_s.total_seconds() < 4.5


async def _waits(world: World) -> bool:
    return (await session_of(world)).rest.state == session_pb2.REST_STATE_WAITING_UNTIL


async def _is_idle(world: World) -> bool:
    return (await session_of(world)).rest.session_state == session_pb2.SESSION_STATE_IDLE


async def test_a_watcher_of_a_session_that_left_sees_all_of_its_return(tmp_path: Path) -> None:
    async with embedded_world(tmp_path, [{"text": "One."}, {"text": "Two."}], config=QUICK) as world:
        await world.create()
        await world.run("hi")
        request = coordinator_pb2.WatchSessionRequest(session_id="s1", include_deltas=True)
        async with closing(world.coordinator.watch_session(request)) as events:
            seen = [await anext(events)]
            await eventually(is_empty)
            await world.say("again")
            async with asyncio.timeout(10):
                while not any(item.model_response.output.items for one in seen[1:] for item in one.change.items):
                    seen.append(await anext(events))
        assert "".join(one.model_delta.text for one in seen) == "Two."
        items = [item for one in seen for item in one.change.items]
        assert items == (await world.items())[: len(items)]


@asynccontextmanager
async def used_once(directory: Path, count: int) -> AsyncIterator[Sequence[int]]:
    """Use so many sessions once each, and wait until all have left; gives the states in memory before and after."""
    async with embedded_world(directory, [{"text": "Done."}], config=QUICK) as world:
        await world.create("first")
        await world.run("hi")
        await eventually(is_empty)
        before = states()
        limit = asyncio.Semaphore(20)

        async def use(name: str) -> None:
            async with limit:
                one = World(coordinator=world.coordinator, workspace=world.workspace)
                await one.create(name)
                await one.run("hi", within_s=60)

        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(use(f"n{number}"))
        await eventually(is_empty, within_s=10)
        yield before, states()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.long)])
async def test_sessions_that_were_used_once_leave_nothing_in_memory(tmp_path: Path, count: int) -> None:
    async with used_once(tmp_path, count) as (before, after):
        assert after <= before
        assert residents() == 0
