"""Clocks jump while a session runs: a needless wait at worst, never a lost or repeated effect."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from harness.coordinator import CoordinatorConfig
from tests.support.eventually import eventually
from tests.support.faults import FaultyCalls, JumpingClock, check_trace
from tests.support.invariants import check_history
from tests.support.world import Script, World, bash, embedded_world, scripted
from unreal_agent.session.v1 import session_pb2

COUNTED = "echo $UNREAL_AGENT_OPERATION >> effects"
SCRIPT: Script = [
    {"text": "two", "tool_calls": [bash(f"{COUNTED}; sleep 0.3", timeout_seconds=30), bash(f"{COUNTED}; sleep 0.6")]},
    {"text": "more", "tool_calls": [bash(f"{COUNTED}; sleep 0.3")]},
    {"text": "finished"},
]
CONFIG = CoordinatorConfig(grace_s=0.3, lease_s=3.0, intermediate_state_delay_s=0.1)


def wall(hours: float) -> Callable[[JumpingClock], None]:
    """Return a jump of the wall clock."""

    def jump(clock: JumpingClock) -> None:
        clock.wall_ahead += timedelta(hours=hours)

    return jump


def sleep(seconds: float) -> Callable[[JumpingClock], None]:
    """Return what a machine that slept finds."""

    def jump(clock: JumpingClock) -> None:
        clock.wall_ahead += timedelta(seconds=seconds)
        clock.monotonic_ahead_s += seconds

    return jump


@pytest.mark.parametrize(
    "jumps",
    [
        pytest.param([wall(6), wall(6)], id="forward"),
        pytest.param([wall(-6), wall(-6)], id="back"),
        pytest.param([wall(-30), wall(60)], id="back-and-forward"),
        pytest.param([sleep(2.5), sleep(100)], id="asleep"),
    ],
)
async def test_a_clock_that_jumps_changes_no_history(
    tmp_path: Path, jumps: list[Callable[[JumpingClock], None]]
) -> None:
    clock, calls = JumpingClock(), FaultyCalls()
    async with embedded_world(
        tmp_path,
        calls.adapter(scripted(SCRIPT)),
        config=CONFIG,
        wrap_store=calls.store,
        wrap_manager=calls.manager,
        clock=clock,
    ) as world:
        await world.create()
        await world.say("do it", input_id="task")
        for number, jump in enumerate(jumps):
            await eventually(lambda: len(_effects(world)) > 2 * number)  # noqa: B023 - awaited at once
            jump(clock)
        async with asyncio.timeout(20):
            rest = await world.until_rest()
        items, operations = await world.items(), await world.operations()
        assert rest.session_state == session_pb2.SESSION_STATE_IDLE
        assert "finished" in str(items)
        check_history(items, operations)
        check_trace(calls, operations)
        assert Counter(_effects(world)) == Counter(one.operation_id for one in operations)


def _effects(world: World) -> list[str]:
    path = world.workspace / "effects"
    return path.read_text().split() if path.exists() else []
