"""Every suite of the benchmarks measures, with the smallest parameters; what it finds is written, read and drawn."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import budgets
from benchmarks.__main__ import SUITES, main
from benchmarks.charts import draw
from benchmarks.load import open_loop
from benchmarks.page import page
from benchmarks.results import Chart, Latencies, Result, Table, text_of


@pytest.mark.timeout(120)
@pytest.mark.parametrize("suite", SUITES)
async def test_suite_measures(suite: str) -> None:
    result = await SUITES[suite]("tiny")
    assert result.suite == suite
    assert result.tables
    assert all(len(row) == len(table.columns) for table in result.tables for row in table.rows)
    assert [name for name, figure in result.figures.items() if not figure >= 0] == []
    assert Result.from_json(json.loads(json.dumps(result.to_json()))).figures == result.figures


def sample() -> Result:
    """Return a result with a chart of each kind."""
    points = {"a": [("one", 1.0), ("two", 20.0)], "b": [("one", 2.0), ("two", 30.0)]}
    lines = {"a": [(10.0, 1.0), (100.0, 2.0)]}
    return Result(
        suite="turn",
        figures={"embedded 1 p50 / floor": 1.3},
        tables=[Table(title="t<1>", columns=("what", "figure"), rows=[["a & b", 1.25]])],
        charts=[
            Chart(name="bars", title="Bars", x_label="", y_label="ms", series=points, kind="bars"),
            Chart(name="stack", title="Stack", x_label="ms", y_label="", series=points, kind="stacked"),
            Chart(name="lines", title="Lines", x_label="n", y_label="ms", series=lines, is_log_x=True, is_log_y=True),
        ],
    )


def test_earlier_run_is_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = json.dumps({"size": "full", "machine": {"cores": 2}, "results": [sample().to_json()]})
    (tmp_path / "r.json").write_text(run)
    assert main(["--draw", str(tmp_path / "r.json")]) == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        *("r-bars.png", "r-bars.svg", "r-lines.png", "r-lines.svg", "r-stack.png", "r-stack.svg"),
        *("r.html", "r.json"),
    ]
    shown = (tmp_path / "r.html").read_text()
    assert shown.count("<svg") == 3
    assert "t&lt;1&gt;" in shown and "a &amp; b" in shown
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tool turn, embedded, 1 session")]
    assert [line.split()[-1] for line in lines] == ["budget"]
    # Drawing keeps what was measured.
    assert json.loads((tmp_path / "r.json").read_text())["results"] == json.loads(run)["results"]


def test_drawings_on_a_page_share_no_ids(tmp_path: Path) -> None:
    result = sample()
    drawings = {chart.name: tmp_path / f"{draw(chart, tmp_path, 'x')}.svg" for chart in result.charts}
    shown = page("p", {}, budgets.table_of({}, has_verdicts=True), [result], drawings)
    ids = [part.split('"')[0] for part in shown.split('id="')[1:]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("is_floor", "figure", "verdict"),
    [
        (False, 0.5, "goal"),
        (False, 1.5, "budget"),
        (False, 2.5, "MISSED"),
        (True, 2.5, "goal"),
        (True, 1.5, "budget"),
        (True, 0.5, "MISSED"),
        (True, None, "not measured"),
    ],
)
def test_verdicts(is_floor: bool, figure: float | None, verdict: str) -> None:
    low, high = (1.0, 2.0) if is_floor else (2.0, 1.0)
    assert budgets.Budget(what="w", figure="f", budget=low, goal=high, is_floor=is_floor).verdict(figure) == verdict


def test_short_run_gets_no_verdicts() -> None:
    rows = budgets.table_of({"slowest page ms": 1e9}, has_verdicts=False).rows
    assert {row[-1] for row in rows} == {"(a smoke run)"}


def test_every_budget_looks_at_a_figure_of_its_own() -> None:
    names = [one.figure for one in budgets.BUDGETS]
    assert len(set(names)) == len(names)


async def test_stall_shows_in_all_calls_that_were_due_in_it() -> None:
    async def call(number: int) -> None:
        if number == 0:
            time.sleep(0.1)

    latencies = await open_loop(call, rate=1_000, seconds=0.1, limit=100)
    assert latencies.count == 100
    # A caller that waits for its answers would have seen one slow call and 99 quick ones.
    assert latencies.ms(50) > 30


def test_percentiles_are_in_milliseconds() -> None:
    latencies = Latencies()
    for number in range(1, 101):
        latencies.record(number / 1000)
    assert latencies.row() == pytest.approx([50, 90, 99, 100], rel=0.01)


def test_table_is_aligned() -> None:
    table = Table(title="t", columns=("what", "ms"), rows=[["a", 1.0], ["long", 1_234.5]])
    assert text_of(table).splitlines() == ["t", "what     ms", "a      1.00", "long  1,234"]


def test_document_names_every_suite_and_every_budget() -> None:
    document = (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text()
    assert [suite for suite in SUITES if f"| `{suite}` |" not in document] == []
    shown = document.partition("## Budgets")[2].partition("\n## ")[0].replace(",", "")
    # Two lines say it in words or in seconds.
    told = [one for one in budgets.BUDGETS if one.unit != "ms" or one.budget < 500]
    assert [one.what for one in told if not {f"{one.budget:g}", "nothing"} & set(shown.split())] == []
