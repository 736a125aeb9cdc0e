"""The short form of `make kill-matrix`: each process dies at each of its fault points, and at random times."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.kill_matrix import report, victims
from tests.faults.kill_matrix.checker import collect, violations_of
from tests.faults.kill_matrix.fire import Order, fire
from tests.faults.kill_matrix.matrix import run_matrix
from tests.faults.kill_matrix.verdict import EFFECTS, INPUTS, OTHERS, RESULTS, WATCHES
from tests.faults.kill_matrix.victims import KINDS, SUPERVISOR
from unreal_agent.session.v1.item_pb2 import INPUT_KIND_EXTERNAL


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_no_death_at_any_point_or_time_loses_or_repeats_anything(tmp_path: Path) -> None:
    points = victims.points()
    matrix = await run_matrix(tmp_path, kills=len(points), seed=4, systems=2, sessions=3, double_share=0.8)
    told = [*report.table(matrix.kills, matrix.verdicts, points), *report.totals(matrix.kills, matrix.verdicts)]
    assert not matrix.violations, "\n".join((*matrix.violations, *told))
    assert {kill.order.kind for system in matrix.kills for kill in system if kill.is_done} == set(KINDS)


def test_every_kind_of_process_has_points() -> None:
    assert set(victims.points().values()) == set(KINDS)


@pytest.mark.timeout(90)
async def test_the_checker_finds_what_is_lost_or_repeated(tmp_path: Path) -> None:
    outcome = await fire(tmp_path / "system", [], random.Random(1), sessions=1, double_share=0)
    (sound,) = await collect(outcome)
    calls = [key for key, one in sound.operations.items() if one.call_id]
    final = next(item for item in sound.items if item.tool_call_status.HasField("result"))
    changes = [line for line in sound.diary if line["what"] == "change"]
    spoilt = {
        INPUTS: replace(sound, items=[item for item in sound.items if item.input.kind != INPUT_KIND_EXTERNAL]),
        RESULTS: replace(sound, items=[item for item in sound.items if item is not final]),
        EFFECTS: replace(sound, effects=[*sound.effects, f"begin {calls[0]}"]),
        WATCHES: replace(sound, diary=[line for line in sound.diary if line is not changes[1]]),
        OTHERS: replace(sound, rows={}),
    }
    twice = {
        RESULTS: replace(sound, items=[*sound.items, final]),
        WATCHES: replace(sound, diary=[*sound.diary, changes[0]]),
    }
    assert not outcome.violations
    assert not list(violations_of(sound, set()))
    for area, remains in (*spoilt.items(), *twice.items()):
        assert area in {found for found, _ in violations_of(remains, set())}, area


@pytest.mark.timeout(90)
async def test_an_unknown_outcome_needs_a_dead_supervisor(tmp_path: Path) -> None:
    orders = [Order(kind=SUPERVISOR, point="supervisor.start.after")]
    outcome = await fire(tmp_path / "system", orders, random.Random(1), sessions=1, double_share=0)
    (remains,) = await collect(outcome)
    assert not list(violations_of(remains, outcome.supervisor_victims))
    assert {area for area, _ in violations_of(remains, set())} == {OTHERS}
