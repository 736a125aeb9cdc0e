"""The table: point and process, runs, what was lost or came twice, and the time to go on."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.faults.kill_matrix.checker import Verdict
from tests.faults.kill_matrix.fire import RANDOM_TIME, Kill
from tests.faults.kill_matrix.victims import KINDS, SERVICES


def table(kills: Sequence[Kill], points: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the table; every declared point has one, reached or not."""
    groups: dict[tuple[str, str], list[Kill]] = {(point, kind): [] for point, kind in sorted(points.items())}
    groups |= {(RANDOM_TIME, kind): [] for kind in KINDS}
    for kill in kills:
        groups[kill.order.point, kill.order.kind].append(kill)
    width = max(len(point) for point, _ in groups)
    yield f"{'point':{width}}  {'process':17}  kills  missed  median s   max s"
    for (point, kind), found in groups.items():
        done = [kill for kill in found if kill.is_done]
        times = [kill.go_on_s for kill in done if kill.go_on_s is not None]
        median = f"{statistics.median(times):8.2f}" if times else f"{'-':>8}"
        longest = f"{max(times):6.2f}" if times else f"{'-':>6}"
        yield f"{point:{width}}  {kind:17}  {len(done):5}  {len(found) - len(done):6}  {median}  {longest}"


def totals(kills: Sequence[Kill], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield what all runs together came to."""
    done = [kill for kill in kills if kill.is_done]
    yield (
        f"{len(done)} kills, {sum(one.sessions for one in verdicts)} sessions,"
        f" {sum(one.inputs for one in verdicts)} inputs, {sum(one.calls for one in verdicts)} calls,"
        f" {sum(one.changes for one in verdicts)} changes watched"
    )
    yield f"lost or repeated inputs   {sum(len(one.lost_inputs) for one in verdicts)}"
    yield f"lost or repeated results  {sum(len(one.lost_results) for one in verdicts)}"
    yield f"repeated effects          {sum(len(one.repeated_effects) for one in verdicts)}"
    yield f"gaps or repeats in watches {sum(len(one.wrong_watches) for one in verdicts)}"
    yield f"other violations          {sum(len(one.others) for one in verdicts)}"
    yield f"outcomes unknown          {sum(one.unknown for one in verdicts)}, each with a supervisor that was killed"
    by_kind = defaultdict[str, list[float]](list)
    for kill in done:
        if kill.go_on_s is not None:
            by_kind[kill.order.kind].append(kill.go_on_s)
    for kind in KINDS:
        if by_kind[kind]:
            median, longest = statistics.median(by_kind[kind]), max(by_kind[kind])
            yield f"from SIGKILL of {kind} to going on: median {median:.2f} s, longest {longest:.2f} s"


def service_median_s(kills: Sequence[Kill]) -> float:
    """Return the median time to go on after the death of a service."""
    return statistics.median([one.go_on_s for one in kills if one.go_on_s is not None and one.order.kind in SERVICES])
