"""Several systems under fire side by side, each checked when it is at rest."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.kill_matrix import victims
from tests.faults.kill_matrix.checker import check
from tests.faults.kill_matrix.fire import DOUBLE_SHARE, Kill, Order, Outcome, fire, plan
from tests.faults.kill_matrix.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """What all systems together came to."""

    kills: Sequence[Sequence[Kill]]
    """Of each system."""

    verdicts: Sequence[Verdict]
    missed_points: Sequence[str]
    """Declared, and never reached by anybody."""

    @property
    def violations(self) -> list[str]:
        """Everything that is wrong."""
        found = [violation.text for verdict in self.verdicts for violation in verdict.violations]
        return found + [f"point {point} was never reached" for point in self.missed_points]


async def run_matrix(
    directory: Path, *, kills: int, seed: int, systems: int, sessions: int, double_share: float = DOUBLE_SHARE
) -> Matrix:
    """Put systems under fire, side by side, until they have taken so many kills together."""
    chance = random.Random(seed)
    points = victims.points()
    orders = plan(kills, sorted(points.items()), chance)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                _one_system(
                    directory / f"system-{place}",
                    orders[place::systems],
                    random.Random(chance.randbytes(8)),
                    sessions=sessions,
                    double_share=double_share,
                )
            )
            for place in range(systems)
        ]
    outcomes = [one.result()[0] for one in running]
    reached = {kill.order.point for outcome in outcomes for kill in outcome.kills if kill.is_done}
    return Matrix(
        kills=[outcome.kills for outcome in outcomes],
        verdicts=[one.result()[1] for one in running],
        missed_points=sorted(points.keys() - reached),
    )


async def _one_system(
    directory: Path, orders: Sequence[Order], chance: random.Random, *, sessions: int, double_share: float
) -> tuple[Outcome, Verdict]:
    outcome = await fire(directory, orders, chance, sessions=sessions, double_share=double_share)
    return outcome, await check(outcome)
