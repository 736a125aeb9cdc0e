"""A store's process dies and comes back: nothing acknowledged is lost, nothing is written twice, clients go on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from clients.session_store import RemoteSessionStore
from harness.errors import DeadlineExceededError, UnavailableError
from harness.session_store.sqlite.writer import AFTER_COMMIT, BEFORE_COMMIT
from tests.support.eventually import eventually
from tests.support.session_records import Author, items_of, new_session, session_of, text_input
from tests.support.store_service import StoreProcess, connected, store_process
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


@pytest.fixture(params=[False, True], ids=["unix", "tcp"])
async def process(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StoreProcess]:
    async with store_process(tmp_path / "state", is_tcp=request.param) as started:
        yield started


async def test_calls_while_the_store_is_down_are_answered_soon_after_it_is_back(process: StoreProcess) -> None:
    async with connected(process) as store:
        await new_session(store)
        await process.end(signal.SIGKILL)
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(session_of(store, "s")) for _ in range(3)]
            # Long enough for the back-off to reach its bound.
            done, _ = await asyncio.wait(waiting, timeout=4.0)
            assert not done
            await process.start()
            back_s = time.monotonic()
            waiting.append(tasks.create_task(session_of(store, "s")))
        assert {task.result().session_id for task in waiting} == {"s"}
        assert time.monotonic() - back_s < 3.0


async def test_a_call_to_a_store_that_does_not_come_back_ends_in_time(process: StoreProcess) -> None:
    async with connected(process, timeout_s=0.5) as store:
        author = await new_session(store)
        await process.end(signal.SIGKILL)
        with pytest.raises((UnavailableError, DeadlineExceededError)):
            await session_of(store, "s")
        with pytest.raises(UnavailableError) as caught:  # whether it was written is unknown
            await author.commit(text_input("i"))
        assert caught.value.reason == "CONNECTION_LOST"


@pytest.mark.parametrize(("point", "was_written"), [(BEFORE_COMMIT, False), (AFTER_COMMIT, True)])
async def test_a_commit_in_flight_when_the_store_dies_is_written_once(
    tmp_path: Path, point: str, was_written: bool
) -> None:
    # A store's first transaction removes what is old, when it starts; then come the session's and the commit's.
    async with (
        store_process(tmp_path / "state", kill_at=f"{point}:3") as process,
        connected(process) as store,
        asyncio.TaskGroup() as tasks,
    ):
        author = await new_session(store)
        committing = tasks.create_task(author.send(author.request(text_input("i"))))
        assert await process.process.wait() == -signal.SIGKILL
        assert not committing.done()
        await process.start()
        answer = await committing
        assert (answer.last_sequence, answer.duplicate) == (1, was_written)
        assert [item.input.input_id for item in await items_of(store, "s")] == ["i"]


async def test_commits_of_many_sessions_survive_kills_with_one_row_each(process: StoreProcess) -> None:
    writers, commits, commits_per_life = 16, 40, 100
    acknowledged = 0

    async def write(author: Author) -> None:
        nonlocal acknowledged
        for number in range(commits):
            answer = await author.commit(text_input(f"i{number}"))
            assert answer.last_sequence == number + 1
            acknowledged += 1

    def is_acknowledged(count: int) -> bool:
        return acknowledged >= count

    async def kill() -> None:
        for until in range(commits_per_life, writers * commits, commits_per_life):
            await eventually(partial(is_acknowledged, until), within_s=30)
            await process.end(signal.SIGKILL)
            await process.start()

    async with connected(process) as store:
        authors = [await new_session(store, f"s{number}") for number in range(writers)]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kill())
            for author in authors:
                tasks.create_task(write(author))
        for author in authors:
            items = await items_of(store, author.session_id)
            assert [item.input.input_id for item in items] == [f"i{number}" for number in range(commits)]


async def test_a_watch_goes_on_over_restarts_without_gap_or_repeat(process: StoreProcess) -> None:
    seen: list[store_pb2.WatchSessionResponse] = []

    async def watch(store: RemoteSessionStore) -> None:
        async for response in store.watch_session(store_pb2.WatchSessionRequest(session_id="s")):
            seen.append(response)
            if response.revision == 30:
                return

    async with connected(process) as store, asyncio.TaskGroup() as tasks:
        author = await new_session(store)
        watching = tasks.create_task(watch(store))
        for number in range(1, 31):
            await author.commit(text_input(f"i{number}"))
            if number % 10 == 5:
                await process.end(signal.SIGKILL if number < 20 else signal.SIGTERM)
                await process.start()
        await watching
    assert [item.sequence for response in seen for item in response.items] == list(range(1, 31))
    revisions = [response.revision for response in seen]
    assert revisions == sorted(set(revisions))


async def test_a_quiet_watch_says_once_that_it_is_current(process: StoreProcess) -> None:
    async with connected(process) as store:
        author = await new_session(store)
        watch = aiter(store.watch_session(store_pb2.WatchSessionRequest(session_id="s")))
        assert (await anext(watch)).is_current
        await process.end(signal.SIGKILL)
        await process.start()
        # The watch is there again.
        await eventually(lambda: session_of(store, "s"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(author.commit(text_input("i")))
            response = await anext(watch)
        assert [item.sequence for item in response.items] == [1]
        await watch.aclose()  # type: ignore[attr-defined]  # an async generator


async def test_a_watch_of_a_session_that_is_deleted_meanwhile_ends(process: StoreProcess) -> None:
    async with connected(process) as store, connected(process) as other:
        await new_session(store)
        watch = aiter(store.watch_session(store_pb2.WatchSessionRequest(session_id="s")))
        await anext(watch)
        await other.delete_session(store_pb2.DeleteSessionRequest(session_id="s"))
        rest = [response async for response in watch]
        assert [response.is_deleted for response in rest] == [True]


async def test_only_one_store_opens_a_file_and_only_one_serves_a_socket(process: StoreProcess, tmp_path: Path) -> None:
    second = StoreProcess(process.state)
    second.address = f"unix:{tmp_path}/other.sock"
    with pytest.raises(AssertionError, match="is open in another session store"):
        await second.start()
    third = StoreProcess(tmp_path / "elsewhere")
    third.address = process.address
    with pytest.raises(AssertionError, match="cannot listen on .*(another process serves it|address already in use)"):
        await third.start()
    assert (await second.process.wait(), await third.process.wait()) == (1, 1)
    async with connected(process) as store:
        await new_session(store)
