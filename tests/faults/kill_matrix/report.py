"""The table: point and process, runs, what was lost or came twice, and the time to go on."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from tests.faults.kill_matrix.fire import RANDOM_TIME, Kill
from tests.faults.kill_matrix.verdict import AREAS, Verdict
from tests.faults.kill_matrix.victims import KINDS, SERVICES


def table(kills: Sequence[Sequence[Kill]], verdicts: Sequence[Verdict], points: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the table; every declared point has one, reached or not.

    A violation counts at every kill that its session lived through: which of them it comes from, nobody can tell.

    Args:
        kills: Of each system.
        verdicts: Upon each system, in the same order.
        points: Every declared point, and its kind of process.
    """
    rows = [(point, kind) for point, kind in sorted(points.items())] + [(RANDOM_TIME, kind) for kind in KINDS]
    width = max(len(point) for point, _ in rows)
    counted = "  ".join(f"{area:>7}" for area in AREAS)
    yield f"{'':{width + 19}}  {'':13}  lost or repeated  repeated or missing"
    yield f"{'point':{width}}  {'process':17}  kills  missed  {counted}  median s   max s"
    for point, kind in rows:
        found = [[one for one in system if (one.order.point, one.order.kind) == (point, kind)] for system in kills]
        done = [[kill for kill in system if kill.is_done] for system in found]
        count = sum(map(len, done))
        numbers = "  ".join(
            f"{sum(verdict.suspected(area, system) for verdict, system in zip(verdicts, done, strict=True)):7}"
            for area in AREAS
        )
        times = [kill.go_on_s for system in done for kill in system if kill.go_on_s is not None]
        shown = f"{statistics.median(times):8.2f}  {max(times):6.2f}" if times else f"{'-':>8}  {'-':>6}"
        yield f"{point:{width}}  {kind:17}  {count:5}  {sum(map(len, found)) - count:6}  {numbers}  {shown}"


def totals(kills: Sequence[Sequence[Kill]], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what all systems together came to."""
    done = [kill for system in kills for kill in system if kill.is_done]
    yield (
        f"{len(done)} kills, {sum(one.sessions for one in verdicts)} sessions,"
        f" {sum(one.inputs for one in verdicts)} inputs, {sum(one.calls for one in verdicts)} calls,"
        f" {sum(one.changes for one in verdicts)} changes watched"
    )
    violations = [violation for verdict in verdicts for violation in verdict.violations]
    for area, name in AREAS.items():
        yield f"{name}: {sum(one.area == area for one in violations)}"
    yield f"outcomes unknown, each with a supervisor that was killed: {sum(one.unknown for one in verdicts)}"
    for kind in KINDS:
        times = [kill.go_on_s for kill in done if kill.order.kind == kind and kill.go_on_s is not None]
        if times:
            median = statistics.median(times)
            yield f"from SIGKILL of {kind} to going on: median {median:.2f} s, longest {max(times):.2f} s"
    if service_times_s(done):
        yield f"from SIGKILL of any service to going on: median {statistics.median(service_times_s(done)):.2f} s"


def service_times_s(kills: Sequence[Kill]) -> list[float]:
    """Return how long it took to go on after each death of a service."""
    return [one.go_on_s for one in kills if one.go_on_s is not None and one.order.kind in SERVICES]
