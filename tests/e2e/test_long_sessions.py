"""Conversations of any length: they finish, no request bursts the window or breaks a rule, and memory stays flat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.coordinator import CoordinatorConfig
from tests.support.demanding_models import DemandingModel
from tests.support.invariants import check_history
from tests.support.world import embedded_world
from unreal_agent.session.v1 import item_pb2, session_pb2

QUICK = CoordinatorConfig(grace_s=30.0)
"""Nothing goes on before a result is there: one turn for each call."""


async def run_to_the_end(directory: Path, model: DemandingModel, *, lives: Sequence[int], within_s: float) -> None:
    """Run a session in several lives of the process, each up to so many turns, and check all that was sent."""
    for life, turns in enumerate(lives):
        model.turns = turns
        async with embedded_world(directory, model, config=QUICK, window_tokens=lambda _: model.window) as world:
            if life == 0:
                await world.create()
            rest = await world.run(f"Go on to {turns}.", within_s=within_s)
            assert rest.session_state == session_pb2.SESSION_STATE_IDLE, rest.reason
    async with embedded_world(directory, model) as world:
        items = await world.items()
        check_history(items, await world.operations())
        results = await world.results()
    assert len(results) >= lives[-1] - len(lives)
    assert all(one.outcome == item_pb2.CALL_OUTCOME_COMPLETED for one in results.values())
    assert model.refused == 0
    assert max(model.sizes) <= model.window
    assert sum(item.HasField("compaction") for item in items) == model.summaries >= 1


async def test_sixty_turns_in_a_small_window_finish(tmp_path: Path) -> None:
    model = DemandingModel(turns=60, output_chars=6_000, window=14_000)
    await run_to_the_end(tmp_path, model, lives=(20, 40, 60), within_s=60)


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_a_thousand_turns_of_forty_kilobytes_each_finish(tmp_path: Path) -> None:
    model = DemandingModel(turns=1_000, output_chars=39_900, window=128_000)
    await run_to_the_end(tmp_path, model, lives=(1_000, 1_010), within_s=900)
    first, last = model.resident_mib[200], max(model.resident_mib[800:1_000])
    assert last < first + 24, f"MiB every 100 requests: {[round(one) for one in model.resident_mib[::100]]}"
