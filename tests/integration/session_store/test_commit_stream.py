"""Commits over the stream and one by one: the same answers, and one session's trouble is no other's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from clients._rpc import calls
from clients._rpc.channel import open_channel
from clients.session_store import RemoteSessionStore
from harness.errors import ConflictError, InvalidArgumentError, UnauthenticatedError, UnavailableError
from harness.session_store import SessionStore
from harness.session_store.sqlite import SqliteSessionStore
from services._server.identity import Caller, CallFacts
from services._server.server import serve
from services.session_store.servicer import store_service
from tests.support.session_records import items_of, new_session, text_input
from tests.support.store_service import SETTINGS, served, served_sqlite
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2_grpc as store_grpc


class HeldStore(SqliteSessionStore):
    """Keeps commits of the session "held" until it is told to go on."""

    go_on: asyncio.Event
    held: int

    async def commit(self, request: store_pb2.CommitRequest) -> store_pb2.CommitResponse:
        if request.session_id == "held":
            self.held += 1
            await self.go_on.wait()
        return await super().commit(request)


async def test_a_commit_over_the_stream_and_one_alone_get_the_same_answer(tmp_path: Path) -> None:
    async with (
        served_sqlite(tmp_path) as server,
        RemoteSessionStore(server.addresses[0]) as store,
        open_channel(server.addresses[0]) as channel,
    ):
        author = await new_session(store)
        stub = store_grpc.SessionStoreServiceStub(channel)
        request = author.request(text_input("i"))
        first = await author.send(request)
        again = await calls.unary(stub.Commit, request, timeout_s=10, is_idempotent=True)
        assert (first.duplicate, again.duplicate) == (False, True)
        again.duplicate = False
        assert again == first


async def test_a_refused_commit_leaves_the_others_of_its_message_alone(tmp_path: Path) -> None:
    async with served_sqlite(tmp_path) as server, RemoteSessionStore(server.addresses[0]) as store:
        good, stale, newer = [await new_session(store, name) for name in ("good", "stale", "newer")]
        stale.sequence = 7
        # Field 99 of a commit does not exist here.
        unknown = store_pb2.CommitRequest.FromString(
            newer.request(text_input("i")).SerializeToString() + b"\x9a\x06\x01x"
        )
        answers = await asyncio.gather(
            good.send(good.request(text_input("i"))),
            stale.send(stale.request(text_input("i"))),
            store.commit(unknown),
            return_exceptions=True,
        )
        assert isinstance(answers[0], store_pb2.CommitResponse)
        assert isinstance(answers[1], ConflictError)
        assert answers[1].metadata == {"last_sequence": "0", "revision": "0"}
        assert isinstance(answers[2], InvalidArgumentError)
        assert answers[2].reason == "UNKNOWN_FIELDS"


async def test_a_commit_that_takes_long_holds_up_no_other_and_is_finished_by_a_repetition(tmp_path: Path) -> None:
    async with HeldStore.open(tmp_path / "sessions.db") as local:
        assert isinstance(local, HeldStore)
        local.go_on, local.held = asyncio.Event(), 0
        async with served(local) as server, RemoteSessionStore(server.addresses[0], timeout_s=0.3) as store:
            held, other = await new_session(store, "held"), await new_session(store, "other")
            request = held.request(text_input("i"))
            with pytest.raises(UnavailableError) as caught:
                async with asyncio.TaskGroup() as tasks:
                    slow = tasks.create_task(_outcome(store, request))
                    await other.commit(text_input("i"))
                raise slow.result()
            assert caught.value.reason == "CONNECTION_LOST"
            async with asyncio.TaskGroup() as tasks:
                repeated = tasks.create_task(store.commit(request))
                local.go_on.set()
            assert repeated.result().last_sequence == 1
            assert len(await items_of(store, "held")) == 1


async def _outcome(store: SessionStore, request: store_pb2.CommitRequest) -> UnavailableError:
    with pytest.raises(UnavailableError) as caught:
        await store.commit(request)
    return caught.value


async def test_a_refused_stream_is_told_to_every_caller(tmp_path: Path) -> None:
    async def identify(facts: CallFacts) -> Caller:
        raise UnauthenticatedError("no token", reason="TOKEN_MISSING")

    async with (
        SqliteSessionStore.open(tmp_path / "sessions.db") as local,
        store_service(local) as service,
        serve(SETTINGS, [service], identify=identify) as server,
        RemoteSessionStore(server.addresses[0]) as store,
    ):
        author = await new_session(local)
        for _ in range(2):
            with pytest.raises(UnauthenticatedError) as caught:
                await store.commit(author.request(text_input("i")))
            assert caught.value.reason == "TOKEN_MISSING"


async def test_a_stream_that_asks_for_something_unknown_is_refused(tmp_path: Path) -> None:
    async with served_sqlite(tmp_path) as server, open_channel(server.addresses[0]) as channel:
        stub = store_grpc.SessionStoreServiceStub(channel)
        newer = store_pb2.CommitStreamRequest.FromString(b"\x9a\x06\x01x")
        with pytest.raises(InvalidArgumentError) as caught:
            async for _ in calls.server_stream(stub.CommitStream, iter([newer])):
                pass
        assert caught.value.reason == "UNKNOWN_FIELDS"


async def test_a_closed_client_says_so(tmp_path: Path) -> None:
    async with served_sqlite(tmp_path) as server, RemoteSessionStore(server.addresses[0]) as store:
        author = await new_session(store)
        watch = aiter(store.watch_session(store_pb2.WatchSessionRequest(session_id="s")))
        await anext(watch)
        await store.aclose()
        await store.aclose()
        for call in (author.commit(text_input("i")), items_of(store, "s"), anext(watch)):
            with pytest.raises(UnavailableError) as caught:
                await call
            assert caught.value.reason == "STORE_CLOSED"
