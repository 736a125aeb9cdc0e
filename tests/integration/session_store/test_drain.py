"""A store's process that is told to end: watches end at once, calls finish, a second signal forces."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clients._rpc import calls
from clients._rpc.channel import open_channel
from harness.errors import UnavailableError
from harness.session_store.sqlite import SqliteSessionStore
from tests.support.eventually import eventually
from tests.support.session_records import Author, items_of, new_session, text_input
from tests.support.store_service import StoreProcess, connected, store_process
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2_grpc as store_grpc


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[StoreProcess]:
    async with store_process(tmp_path / "state", "--drain-grace-seconds", "25", "--log-level", "debug") as started:
        yield started


async def test_open_watches_end_at_once_with_a_status_that_says_resume(process: StoreProcess) -> None:
    async with connected(process) as store, open_channel(process.address) as channel:
        await new_session(store)
        watch = calls.server_stream(
            store_grpc.SessionStoreServiceStub(channel).WatchSession, store_pb2.WatchSessionRequest(session_id="s")
        )
        await anext(watch)
        begin_s = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        with pytest.raises(UnavailableError) as caught:
            await anext(watch)
        assert (caught.value.reason, caught.value.retry_after_s is not None) == ("DRAINING", True)
        assert await process.process.wait() == 0
        assert time.monotonic() - begin_s < 2.0
    assert "was destroyed" not in process.log()
    assert '"level": "ERROR"' not in process.log()


async def test_a_watch_that_nobody_reads_does_not_hold_up_the_end(process: StoreProcess) -> None:
    async with connected(process) as store, open_channel(process.address) as channel:
        author = await new_session(store)
        stub = store_grpc.SessionStoreServiceStub(channel)
        watch = stub.WatchSession(store_pb2.WatchSessionRequest(session_id="s"))
        await watch.read()
        for number in range(30):
            # More than the connection takes in.
            await author.commit(*(text_input(f"i{number}-{index}", "x" * 60_000) for index in range(10)))
        begin_s = time.monotonic()
        assert await process.end() == 0
        assert time.monotonic() - begin_s < 4.0
        watch.cancel()


async def test_calls_in_hand_finish_and_nothing_acknowledged_is_lost(process: StoreProcess) -> None:
    acknowledged: dict[str, int] = {}

    async def write(author: Author) -> None:
        for number in range(10_000):
            try:
                answer = await author.commit(text_input(f"i{number}"))
            except UnavailableError:
                return
            acknowledged[author.session_id] = answer.last_sequence

    async with connected(process, timeout_s=2.0) as store:
        authors = [await new_session(store, f"s{number}") for number in range(8)]
        async with asyncio.TaskGroup() as tasks:
            for author in authors:
                tasks.create_task(write(author))
            await eventually(lambda: len(acknowledged) == len(authors))
            assert await process.end() == 0
    assert "was destroyed" not in process.log()
    async with SqliteSessionStore.open(process.state / "sessions.db") as local:
        for session_id, sequence in acknowledged.items():
            assert len(await items_of(local, session_id, page_size=1000)) >= sequence


async def open_upload(process: StoreProcess, never: asyncio.Event) -> None:
    """Begin a call that takes as long as its caller likes."""

    async def frames() -> AsyncIterator[store_pb2.PutBlobRequest]:
        blob = llm_pb2.BlobRef(digest="0" * 64, size_bytes=1000, media_type="text/plain")
        yield store_pb2.PutBlobRequest(session_id="s", blob=blob, data=b"x")
        await never.wait()

    async with open_channel(process.address) as channel:
        stub = store_grpc.SessionStoreServiceStub(channel)
        with pytest.raises(UnavailableError):
            await calls.unary(stub.PutBlob, frames, timeout_s=30, is_idempotent=False)


async def test_a_second_signal_forces_the_end(process: StoreProcess) -> None:
    never = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        async with connected(process) as store:
            await new_session(store)
        tasks.create_task(open_upload(process, never))
        await eventually(lambda: "SessionStoreService/PutBlob" in process.log())
        process.process.send_signal(signal.SIGTERM)
        await eventually(lambda: "drain began" in process.log())
        begin_s = time.monotonic()
        assert await process.end() == 1
        assert time.monotonic() - begin_s < 1.0
        never.set()


async def test_the_grace_bounds_a_call_that_does_not_end(tmp_path: Path) -> None:
    never = asyncio.Event()
    async with (
        store_process(tmp_path / "state", "--drain-grace-seconds", "0.5", "--log-level", "debug") as process,
        asyncio.TaskGroup() as tasks,
    ):
        async with connected(process) as store:
            await new_session(store)
        tasks.create_task(open_upload(process, never))
        await eventually(lambda: "SessionStoreService/PutBlob" in process.log())
        begin_s = time.monotonic()
        assert await process.end() == 0
        assert time.monotonic() - begin_s < 3.0
        never.set()
