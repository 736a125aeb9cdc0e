"""The short form of `make kill-matrix`: each process dies at each of its fault points, and at random times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kill_matrix import report, victims
from tests.faults.kill_matrix.matrix import run_matrix
from tests.faults.kill_matrix.victims import KINDS


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_no_death_at_any_point_or_time_loses_or_repeats_anything(tmp_path: Path) -> None:
    points = victims.points()
    matrix = await run_matrix(tmp_path, kills=len(points) + 6, seed=4, systems=2, sessions=4, double_share=0.7)
    told = "\n".join((*report.table(matrix.kills, points), *report.totals(matrix.kills, matrix.verdicts)))
    assert not matrix.violations, "\n".join((*matrix.violations, told))
    assert {kill.order.kind for kill in matrix.kills if kill.is_done} == set(KINDS)


def test_every_kind_of_process_has_points() -> None:
    assert set(victims.points().values()) == set(KINDS)
