"""Quiet, frozen, half-open and proxied connections."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from clients._rpc import calls
from clients._rpc.channel import KEEPALIVE, Keepalive, open_channel
from clients.session_store import RemoteSessionStore
from harness.errors import UnavailableError
from harness.session_store.sqlite import SqliteSessionStore
from services._server.server import ServerSettings
from tests.support.session_records import new_session, session_of, text_input
from tests.support.store_service import connected, served, served_sqlite, store_process
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2_grpc as store_grpc

SCALE = 20
QUICK = Keepalive(
    time_s=KEEPALIVE.time_s / SCALE,
    timeout_s=KEEPALIVE.timeout_s / SCALE,
    min_interval_s=KEEPALIVE.min_interval_s / SCALE,
)
"""What is shipped, twenty times as fast."""


def test_clients_ping_less_often_than_servers_allow() -> None:
    assert KEEPALIVE.time_s >= 2 * KEEPALIVE.min_interval_s
    # A coordinator must notice a store that is gone before its lease, 10 s, has long been over.
    assert KEEPALIVE.time_s + KEEPALIVE.timeout_s <= 15


async def test_a_quiet_stream_and_an_idle_channel_are_not_cut(tmp_path: Path) -> None:
    settings = ServerSettings(addresses=("127.0.0.1:0",), keepalive=QUICK)
    async with (
        SqliteSessionStore.open(tmp_path / "sessions.db") as local,
        served(local, settings) as server,
        open_channel(server.addresses[0], keepalive=QUICK) as channel,
        open_channel(server.addresses[0], keepalive=QUICK) as idle,
    ):
        author = await new_session(local)
        stub, idle_stub = store_grpc.SessionStoreServiceStub(channel), store_grpc.SessionStoreServiceStub(idle)
        await idle_stub.GetServerInfo(store_pb2.GetServerInfoRequest())
        watch = calls.server_stream(stub.WatchSession, store_pb2.WatchSessionRequest(session_id="s"))
        await anext(watch)
        # Six pings, which stands for a minute; the third that came too early would end the connection.
        await asyncio.sleep(6 * QUICK.time_s)
        await author.commit(text_input("i"))
        assert len((await anext(watch)).items) == 1
        await idle_stub.GetServerInfo(store_pb2.GetServerInfoRequest(), wait_for_ready=False)
        await watch.aclose()  # type: ignore[attr-defined]  # an async generator


async def test_a_frozen_store_is_noticed_by_its_watchers(tmp_path: Path) -> None:
    async with (
        store_process(tmp_path / "state") as process,
        connected(process) as store,
        open_channel(process.address, keepalive=QUICK) as channel,
    ):
        await new_session(store)
        stub = store_grpc.SessionStoreServiceStub(channel)
        watch = calls.server_stream(stub.WatchSession, store_pb2.WatchSessionRequest(session_id="s"))
        await anext(watch)
        process.process.send_signal(signal.SIGSTOP)
        with pytest.raises(UnavailableError) as caught:
            async with asyncio.timeout(QUICK.time_s + QUICK.timeout_s + 5):
                await anext(watch)
        assert caught.value.reason == "CONNECTION_LOST"
        process.process.send_signal(signal.SIGCONT)
        assert (await session_of(store, "s")).session_id == "s"


@pytest.mark.parametrize("no_proxy", ["", "localhost"])
async def test_a_proxy_in_the_environment_is_not_for_internal_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: str
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://user:secret@127.0.0.1:9")
    if no_proxy:
        monkeypatch.setenv("no_proxy", no_proxy)
    async with (
        store_process(tmp_path / "state", is_tcp=True) as process,
        connected(process, timeout_s=5) as store,
    ):
        author = await new_session(store)
        await author.commit(text_input("i"))
    assert "secret" not in process.log()


async def test_half_open_connections_do_not_hold_up_others(tmp_path: Path) -> None:
    async with served_sqlite(tmp_path) as server, RemoteSessionStore(server.addresses[0]) as store:
        host, _, port = server.addresses[0].rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(100)]
        noisy = [socket.create_connection((host, int(port))) for _ in range(20)]
        try:
            for connection in noisy:
                connection.sendall(b"\x00GET / HTTP/1.1\r\n\xff\xfe" * 100)
            author = await new_session(store)
            await author.commit(text_input("i"))
        finally:
            for connection in silent + noisy:
                connection.close()
        assert (await session_of(store, "s")).session_id == "s"
