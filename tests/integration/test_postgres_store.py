"""What a session store on PostgreSQL does when connections, the server or a replica go away in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest

from harness import faults
from harness.errors import (
    ConflictError,
    FailedPreconditionError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from harness.session_store import ITEM_SCHEMA_VERSION, OPERATION_SCHEMA_VERSION, SESSION_FORMAT_VERSION, SessionStore
from harness.session_store.postgres import PostgresSessionStore
from harness.session_store.postgres.notifications import CHANNEL
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.writer import AFTER_COMMIT, BEFORE_COMMIT
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.session_records import Author, items_of, new_session, session_of, text_input, write_tool_turn
from unreal_agent.server.v1 import server_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

T = TypeVar("T")

_VERSIONS = server_pb2.ReaderVersions(
    session_format=SESSION_FORMAT_VERSION, item=ITEM_SCHEMA_VERSION, operation=OPERATION_SCHEMA_VERSION
)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


def _kill_all(server: PostgresServer) -> None:
    with server.connect() as connection:
        connection.execute(
            b"SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            b" WHERE application_name = 'unreal-agent-session-store'"
        )


async def _write_many(store: SessionStore, name: str, count: int) -> None:
    """Commit inputs one after the other; each is repeated until it is answered."""
    author = await _until_answered(partial(new_session, store, name))
    for number in range(count):
        request = author.request(text_input(f"i{number}"))
        response = await _until_answered(partial(store.commit, request))
        author.sequence = response.last_sequence


async def _until_answered(call: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await call()
        except UnavailableError:
            await asyncio.sleep(0.05)


async def _check_all_there(store: SessionStore, name: str, count: int) -> None:
    items = await items_of(store, name)
    assert [item.input.input_id for item in items] == [f"i{number}" for number in range(count)]
    assert [item.sequence for item in items] == list(range(1, count + 1))


async def test_killed_connections_lose_and_repeat_nothing(server: PostgresServer) -> None:
    async with PostgresSessionStore.open(server.make_schema()) as store:
        async with asyncio.TaskGroup() as tasks:
            writers = [tasks.create_task(_write_many(store, f"s{number}", 20)) for number in range(8)]
            while not all(writer.done() for writer in writers):
                await asyncio.to_thread(_kill_all, server)
                await asyncio.sleep(0.05)
        for number in range(8):
            await _check_all_there(store, f"s{number}", 20)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_restart_of_the_server_loses_and_repeats_nothing(server: PostgresServer, mode: str) -> None:
    async with PostgresSessionStore.open(server.make_schema()) as store:
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(_write_many(store, f"s{number}", 40))
            await asyncio.to_thread(server.stop, mode)
            await asyncio.to_thread(server.start)
        for number in range(4):
            await _check_all_there(store, f"s{number}", 40)


@pytest.mark.parametrize("point", [BEFORE_COMMIT, AFTER_COMMIT])
async def test_connection_lost_around_a_commit_gives_one_commit(server: PostgresServer, point: str) -> None:
    async with PostgresSessionStore.open(server.make_schema()) as store:
        author = await new_session(store)
        request = author.request(text_input("i"))
        killed: list[str] = []

        def kill() -> None:
            faults.set_handler(point, None)
            killed.append(point)
            _kill_all(server)

        faults.set_handler(point, kill)
        try:
            await store.commit(request)
        finally:
            faults.set_handler(point, None)
        again = await store.commit(request)
        assert (killed, again.duplicate, again.last_sequence) == ([point], True, 1)
        assert len(await items_of(store, "s")) == 1


async def test_replicas_start_at_once_on_an_empty_database(server: PostgresServer) -> None:
    url = server.make_schema()

    async def store_id() -> str:
        async with PostgresSessionStore.open(url) as store:
            return (await store.get_server_info(store_pb2.GetServerInfoRequest())).info.instance_id

    assert len(set(await asyncio.gather(*(store_id() for _ in range(4))))) == 1


async def test_change_through_one_replica_wakes_watchers_of_another(server: PostgresServer) -> None:
    url = server.make_schema()
    async with PostgresSessionStore.open(url) as first, PostgresSessionStore.open(url) as second:
        author = await new_session(first)
        async with aclosing(second.watch_session(store_pb2.WatchSessionRequest(session_id="s"))) as watch:  # type: ignore[type-var]  # an async generator behind the protocol
            assert (await anext(watch)).is_current
            await author.commit(text_input("i"))
            assert (await anext(watch)).items[0].input.input_id == "i"


async def test_lost_notification_is_found_by_the_table(server: PostgresServer) -> None:
    url = server.make_schema()
    async with PostgresSessionStore.open(url) as store:
        await new_session(store)
        async with aclosing(store.watch_session(store_pb2.WatchSessionRequest(session_id="s"))) as watch:  # type: ignore[type-var]  # as above
            assert (await anext(watch)).is_current
            with server.connect() as other:
                # As another replica that was killed between its commit and the notification.
                schema = url.rsplit("%3D", 1)[1]
                other.execute(f'SET search_path = "{schema}"'.encode())
                other.execute(f"NOTIFY {CHANNEL}, 'nothing of ours'".encode())
                other.execute(b"UPDATE sessions SET revision = revision + 1 WHERE session_id = 's'")
            assert (await anext(watch)).revision == 1


async def test_second_replica_fences_the_owner_of_a_lease(server: PostgresServer) -> None:
    url = server.make_schema()
    async with PostgresSessionStore.open(url) as first, PostgresSessionStore.open(url) as second:
        author = await new_session(first)
        old, new, other = (
            session_pb2.Incarnation(name=name, incarnation_id=incarnation_id, address="a")
            for name, incarnation_id in (("c", "1"), ("c", "2"), ("d", "3"))
        )
        held = await first.acquire_lease(_acquire(old))
        with pytest.raises(UnavailableError) as owned:
            await second.acquire_lease(_acquire(other))
        taken = await second.acquire_lease(_acquire(new))
        assert (owned.value.reason, taken.session.epoch) == ("NOT_OWNER", held.session.epoch + 1)
        author.epoch = held.session.epoch
        with pytest.raises(ConflictError) as stale:
            await first.commit(author.request(text_input("i")))
        with pytest.raises(FailedPreconditionError) as replaced:
            await first.renew_lease(store_pb2.RenewLeaseRequest(incarnation=old))
        assert (stale.value.reason, replaced.value.reason) == ("STALE_EPOCH", "INCARNATION_REPLACED")


def _acquire(incarnation: session_pb2.Incarnation) -> store_pb2.AcquireLeaseRequest:
    return store_pb2.AcquireLeaseRequest(session_id="s", incarnation=incarnation, versions=_VERSIONS)


async def test_two_replicas_let_one_of_two_commits_through(server: PostgresServer) -> None:
    url = server.make_schema()
    async with PostgresSessionStore.open(url) as first, PostgresSessionStore.open(url) as second:
        await new_session(first)
        for number in range(20):
            at = (await session_of(first, "s")).last_sequence
            outcomes = await asyncio.gather(
                first.commit(_at(Author(first, "s"), at, f"a{number}")),
                second.commit(_at(Author(second, "s"), at, f"b{number}")),
                return_exceptions=True,
            )
            refused = [outcome for outcome in outcomes if isinstance(outcome, ConflictError)]
            assert [error.reason for error in refused] == ["SEQUENCE_CONFLICT"]
        assert len(await items_of(second, "s")) == 20


def _at(author: Author, sequence: int, input_id: str) -> store_pb2.CommitRequest:
    author.sequence = sequence
    return author.request(text_input(input_id), commit_id=input_id)


async def test_token_made_through_one_replica_is_told_by_another(server: PostgresServer) -> None:
    url = server.make_schema()
    async with (
        PostgresSessionStore.open(url) as first,
        PostgresSessionStore.open(url) as second,
        aclosing(second.watch_tokens(store_pb2.WatchTokensRequest())) as watch,  # type: ignore[type-var]  # as above
    ):
        assert (await anext(watch)).is_current
        token = store_pb2.Token(rights=[store_pb2.RIGHT_READ])
        made = await first.create_token(store_pb2.CreateTokenRequest(request_id="r", token=token))
        assert (await anext(watch)).changes[0].token == made.token


async def test_nul_and_control_characters_come_back_as_on_sqlite(server: PostgresServer, tmp_path: Path) -> None:
    async with (
        PostgresSessionStore.open(server.make_schema()) as postgres,
        SqliteSessionStore.open(tmp_path / "sessions.db") as sqlite,
    ):
        seen = [await _with_strange_texts(store) for store in (postgres, sqlite)]
    assert seen[0] == seen[1]
    assert seen[0][:2] == ["a\0b\x01c\x010\x011\\%s?", "n\0\x01"]


async def _with_strange_texts(store: SessionStore) -> list[str]:
    author = await new_session(store)
    await author.commit(text_input("i", "a\0b\x01c\x010\x011\\%s?"))
    owner = session_pb2.Incarnation(name="n\0\x01", incarnation_id="1", address="\0")
    leased = await store.acquire_lease(_acquire(owner))
    with pytest.raises(NotFoundError) as unknown:
        await session_of(store, "\0")
    text = (await items_of(store, "s"))[0].input.content.parts[0].text.text
    return [text, leased.session.owner.name, unknown.value.reason]


async def test_session_moves_from_a_file_to_the_database_and_back(server: PostgresServer, tmp_path: Path) -> None:
    async with (
        PostgresSessionStore.open(server.make_schema()) as postgres,
        SqliteSessionStore.open(tmp_path / "sessions.db") as sqlite,
    ):
        author = await new_session(sqlite)
        await write_tool_turn(author, 1)
        await _move(sqlite, postgres, "s", "moved")
        await _move(postgres, sqlite, "moved", "back")
        assert await items_of(sqlite, "back") == await items_of(sqlite, "s")


async def _move(source: SessionStore, target: SessionStore, session_id: str, new_id: str) -> None:
    async def requests() -> AsyncIterator[store_pb2.ImportSessionRequest]:
        async for exported in source.export_session(store_pb2.ExportSessionRequest(session_id=session_id)):
            yield store_pb2.ImportSessionRequest(session_id=new_id, records=exported.records)

    await target.import_session(requests())


async def test_database_of_a_later_release_is_not_touched(server: PostgresServer) -> None:
    url = server.make_schema()
    async with PostgresSessionStore.open(url):
        pass
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE store SET version = 99")
    with pytest.raises(UnsupportedError) as caught:
        async with PostgresSessionStore.open(url):
            pass
    assert caught.value.reason == "UNSUPPORTED_STORE_VERSION"


async def test_password_of_the_url_is_never_told() -> None:
    for url in ("postgresql://me:hush@127.0.0.1:1/x", "postgresql://me:hush@[broken"):
        with pytest.raises((UnavailableError, FailedPreconditionError)) as caught:
            async with PostgresSessionStore.open(url):
                pass
        chain: list[str] = []
        error: BaseException | None = caught.value
        while error is not None:
            chain.append(str(error))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        assert "hush" not in " ".join(chain)
