"""Measures the session store: commits, reads, resume and forks by length of history, watches, bytes per turn.

`python -m benchmarks.store`. "Library" is the store in this process, "gRPC" one in a process of its own behind a Unix
socket, "floor" the bare writer of benchmarks/floor/store_rows.py.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.embedded import embedded
from benchmarks.floor.store_rows import StoreFloor
from benchmarks.histories import TEXT, continue_history, four_commits, write_history
from benchmarks.load import at_once
from benchmarks.results import COLUMNS, Chart, Latencies, Result, Size, Table
from benchmarks.script import scripted_turns
from benchmarks.suite import run_alone
from benchmarks.watching import measure_fan_out, measure_watchers
from clients._rpc.channel import open_channel
from clients.session_store import RemoteSessionStore
from harness.session_store import SessionStore
from harness.session_store.sqlite import SqliteSessionStore
from tests.support.session_records import Author, new_session, text_input
from tests.support.store_service import store_process
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2_grpc as store_grpc

PAGE = 100
SAMPLES = 20
"""Repetitions of a read or a fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How much is measured."""

    writers: Sequence[int]
    batches: Sequence[int]
    """Items of a commit."""

    commits: int
    """Commits of all writers together, for each row of the table."""

    lengths: Sequence[int]
    fork_depth: int
    subscribers: Sequence[int]
    watched_sessions: int
    watch_seconds: float
    turns: int


PARAMETERS: dict[Size, Parameters] = {
    "tiny": Parameters(
        writers=(4,), batches=(1,), commits=8, lengths=(100,), fork_depth=3, subscribers=(2,), watched_sessions=2,
        watch_seconds=0.05, turns=5,
    ),
    "quick": Parameters(
        writers=(1, 64), batches=(1, 10), commits=64, lengths=(100, 1_000), fork_depth=10, subscribers=(1, 10),
        watched_sessions=10, watch_seconds=0.3, turns=20,
    ),
    "full": Parameters(
        writers=(1, 16, 64), batches=(1, 10, 100), commits=4_000, lengths=(100, 1_000, 10_000, 100_000),
        fork_depth=100, subscribers=(1, 100, 1_000), watched_sessions=100, watch_seconds=4.0, turns=1_000,
    ),
}  # fmt: skip


@dataclass(slots=True)
class _Found:
    figures: dict[str, float] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)


async def measure(parameters: Parameters) -> Result:
    """Measure everything, each part on a store of its own."""
    found = _Found()
    await _commits(found, parameters)
    await _histories(found, parameters)
    await _fork_depth(found, parameters)
    await _watches(found, parameters)
    await _bytes_per_turn(found, parameters)
    return Result(suite="store", figures=found.figures, tables=found.tables, charts=found.charts)


@asynccontextmanager
async def _store() -> AsyncIterator[tuple[SqliteSessionStore, Path]]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        async with SqliteSessionStore.open(path) as store:
            yield store, path


@asynccontextmanager
async def _served() -> AsyncIterator[tuple[RemoteSessionStore, str]]:
    with tempfile.TemporaryDirectory() as directory:
        async with store_process(Path(directory) / "s") as process, RemoteSessionStore(process.address) as store:
            yield store, process.address


async def _commits(found: _Found, parameters: Parameters) -> None:
    rows: list[list[str | float]] = []
    rates: dict[str, list[tuple[float | str, float]]] = {}
    most = max(parameters.writers)

    def note(what: str, writers: int, batch: int, measured: tuple[Latencies, float]) -> None:
        latencies, rate = measured
        rows.append([what, str(writers), str(batch), rate, rate * batch, *latencies.row()])
        if batch == 1:
            rates.setdefault(what, []).append((str(writers), rate))
            found.figures[f"commits/s {what} {writers} writers"] = rate

    for writers in parameters.writers:
        count = max(1, parameters.commits // max(writers, 4))
        note("floor", writers, 1, await _floor_commits(writers, count))
        for batch in parameters.batches:
            async with _store() as (store, _):
                note("library", writers, batch, await _library_commits(store, writers, max(1, count // batch), batch))
            async with _served() as (remote, _):
                note(
                    "CommitStream",
                    writers,
                    batch,
                    await _library_commits(remote, writers, max(1, count // batch), batch),
                )
        async with _served() as (remote, address):
            note("unary calls", writers, 1, await _unary_commits(remote, address, writers, max(1, count // 4)))
    columns = ("by", "writers", "items", "commits/s", "items/s", *COLUMNS)
    found.tables.append(Table(title="durable commits of 0.5 KiB items", columns=columns, rows=rows))
    figures = found.figures
    figures["commits library / floor"] = (
        figures[f"commits/s library {most} writers"] / figures[f"commits/s floor {most} writers"]
    )
    figures["commits CommitStream / unary"] = (
        figures[f"commits/s CommitStream {most} writers"] / figures[f"commits/s unary calls {most} writers"]
    )
    found.charts.append(
        Chart(
            name="commits",
            title="Durable commits per second",
            x_label="writers",
            y_label="commits per second",
            kind="bars",
            series=rates,
        )
    )


async def _authors(store: SessionStore, count: int) -> list[Author]:
    return [await new_session(store, f"s{number}") for number in range(count)]


async def _library_commits(store: SessionStore, writers: int, count: int, batch: int) -> tuple[Latencies, float]:
    authors, ids = await _authors(store, writers), itertools.count()

    async def call(number: int) -> None:
        await authors[number // count].commit(*(text_input(f"i{next(ids)}", TEXT) for _ in range(batch)))

    return await at_once(call, callers=writers, count=count)


async def _unary_commits(store: SessionStore, address: str, writers: int, count: int) -> tuple[Latencies, float]:
    authors = await _authors(store, writers)
    async with open_channel(address) as channel:
        stub: store_grpc.SessionStoreServiceAsyncStub = store_grpc.SessionStoreServiceStub(channel)

        async def call(number: int) -> None:
            author = authors[number // count]
            answer = await stub.Commit(author.request(text_input(f"i{number}", TEXT)))
            author.sequence = answer.last_sequence

        return await at_once(call, callers=writers, count=count)


async def _floor_commits(writers: int, count: int) -> tuple[Latencies, float]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        async with SqliteSessionStore.open(path) as store:
            await _authors(store, writers)
        floor = StoreFloor(path)
        try:
            return await at_once(
                lambda number: floor.commit(f"s{number // count}", text_input(f"i{number}", TEXT)),
                callers=writers,
                count=count,
            )
        finally:
            await floor.close()


async def _histories(found: _Found, parameters: Parameters) -> None:
    rows: list[list[str | float]] = []
    names = ("page at the end", "page in the middle", "fork", "resume")
    series: dict[str, list[tuple[float | str, float]]] = {name: [] for name in names}
    for length in parameters.lengths:
        async with _store() as (store, _):
            async with embedded(scripted_turns(0), store) as world:
                await world.create("s")
                await world.run("begin")
            await continue_history(store, "s", length)
            end, middle, fork = Latencies(), Latencies(), Latencies()
            for number in range(SAMPLES):
                await _timed(end, _page(store, "s", max(0, length - PAGE)))
                await _timed(middle, _page(store, "s", length // 2))
                request = store_pb2.ForkSessionRequest(
                    request_id=f"f{number}", session_id=f"f{number}", parent_session_id="s"
                )
                await _timed(fork, store.fork_session(request))
            resume = await _resume(store, "s")
        medians = [end.ms(50), middle.ms(50), fork.ms(50), resume * 1000]
        rows.append([f"{length:,}", *medians])
        for name, figure in zip(names, medians, strict=True):
            series[name].append((length, figure))
            found.figures[f"{name} of {length} items ms"] = figure
    columns = ("items", *(f"{name} ms" for name in names))
    found.tables.append(Table(title=f"reads by length of history ({PAGE} items a page)", columns=columns, rows=rows))
    found.figures["slowest page ms"] = max(figure for name in names[:2] for _, figure in series[name])
    found.figures["slowest fork ms"] = max(figure for _, figure in series["fork"])
    chart = Chart(
        name="histories",
        title="Reads by length of history",
        x_label="items",
        y_label="ms",
        series=series,
        is_log_x=True,
        is_log_y=True,
    )
    found.charts.append(chart)


async def _page(store: SessionStore, session_id: str, after: int) -> Any:
    return await store.list_items(
        store_pb2.ListItemsRequest(session_id=session_id, after_sequence=after, page_size=PAGE)
    )


async def _timed(into: Latencies, awaited: Any) -> None:
    begin = time.perf_counter()
    await awaited
    into.record(time.perf_counter() - begin)


async def _resume(store: SqliteSessionStore, session_id: str) -> float:
    """Return the seconds until a coordinator that knows nothing of a session has recorded an input to it."""
    async with embedded(scripted_turns(0), store) as world:
        world.session_id = session_id
        begin = time.perf_counter()
        await world.say("go on")
        return time.perf_counter() - begin


async def _fork_depth(found: _Found, parameters: Parameters) -> None:
    async with _store() as (store, _):
        await write_history(store, "f0", 1_000)
        forks, pages = Latencies(), Latencies()
        for depth in range(1, parameters.fork_depth + 1):
            author = Author(store, f"f{depth}")
            request = store_pb2.ForkSessionRequest(
                request_id=f"r{depth}", session_id=f"f{depth}", parent_session_id=f"f{depth - 1}"
            )
            await _timed(forks, store.fork_session(request))
            session = await store.get_session(store_pb2.GetSessionRequest(session_id=f"f{depth}"))
            author.sequence = session.session.last_sequence
            await author.commit(text_input(f"own-{depth}", TEXT))
        for after in range(0, 1_000, PAGE):
            await _timed(pages, _page(store, f"f{parameters.fork_depth}", after))
    rows: list[list[str | float]] = [["fork of a fork", *forks.row()], ["page of the deepest fork", *pages.row()]]
    title = f"forks, {parameters.fork_depth} deep"
    found.tables.append(Table(title=title, columns=("what", *COLUMNS), rows=rows))
    found.figures["deepest forks ms"] = max(forks.ms(50), pages.ms(50))


async def _watches(found: _Found, parameters: Parameters) -> None:
    rows: list[list[str | float]] = []
    spreads: dict[str, list[tuple[float | str, float]]] = {}
    for subscribers in parameters.subscribers:
        async with _store() as (store, _):
            latencies = await measure_fan_out(store, subscribers=subscribers, commits=10)
        rows.append([f"library, {subscribers} of one session", *latencies.row()])
        spreads[f"{subscribers} of one session"] = list(latencies.spread())
    for name, opened in (("library", _store()), ("gRPC", _served())):
        async with opened as (store, _):
            highest, latencies = await measure_watchers(
                store, sessions=parameters.watched_sessions, seconds=parameters.watch_seconds
            )
        label = f"{name}, {parameters.watched_sessions} of as many, {highest / 2:,.0f} commits/s"
        rows.append([label, *latencies.row()])
        spreads[f"{name}, one each of {parameters.watched_sessions}"] = list(latencies.spread())
        found.figures[f"watch {name} p50 ms"] = latencies.ms(50)
        found.figures[f"watch {name} p99 ms"] = latencies.ms(99)
    found.tables.append(Table(title="commit to watcher", columns=("watchers", *COLUMNS), rows=rows))
    chart = Chart(
        name="watches",
        title="From commit to watcher: distribution",
        x_label="percentile",
        y_label="ms",
        series=spreads,
        is_log_y=True,
    )
    found.charts.append(chart)


async def _bytes_per_turn(found: _Found, parameters: Parameters) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        said = 0
        async with SqliteSessionStore.open(path) as store:
            await new_session(store, "s")
        empty = path.stat().st_size
        async with SqliteSessionStore.open(path) as store:
            author = Author(store, "s")
            for number in range(parameters.turns):
                for items, operations in four_commits(author, number):
                    said += sum(item.ByteSize() for item in items)
                    await author.commit(*items, operations=operations)
        stored = path.stat().st_size - empty
    per_turn = stored / parameters.turns
    rows: list[list[str | float]] = [["stored", per_turn], ["messages", said / parameters.turns]]
    found.tables.append(Table(title="bytes per turn", columns=("what", "bytes"), rows=rows))
    found.figures["bytes stored per turn"] = per_turn


if __name__ == "__main__":
    run_alone(measure, PARAMETERS)
