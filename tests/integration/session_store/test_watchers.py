"""Watchers that do not read, that vanish, that come in the middle: bounded, and nobody else's concern."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from clients._rpc.channel import open_channel
from clients.session_store import RemoteSessionStore
from harness.session_store.sqlite import SqliteSessionStore
from tests.support.eventually import eventually
from tests.support.session_records import Author, new_session, text_input
from tests.support.store_service import connected, served, store_process
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2_grpc as store_grpc

COMMITS = 150
ITEMS_PER_COMMIT = 100
TEXT = "x" * 2000
LAST = COMMITS * ITEMS_PER_COMMIT


async def publish(author: Author) -> None:
    """Write 30 MB in 15,000 items."""
    for number in range(COMMITS):
        await author.commit(*(text_input(f"{number}-{index}", TEXT) for index in range(ITEMS_PER_COMMIT)))


async def sequences(store: RemoteSessionStore, after_revision: int = 0) -> list[int]:
    """Watch to the end and return the sequences in the order in which they came."""
    seen: list[int] = []
    request = store_pb2.WatchSessionRequest(session_id="s", after_revision=after_revision)
    async for response in store.watch_session(request):
        seen += [item.sequence for item in response.items]
        if seen and seen[-1] == LAST:
            break
    return seen


@pytest.mark.slow
async def test_a_watcher_that_does_not_read_costs_little_and_loses_nothing(tmp_path: Path) -> None:
    async with (
        store_process(tmp_path / "state") as process,
        connected(process) as store,
        connected(process) as healthy,
        open_channel(process.address) as channel,
    ):
        author = await new_session(store)
        stub = store_grpc.SessionStoreServiceStub(channel)
        slow: Any = stub.WatchSession(store_pb2.WatchSessionRequest(session_id="s"))  # typed as a message or the end
        assert (await slow.read()).is_current
        server = psutil.Process(process.process.pid)
        await author.commit()
        before = server.memory_info().rss
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(sequences(healthy))
            tasks.create_task(publish(author))
        assert watching.result() == list(range(1, LAST + 1))
        # Caches of SQLite and buffers of the connection; the events of the slow one alone are 30 MB.
        assert server.memory_info().rss - before < 20 * 1024 * 1024
        seen: list[int] = []
        while not seen or seen[-1] != LAST:
            response = await slow.read()
            seen += [item.sequence for item in response.items]
        assert seen == list(range(1, LAST + 1))
        assert await sequences(healthy, after_revision=COMMITS // 2) == list(
            range(ITEMS_PER_COMMIT * (COMMITS // 2 - 1) + 1, LAST + 1)
        )
        slow.cancel()


async def test_one_who_joins_in_the_middle_gets_the_past_and_what_comes(tmp_path: Path) -> None:
    async with store_process(tmp_path / "state") as process, connected(process) as store, asyncio.TaskGroup() as tasks:
        author = await new_session(store)
        publishing = tasks.create_task(publish(author))
        watching = []
        for part in (1, 3, 5):
            await eventually(lambda part=part: author.sequence >= LAST * part // 8, within_s=20)  # type: ignore[misc]
            watching.append(tasks.create_task(sequences(store)))
        await publishing
        for watch in watching:
            assert await watch == list(range(1, LAST + 1))


VANISHING = """
import asyncio, sys
from clients._rpc.channel import open_channel
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as pb2, session_store_service_pb2_grpc as grpc_pb2

async def main(address):
    channels = [open_channel(address) for _ in range(20)]
    request = pb2.WatchSessionRequest(session_id="s")
    stubs = [grpc_pb2.SessionStoreServiceStub(channel) for channel in channels]
    watches = [stub.WatchSession(request) for stub in stubs for _ in range(50)]
    for watch in watches:
        await watch.read()
    commits = [stub.CommitStream() for stub in stubs]
    await commits[0].write(pb2.CommitStreamRequest(commits=[pb2.CommitRequest(session_id="none", commit_id="c")]))
    await commits[0].read()
    print("all watch", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.slow
async def test_a_thousand_clients_that_vanish_leave_nothing_behind(tmp_path: Path) -> None:
    async with SqliteSessionStore.open(tmp_path / "sessions.db") as store, served(store) as server:
        await new_session(store)
        tasks = len(asyncio.all_tasks())
        connections = len(psutil.Process().net_connections())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", VANISHING, server.addresses[0]),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"all watch\n"
        assert store.statistics.watchers == 1000
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await eventually(lambda: store.statistics.watchers == 0, within_s=20)
        await eventually(lambda: len(server.calls) == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
        await eventually(lambda: len(psutil.Process().net_connections()) <= connections)
        assert server.calls.bytes_in_hand == 0
