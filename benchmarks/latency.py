"""Measures every RPC of every service: by one caller over each transport, and under load by schedule.

`python -m benchmarks.latency`. Under load arrivals have fixed times and a latency counts from when its call was due, so
that a stall shows. A deployment is fresh for each transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from benchmarks.deployment import TRANSPORTS, Deployment, Transport, deployed
from benchmarks.load import closed_loop, open_loop
from benchmarks.probes import FLAGS, SCRIPT, Probe, coordinator_probes, manager_probes, store_probes
from benchmarks.results import COLUMNS, Chart, Latencies, Result, Size, Table
from benchmarks.suite import run_alone
from tests.support.stack import COORDINATOR

TRANSPORT_NAMES = {"unix": "Unix socket", "tcp": "TCP", "tls": "TLS", "mtls": "mTLS"}

COMPARED = (("coordinator", "GetSession"), ("coordinator", "SubmitInput"), ("session-store", "Commit"))
"""Calls that stand for all in the charts and under load over every transport: a read, a write through two, a commit."""

_WARM_UPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How much is measured."""

    transports: Sequence[Transport] = TRANSPORTS
    calls: int
    seconds_per_probe: float
    """Bound of what one caller takes for one RPC."""

    rates: Sequence[float]
    seconds_per_rate: float


PARAMETERS: dict[Size, Parameters] = {
    "tiny": Parameters(transports=("mtls",), calls=1, seconds_per_probe=0.1, rates=(50,), seconds_per_rate=0.02),
    "quick": Parameters(
        transports=("unix", "mtls"), calls=2, seconds_per_probe=0.1, rates=(50,), seconds_per_rate=0.04
    ),
    "full": Parameters(calls=100, seconds_per_probe=0.4, rates=(50, 100, 200), seconds_per_rate=0.5),
}


@dataclass(slots=True)
class _Found:
    alone: dict[Transport, dict[tuple[str, str], Latencies]] = field(default_factory=dict)
    loaded: dict[Transport, dict[tuple[str, str], dict[float, Latencies]]] = field(default_factory=dict)


async def measure(parameters: Parameters) -> Result:
    """Measure every transport."""
    found = _Found()
    for transport in parameters.transports:
        async with deployed(SCRIPT, transport=transport, flags=FLAGS) as deployment:
            await _measure_deployment(found, transport, deployment, parameters)
    return _result(found, parameters)


async def _measure_deployment(
    found: _Found, transport: Transport, deployment: Deployment, parameters: Parameters
) -> None:
    async def those_of(probes: AbstractAsyncContextManager[Sequence[Probe]]) -> None:
        async with probes as each:
            for probe in each:
                await _measure_probe(found, transport, probe, parameters)

    await those_of(coordinator_probes(deployment))
    await deployment.stack.terminate(COORDINATOR)
    await those_of(store_probes(deployment))
    await those_of(manager_probes(deployment))


async def _measure_probe(found: _Found, transport: Transport, probe: Probe, parameters: Parameters) -> None:
    key, first = (probe.service, probe.name), min(_WARM_UPS, parameters.calls)
    alone = min(parameters.calls, probe.limit // 2)
    await _prepare(probe, 0, first + alone)
    await closed_loop(probe.call, count=first, within_s=60)
    latencies = await closed_loop(probe.call, count=alone, within_s=parameters.seconds_per_probe, first=first)
    found.alone.setdefault(transport, {})[key] = latencies
    # Each RPC under load over the transport that services use among themselves; the others need no more than a sample.
    if transport != parameters.transports[0] and key not in COMPARED:
        return
    first += alone
    for rate in parameters.rates:
        count = max(1, min(round(rate * parameters.seconds_per_rate), probe.limit - first))
        if first + count > probe.limit:
            return
        await _prepare(probe, first, count)
        answer = await open_loop(probe.call, rate=rate, seconds=parameters.seconds_per_rate, limit=count, first=first)
        found.loaded.setdefault(transport, {}).setdefault(key, {})[rate] = answer
        first += count


async def _prepare(probe: Probe, first: int, count: int) -> None:
    if probe.prepare is not None:
        for number in range(first, first + count):
            await probe.prepare(number)


def _result(found: _Found, parameters: Parameters) -> Result:
    figures: dict[str, float] = {}
    tables = []
    for transport, by_call in found.alone.items():
        rows: list[list[str | float]] = []
        for (service, name), latencies in by_call.items():
            rows.append([f"{service} {name}", str(latencies.count), *latencies.row()])
            figures[f"{transport} {service} {name} p50 ms"] = latencies.ms(50)
        title = f"one caller, {TRANSPORT_NAMES[transport]}"
        tables.append(Table(title=title, columns=("RPC", "calls", *COLUMNS), rows=rows))
    for transport, by_name in found.loaded.items():
        rows = [
            [f"{service} {name}", str(rate), str(latencies.count), *latencies.row()]
            for (service, name), by_rate in by_name.items()
            for rate, latencies in by_rate.items()
        ]
        title = f"arrivals by schedule, {TRANSPORT_NAMES[transport]}"
        tables.append(Table(title=title, columns=("RPC", "calls/s", "calls", *COLUMNS), rows=rows))
    return Result(suite="latency", figures=figures, tables=tables, charts=_charts(found, parameters))


def _charts(found: _Found, parameters: Parameters) -> list[Chart]:
    compared = Chart(
        name="transports",
        title="One caller: median latency by transport",
        x_label="",
        y_label="ms",
        kind="bars",
        series={
            TRANSPORT_NAMES[transport]: [
                (f"{service}\n{name}", by_call[service, name].ms(50)) for service, name in COMPARED
            ]
            for transport, by_call in found.alone.items()
        },
    )
    by_name = found.loaded[parameters.transports[0]]
    highest = parameters.rates[-1]
    spread = Chart(
        name="under-load",
        title=f"{highest:g} arrivals per second: distribution of latencies",
        x_label="percentile",
        y_label="ms",
        is_log_y=True,
        series={f"{service} {name}": by_name[service, name][highest].spread() for service, name in COMPARED},
    )
    first = next(iter(found.alone.values()))
    everything = Chart(
        name="all-calls",
        title=f"One caller, {TRANSPORT_NAMES[parameters.transports[0]]}: every RPC",
        x_label="ms",
        y_label="",
        kind="bars",
        series={
            label: [(f"{service} {name}", latencies.ms(percentile)) for (service, name), latencies in first.items()]
            for label, percentile in (("p50", 50), ("p99", 99))
        },
    )
    return [compared, spread, everything]


if __name__ == "__main__":
    run_alone(measure, PARAMETERS)
