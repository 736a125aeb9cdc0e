"""What the figures are held against: a budget that must hold and a goal beyond it. Compares only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.results import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One line of the table."""

    what: str
    figure: str
    """Its name in the results."""

    budget: float
    goal: float
    unit: str = ""
    is_floor: bool = False
    """True: at least; False: at most."""

    def verdict(self, figure: float | None) -> str:
        """Return how a figure stands; None: it wasn't measured."""
        if figure is None:
            return "not measured"
        if self._holds(figure, self.goal):
            return "goal"
        return "budget" if self._holds(figure, self.budget) else "MISSED"

    def _holds(self, figure: float, bound: float) -> bool:
        return figure >= bound if self.is_floor else figure <= bound


BUDGETS = (
    Budget(
        what="tool turn, three services, 1 session, p50",
        figure="three services 1 p50 / floor", budget=1.3, goal=1.0, unit="x floor",
    ),
    Budget(
        what="tool turn, three services, 64 sessions, turns per second",
        figure="three services 64 turns/s / floor", budget=0.8, goal=1.2, unit="x floor", is_floor=True,
    ),
    Budget(
        what="tool turn, embedded, 64 sessions, turns per second",
        figure="embedded 64 turns/s / floor", budget=0.7, goal=0.9, unit="x floor", is_floor=True,
    ),
    Budget(
        what="tool turn, embedded, 1 session, p50",
        figure="embedded 1 p50 / floor", budget=1.5, goal=1.2, unit="x floor",
    ),
    Budget(
        what="durable commits, 64 writers, library",
        figure="commits library / floor", budget=0.6, goal=0.8, unit="x floor", is_floor=True,
    ),
    Budget(
        what="durable commits, 64 writers, CommitStream",
        figure="commits CommitStream / unary", budget=1.5, goal=3.0, unit="x unary", is_floor=True,
    ),
    Budget(
        what="resume of 10,000 items to ready",
        figure="resume of 10000 items ms", budget=500, goal=300, unit="ms",
    ),
    Budget(what="page of 100 items at any depth", figure="slowest page ms", budget=5, goal=2, unit="ms"),
    Budget(what="fork of any length", figure="slowest fork ms", budget=5, goal=2, unit="ms"),
    Budget(what="fork 100 deep, and a page of it", figure="deepest forks ms", budget=5, goal=2, unit="ms"),
    Budget(what="commit to watcher, library, p50", figure="watch library p50 ms", budget=5, goal=2, unit="ms"),
    Budget(what="commit to watcher, library, p99", figure="watch library p99 ms", budget=25, goal=10, unit="ms"),
    Budget(what="commit to watcher, gRPC, p50", figure="watch gRPC p50 ms", budget=5, goal=2, unit="ms"),
    Budget(what="commit to watcher, gRPC, p99", figure="watch gRPC p99 ms", budget=25, goal=10, unit="ms"),
    Budget(what="idle resident session", figure="resident session KiB", budget=20, goal=8, unit="KiB"),
    # Half a KiB is what a thousand sessions leave behind in pages that the allocator keeps.
    Budget(what="passivated session", figure="passivated session KiB", budget=0.5, goal=0.5, unit="KiB"),
    Budget(
        what="kill -9 of a service to going on, median",
        figure="slowest service p50 ms", budget=1_000, goal=600, unit="ms",
    ),
    Budget(what="commands at once", figure="commands at once", budget=1_000, goal=2_000, is_floor=True),
    Budget(what="starts", figure="starts / bare", budget=0.4, goal=0.6, unit="x bare", is_floor=True),
    Budget(what="exit to result, p50", figure="exit to result p50 ms", budget=10, goal=5, unit="ms"),
    Budget(what="live output, p50", figure="live output p50 ms", budget=50, goal=20, unit="ms"),
    Budget(what="1 GiB of output: manager grows by", figure="manager grows by MiB", budget=32, goal=8, unit="MiB"),
    Budget(what="unreal-agent --help", figure="help p50 s", budget=0.25, goal=0.15, unit="s"),
    Budget(what="run to first model request", figure="first request p50 s", budget=1.0, goal=0.6, unit="s"),
)  # fmt: skip


def table_of(figures: Mapping[str, float], *, has_verdicts: bool, budgets: Iterable[Budget] = BUDGETS) -> Table:
    """Return the table of budgets; without verdicts where a run was too short to be believed."""
    rows: list[list[str | float]] = []
    for one in budgets:
        sign = ">=" if one.is_floor else "<="
        figure = figures.get(one.figure)
        shown = "-" if figure is None else f"{figure:,.2f} {one.unit}".rstrip()
        verdict = one.verdict(figure) if has_verdicts else "(a smoke run)"
        rows.append([one.what, f"{sign} {one.budget:g}", f"{sign} {one.goal:g}", shown, verdict])
    return Table(title="budgets", columns=("what", "budget", "goal", "figure", "verdict"), rows=rows)
