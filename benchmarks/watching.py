"""Measures how long a commit takes to reach those who watch: many of one session, and one each of many."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.histories import TEXT
from benchmarks.load import at_once, open_loop
from benchmarks.results import Latencies
from harness.primitives.streams import closing
from harness.session_store import SessionStore
from tests.support.session_records import Author, new_session, text_input
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

ARRIVE_S = 30.0


class _Watchers:
    """Subscribers of sessions, and when each commit that they see was due."""

    def __init__(self, store: SessionStore) -> None:
        self.latencies = Latencies()
        self.due: dict[tuple[str, int], float] = {}
        """When the commit was sent that wrote a session's item of a sequence."""

        self._store = store
        self._current = 0
        self._changed = asyncio.Condition()
        self.received = 0

    async def watch(self, session_id: str) -> None:
        """Watch for ever."""
        async with closing(self._store.watch_session(store_pb2.WatchSessionRequest(session_id=session_id))) as changes:
            is_current = False
            async for change in changes:
                now = time.perf_counter()
                for item in change.items:
                    if (due := self.due.get((session_id, item.sequence))) is not None:
                        self.latencies.record(now - due)
                        self.received += 1
                if change.is_current and not is_current:
                    is_current = True
                    self._current += 1
                async with self._changed:
                    self._changed.notify_all()

    async def until(self, *, current: int = 0, received: int = 0) -> None:
        """Wait until so many have begun and so many items have arrived."""
        async with asyncio.timeout(ARRIVE_S), self._changed:
            await self._changed.wait_for(lambda: self._current >= current and self.received >= received)


@asynccontextmanager
async def _watching(store: SessionStore, session_ids: list[str]) -> AsyncIterator[_Watchers]:
    watchers = _Watchers(store)
    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(watchers.watch(session_id)) for session_id in session_ids]
        await watchers.until(current=len(session_ids))
        yield watchers
        for one in watching:
            one.cancel()


async def measure_fan_out(store: SessionStore, *, subscribers: int, commits: int) -> Latencies:
    """Commit to one session now and then; return when each of its subscribers saw it."""
    author = await new_session(store, "watched")
    async with _watching(store, ["watched"] * subscribers) as watchers:
        for number in range(commits):
            watchers.due["watched", author.sequence + 1] = time.perf_counter()
            await author.commit(text_input(f"i{number}", TEXT))
            await watchers.until(received=subscribers * (number + 1))
        return watchers.latencies


async def measure_watchers(store: SessionStore, *, sessions: int, seconds: float) -> tuple[float, Latencies]:
    """Find the highest steady rate of commits with one watcher for each session, then commit at half of it.

    Returns:
        The highest rate per second, and what passed from when a commit was due until its watcher had it.
    """
    authors = [await new_session(store, f"w{number}") for number in range(sessions)]
    numbers, free = itertools.count(), asyncio.Queue[Author]()

    async def commit(author: Author) -> None:
        await author.commit(text_input(f"i{next(numbers)}", TEXT))

    async with _watching(store, [author.session_id for author in authors]) as watchers:
        count = max(2, round(seconds * 10))
        _, highest = await at_once(lambda number: commit(authors[number // count]), callers=sessions, count=count)
        for author in authors:
            free.put_nowait(author)
        rate = highest / 2
        begin = time.perf_counter()

        async def one(number: int) -> None:
            # A session has one commit in flight: a commit that is due takes a session that has none.
            author = await free.get()
            watchers.due[author.session_id, author.sequence + 1] = begin + number / rate
            await commit(author)
            free.put_nowait(author)

        begin = time.perf_counter()
        sent = await open_loop(one, rate=rate, seconds=seconds, limit=100_000)
        await watchers.until(received=sent.count)
        return highest, watchers.latencies
