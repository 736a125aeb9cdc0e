"""The writer loses nothing and leaves nothing half done, whatever fails and whoever goes away."""

from __future__ import annotations

import asyncio
import errno
import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from harness import faults
from harness.errors import (
    DataLossError,
    FailedPreconditionError,
    HarnessError,
    ResourceExhaustedError,
    UnavailableError,
)
from harness.session_store.sqlite import SqliteSessionStore, StoreOptions
from harness.session_store.sqlite.state_check import check_state
from harness.session_store.sqlite.writer import AFTER_COMMIT, BEFORE_COMMIT
from tests.support.eventually import eventually
from tests.support.session_records import (
    Author,
    completed,
    final,
    items_of,
    new_session,
    operation,
    operations_of,
    response,
    session_of,
    text_input,
    turn,
    waiting,
    write_tool_turn,
)
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteSessionStore]:
    async with SqliteSessionStore.open(path) as opened:
        yield opened


@contextmanager
def failing(point: str, make_error: Callable[[], Exception], times: int = 1) -> Iterator[None]:
    left = times

    def fail() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise make_error()

    faults.set_handler(point, fail)
    try:
        yield
    finally:
        faults.set_handler(point, None)


def no_space() -> Exception:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_file_that_is_gone_takes_no_more_writes(
    path: Path, store: SqliteSessionStore, is_replaced: bool
) -> None:
    author = await new_session(store)
    path.unlink()
    if is_replaced:
        path.touch()
    for _ in range(2):
        with pytest.raises(DataLossError) as caught:
            await author.commit(text_input("i1"))
        assert caught.value.reason == "STORE_GONE"


async def answered_turn(store: SqliteSessionStore) -> Author:
    author = await new_session(store)
    await author.commit(text_input("i1"), turn("t1"))
    await author.commit(response("t1", ["c1"]), waiting("t1", "c1", "o1"), operations=[operation("s", "o1", "c1")])
    return author


async def test_failed_commit_leaves_nothing_and_its_repetition_all(store: SqliteSessionStore) -> None:
    author = await answered_turn(store)
    before = (await items_of(store, "s"), await operations_of(store, "s"), await session_of(store, "s"))
    request = author.request(final("t1", "c1", "o1"), operations=[completed("s", "o1", "c1")])
    with failing(BEFORE_COMMIT, no_space), pytest.raises(ResourceExhaustedError) as caught:
        await store.commit(request)
    assert caught.value.reason == "STORAGE_FULL"
    assert (await items_of(store, "s"), await operations_of(store, "s"), await session_of(store, "s")) == before
    assert not (await store.commit(request)).duplicate
    assert await operations_of(store, "s") == [completed("s", "o1", "c1")]


async def test_lost_answer_is_given_again(path: Path) -> None:
    async with SqliteSessionStore.open(path) as store:
        author = await answered_turn(store)
        watch = aiter(store.watch_session(store_pb2.WatchSessionRequest(session_id="s", after_revision=2)))
        await anext(watch)
        request = author.request(final("t1", "c1", "o1"), operations=[completed("s", "o1", "c1")])
        with failing(AFTER_COMMIT, no_space), pytest.raises(ResourceExhaustedError):
            await store.commit(request)
        seen = await anext(watch)
        assert [item.sequence for item in seen.items] == [5], "what is durable is shown, whoever was told"
        first = await store.commit(request)
        assert (first.duplicate, first.revision, first.last_sequence) == (True, 3, 5)
    async with SqliteSessionStore.open(path) as store:
        assert await store.commit(request) == first
        assert len(await items_of(store, "s")) == 5


async def test_transaction_that_fails_as_a_whole_is_written_one_by_one(store: SqliteSessionStore) -> None:
    authors = [await new_session(store, f"s{number}") for number in range(8)]
    with failing(BEFORE_COMMIT, lambda: sqlite3.OperationalError("disk I/O error"), times=2):
        results = await asyncio.gather(*(author.commit(text_input("i")) for author in authors), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    assert [type(error) for error in errors] == [UnavailableError]
    lengths = [len(await items_of(store, author.session_id)) for author in authors]
    assert [length == 0 for length in lengths] == [isinstance(result, BaseException) for result in results]


async def test_full_disk_refuses_and_room_lets_go_on(path: Path) -> None:
    options = StoreOptions(max_size_bytes=1024 * 1024)
    acknowledged: list[str] = []
    async with SqliteSessionStore.open(path, options=options) as store:
        author, victim = await new_session(store), await new_session(store, "victim")
        await victim.commit(text_input("big", "x" * 300_000))
        with pytest.raises(ResourceExhaustedError) as caught:
            for number in range(1_000):
                await author.commit(text_input(f"i{number}", "x" * 5_000), operations=[operation("s", f"o{number}")])
                acknowledged.append(f"i{number}")
        assert caught.value.reason == "STORAGE_FULL"
        assert [item.input.input_id for item in await items_of(store, "s")] == acknowledged
        assert len(await operations_of(store, "s")) == len(acknowledged)
        await store.delete_session(store_pb2.DeleteSessionRequest(session_id="victim"))

        async def goes_on() -> bool:
            try:
                await author.commit(text_input("after"))
            except ResourceExhaustedError:
                return False
            return True

        await eventually(goes_on)
    assert check_state(path).findings == ()
    async with SqliteSessionStore.open(path, options=options) as store:
        found = [item.input.input_id for item in await items_of(store, "s")]
        assert found == [*acknowledged, "after"]


async def test_lost_permission_is_said_and_nothing_is_written(store: SqliteSessionStore) -> None:
    author = await new_session(store)
    denied = failing(BEFORE_COMMIT, lambda: PermissionError(errno.EACCES, "Permission denied"))
    with denied, pytest.raises(FailedPreconditionError) as caught:
        await author.commit(text_input("i"))
    assert caught.value.reason == "STATE_DIR_NOT_WRITABLE"
    await author.commit(text_input("i"))


@pytest.mark.parametrize("rounds", [50, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(300)])])
async def test_cancelled_callers_leave_the_whole_effect_or_none(
    store: SqliteSessionStore, path: Path, rounds: int
) -> None:
    chance = random.Random(7)
    threads = threading.active_count()
    authors = [await new_session(store, f"s{number}") for number in range(10)]
    last = await new_session(store, "last")
    stored: dict[str, set[str]] = {author.session_id: set() for author in authors}
    for round_ in range(rounds):

        async def write(author: Author, input_id: str) -> None:
            await author.commit(text_input(input_id), operations=[operation(author.session_id, input_id)])
            stored[author.session_id].add(input_id)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(write(author, f"i{round_}")) for author in authors]
            for task in running:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                if chance.random() < 0.8:
                    task.cancel()
                if chance.random() < 0.2:
                    await asyncio.sleep(chance.random() * 0.002)
                    task.cancel()
        # What is waiting is written in the order that it came in, its callers gone or not.
        await last.commit(text_input(f"i{round_}"))
        with closing(sqlite3.connect(path, timeout=0)) as other:
            # Nobody holds the lock once nothing is being written.
            await eventually(partial(_can_write, other))
        for author in authors:
            author.sequence = (await session_of(store, author.session_id)).last_sequence
    for author in authors:
        items = {item.input.input_id for item in await items_of(store, author.session_id)}
        assert items >= stored[author.session_id]
        assert items == {one.operation_id for one in await operations_of(store, author.session_id)}
    assert threading.active_count() <= threads + 5
    assert check_state(path).findings == ()


def _can_write(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    connection.rollback()
    return True


async def test_closing_store_finishes_what_was_begun_and_refuses_more(path: Path) -> None:
    async with SqliteSessionStore.open(path) as store:
        author = await new_session(store)
        watch = aiter(store.watch_session(store_pb2.WatchSessionRequest(session_id="s")))
        await anext(watch)

        async def watch_end() -> str:
            with pytest.raises(UnavailableError) as caught:
                await anext(watch)
            return caught.value.reason

        async with asyncio.TaskGroup() as tasks:
            commit = tasks.create_task(author.commit(text_input("i")))
            ended = tasks.create_task(watch_end())
            await asyncio.sleep(0)
            await store.aclose()
        await store.aclose()
        assert commit.result().revision == 1
        for call in (author.commit(text_input("j")), items_of(store, "s")):
            with pytest.raises(UnavailableError):
                await call
    assert ended.result() == "STORE_CLOSED"


async def test_error_of_the_block_comes_out_as_it_is(path: Path) -> None:
    with pytest.raises(KeyError):
        async with SqliteSessionStore.open(path):
            raise KeyError("mine")


KILLED = """
import asyncio, sys
from pathlib import Path
from harness import faults
from harness.session_store.sqlite import SqliteSessionStore
from tests.support.session_records import new_session, write_tool_turn

async def main() -> None:
    faults.install_from_environment()
    async with SqliteSessionStore.open(Path(sys.argv[1])) as store:
        author = await new_session(store)
        for number in range(1, 50):
            await write_tool_turn(author, number)
            print(author.sequence, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("point", [BEFORE_COMMIT, AFTER_COMMIT])
@pytest.mark.parametrize("count", [1, 5, 12])
async def test_killed_store_keeps_every_acknowledged_commit(path: Path, point: str, count: int) -> None:
    root = Path(__file__).parents[3]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)],
        cwd=root,
        env={"PYTHONPATH": f"{root}:{root / 'proto'}", faults.KILL_VARIABLE: f"{point}:{count}"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert killed.returncode == -9, killed.stderr
    acknowledged = int((killed.stdout.split() or ["0"])[-1])
    async with SqliteSessionStore.open(path) as store:
        author = await new_session(store)
        items = await items_of(store, "s")
        assert len(items) >= acknowledged
        author.sequence = len(items)
        await author.commit(text_input("after"))
        await write_tool_turn(await new_session(store, "next"))
    assert check_state(path).findings == ()


async def test_writers_at_once_share_transactions(store: SqliteSessionStore) -> None:
    authors = [await new_session(store, f"s{number}") for number in range(32)]
    before = store.statistics
    await asyncio.gather(*(author.commit(text_input("i")) for author in authors))
    after = store.statistics
    assert after.changes - before.changes == 32
    assert after.transactions - before.transactions <= 4
    assert after.waiting == 0


async def test_every_kind_of_bad_commit_fails_alone_in_a_shared_transaction(path: Path) -> None:
    options = StoreOptions(max_size_bytes=2 * 1024 * 1024)
    async with SqliteSessionStore.open(path, options=options) as store:
        authors = {name: await new_session(store, name) for name in ("rule", "stale", "large", "big", "s1", "s2", "s3")}
        authors["stale"].sequence = 7
        requests = {name: author.request(text_input("i")) for name, author in authors.items()}
        requests["rule"] = authors["rule"].request(text_input("i"), turn("t", "nowhere"))
        requests["large"] = authors["large"].request(text_input("i", "x" * (33 * 1024 * 1024)))
        # More than the whole file may hold: the savepoint meets a full disk.
        requests["big"] = authors["big"].request(text_input("i", "x" * (3 * 1024 * 1024)))
        before = store.statistics
        answers = await asyncio.gather(*(store.commit(one) for one in requests.values()), return_exceptions=True)
        after = store.statistics
        reasons = {
            name: answer.reason if isinstance(answer, HarnessError) else "stored"
            for name, answer in zip(requests, answers, strict=True)
        }
        assert reasons == {
            "rule": "INVARIANT_VIOLATED",
            "stale": "SEQUENCE_CONFLICT",
            "large": "COMMIT_TOO_LARGE",
            "big": "STORAGE_FULL",
            "s1": "stored",
            "s2": "stored",
            "s3": "stored",
        }
        lengths = {name: len(await items_of(store, name)) for name in requests}
        assert lengths == {name: int(reason == "stored") for name, reason in reasons.items()}
        assert after.changes - before.changes == 3
    assert check_state(path).findings == ()


async def test_a_transaction_that_fails_as_a_whole_acknowledges_nobody(store: SqliteSessionStore, path: Path) -> None:
    authors = [await new_session(store, f"s{number}") for number in range(8)]
    with failing(BEFORE_COMMIT, no_space, times=1_000):
        answers = await asyncio.gather(*(author.commit(text_input("i")) for author in authors), return_exceptions=True)
        with closing(sqlite3.connect(path)) as other:
            assert other.execute("SELECT COUNT(*) FROM items").fetchone() == (0,)
    assert [getattr(answer, "reason", "") for answer in answers] == ["STORAGE_FULL"] * 8
    assert [len(await items_of(store, author.session_id)) for author in authors] == [0] * 8
    for author in authors:
        await author.commit(text_input("i"))
