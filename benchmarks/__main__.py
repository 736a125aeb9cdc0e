"""`python -m benchmarks`: measures all suites, prints them with the budgets, writes figures, charts and a page.

python -m benchmarks [--size full] [--suites turn,store] [--name latest] [--directory benchmarks/results]
python -m benchmarks --draw benchmarks/results/latest.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import latency, machine, operations, recovery, scale, startup, store, turn
from benchmarks.budgets import BUDGETS, table_of
from benchmarks.charts import draw
from benchmarks.page import page
from benchmarks.results import Result, Size, text_of
from benchmarks.suite import print_result

SUITES: Mapping[str, Callable[[Size], Awaitable[Result]]] = {
    "turn": lambda size: turn.measure(turn.PARAMETERS[size]),
    "store": lambda size: store.measure(store.PARAMETERS[size]),
    "operations": lambda size: operations.measure(operations.PARAMETERS[size]),
    "startup": lambda size: startup.measure(startup.PARAMETERS[size]),
    "recovery": lambda size: recovery.measure(recovery.PARAMETERS[size]),
    "scale": lambda size: scale.measure(scale.PARAMETERS[size]),
    "latency": lambda size: latency.measure(latency.PARAMETERS[size]),
}

CALM_LOAD = 1.5
"""Above this something else runs beside the benchmark."""


async def measure(size: Size, suites: Sequence[str]) -> dict[str, Any]:
    """Measure suites one after another; return what is written."""
    described = machine.describe()
    if float(described["load_before"]) > CALM_LOAD:
        print(f"The load is {described['load_before']}: something else runs, don't believe the figures.\n")
    results = []
    for name in suites:
        begin = time.perf_counter()
        result = await SUITES[name](size)
        print(f"== {name} ({time.perf_counter() - begin:.0f} s)\n")
        print_result(result)
        print(flush=True)
        results.append(result.to_json())
    return {"size": size, "machine": described, "results": results}


def write(run: Mapping[str, Any], directory: Path, name: str) -> str:
    """Write NAME.json, NAME.html and the charts; return the table of budgets as text."""
    directory.mkdir(parents=True, exist_ok=True)
    results = [Result.from_json(one) for one in run["results"]]
    figures = {key: figure for result in results for key, figure in result.figures.items()}
    budgets = table_of(figures, has_verdicts=run["size"] == "full")
    held = [
        {"what": one.what, "figure": figures.get(one.figure), "budget": one.budget, "goal": one.goal, "unit": one.unit}
        for one in BUDGETS
    ]
    text = json.dumps({**run, "budgets": held}, indent=1)
    (directory / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    drawings = {
        chart.name: directory / f"{draw(chart, directory, name)}.svg" for result in results for chart in result.charts
    }
    whole = page(f"unreal-agent benchmarks: {name}", run["machine"], budgets, results, drawings)
    (directory / f"{name}.html").write_text(whole, encoding="utf-8")
    return text_of(budgets)


def main(arguments: Sequence[str]) -> int:
    """Measure or draw, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures, prints, writes and draws.")
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="full")
    parser.add_argument("--suites", default=",".join(SUITES), help=f"of {', '.join(SUITES)}; default: all")
    parser.add_argument("--name", default="latest", help="of the files that are written (default: latest)")
    parser.add_argument("--directory", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw an earlier run again")
    options = parser.parse_args(arguments)
    if options.draw is not None:
        run = json.loads(options.draw.read_text(encoding="utf-8"))
        print(write(run, options.draw.parent, options.draw.stem))
        return 0
    suites = options.suites.split(",")
    if unknown := set(suites) - set(SUITES):
        parser.error(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    run = asyncio.run(measure(options.size, suites))
    print(write(run, options.directory, options.name))
    print(f"\n{options.directory / options.name}.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
