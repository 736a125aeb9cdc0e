"""Sound files of a session store and of a manager's journal, ways to spoil one place, and all that reads them."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.operations.local_manager import LocalOperationManager
from harness.session_store import SessionStore, get_blob_bytes
from harness.session_store.sqlite import SqliteSessionStore
from tests.contract.session_store_suite.exports import IMAGE, exported, write_history
from tests.contract.session_store_suite.forks import author_of, fork
from tests.contract.session_store_suite.watches import until_current, watch_of
from tests.support.mutation import PROTOBUF_TOKENS, Mutator
from tests.support.operations import acknowledging, adding, bash, cancelling, other, run
from tests.support.session_records import (
    VERSIONS,
    blob_of,
    incarnation,
    items_of,
    operations_of,
    session_of,
    text_input,
)
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

_VALUES: Sequence[object] = (None, 0, -1, 2**62, 1.5, "", "x", "-1", b"", b"\xff", "\0")
"""What a column may hold of another type, or beyond what it means."""


# --- sound files ---


async def write_store(path: Path) -> None:
    """Make a store with histories, an image, an open call, a fork, a lease and a token."""
    async with SqliteSessionStore.open(path) as store:
        await write_history(store, "s")
        await fork(store, "s", "f", cut=5)
        await (await author_of(store, "f")).commit(text_input("more"))
        await store.acquire_lease(
            store_pb2.AcquireLeaseRequest(session_id="f", incarnation=incarnation("c"), versions=VERSIONS)
        )
        await store.create_token(
            store_pb2.CreateTokenRequest(
                request_id="r", token=store_pb2.Token(label="l", rights=[store_pb2.RIGHT_READ])
            )
        )


async def write_journal(state: Path, workspace: Path) -> None:
    """Make a journal with an ended, an acknowledged, a waiting and a cancelled operation."""
    async with LocalOperationManager.open(state, name="local") as manager:
        await run(manager, bash("echo kept", operation_id="ended"), workspace)
        buried = await run(manager, bash("true", operation_id="buried"), workspace)
        await manager.acknowledge_updates(acknowledging(buried))
        waiting = other("timer", operation_pb2.TimerState())
        waiting.operation_id = "waiting"
        waiting.timer.fire_time.FromSeconds(2**33)
        await manager.add_operations(adding([waiting], workspace))
        await manager.cancel_operation(cancelling("never"))


# --- damage ---


def spoil_record(path: Path, places: Sequence[tuple[str, str]], seed: int) -> str:
    """Change the bytes of one stored record; return what was done. `places` are (table, column)."""
    chance = random.Random(seed)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        table, column = chance.choice(places)
        rows = connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall() if table != "operations" else []
        if table == "operations":
            rows = connection.execute(f"SELECT operation_id, {column} FROM {table}").fetchall()
        key, record = chance.choice(rows)
        spoilt = Mutator([record], PROTOBUF_TOKENS, seed).draw()
        name = "operation_id" if table == "operations" else "rowid"
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE {name} = ?", (spoilt, key))
    return f"{table}.{column} of {key!r} became {spoilt[:80]!r}"


def spoil_value(path: Path, seed: int) -> str:
    """Put something strange into one column of one row; return what was done."""
    chance = random.Random(seed)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        table = chance.choice(sorted(name for (name,) in tables))
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        column, value = chance.choice(columns), chance.choice(_VALUES)
        count = connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        keys = [row[0] for row in connection.execute(f"SELECT {columns[0]} FROM {table}")]
        if not count:
            return "nothing"
        key = chance.choice(keys)
        try:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE {columns[0]} = ?", (value, key))
        except sqlite3.Error:
            return "nothing"
    return f"{table}.{column} of {key!r} became {value!r}"


def spoil_bytes(path: Path, seed: int) -> str:
    """Change the file itself behind its header; return what was done."""
    chance = random.Random(seed)
    content = bytearray(path.read_bytes())
    if chance.randrange(8) == 0:
        length = chance.randrange(len(content))
        path.write_bytes(content[:length])
        return f"cut to {length} bytes"
    start = chance.randrange(100, len(content))
    length = chance.choice((1, 1, 2, 16, 512, 4096))
    content[start : start + length] = chance.randbytes(min(length, len(content) - start))
    path.write_bytes(content)
    return f"{length} bytes at {start} are random"


# --- everything that reads ---


async def read_store(path: Path) -> list[HarnessError]:
    """Open a store and read all of it; return what it was refused with. Whatever else it raises goes through."""
    refusals: list[HarnessError] = []

    async def attempt(work: Callable[[], Awaitable[Any]]) -> None:
        try:
            await work()
        except HarnessError as error:
            refusals.append(error)

    async def everything(store: SessionStore) -> None:
        await attempt(partial(store.list_sessions, store_pb2.ListSessionsRequest()))
        await attempt(partial(store.list_tokens, store_pb2.ListTokensRequest()))
        for session_id in ("s", "f"):
            for read in (session_of, _checked_items, operations_of, _watched, exported, _checked_blob):
                await attempt(partial(read, store, session_id))
            request = store_pb2.AcquireLeaseRequest(
                session_id=session_id, incarnation=incarnation("d"), versions=VERSIONS
            )
            await attempt(partial(store.acquire_lease, request))
        await attempt(partial(fork, store, "s", "g", cut=4))
        await attempt(partial(_written, store))

    async def opened() -> None:
        async with SqliteSessionStore.open(path) as store:
            await everything(store)

    await attempt(opened)
    return refusals


async def _checked_items(store: SessionStore, session_id: str) -> None:
    items = await items_of(store, session_id)
    sequences = [item.sequence for item in items]
    assert sequences == list(range(1, len(items) + 1)), f"a history with gaps: {sequences}"


async def _watched(store: SessionStore, session_id: str) -> None:
    changes = await until_current(watch_of(store, session_id))
    sequences = [item.sequence for change in changes for item in change.items]
    assert sequences == list(range(1, len(sequences) + 1)), f"a watch with gaps: {sequences}"


async def _checked_blob(store: SessionStore, session_id: str) -> None:
    content = await get_blob_bytes(store, session_id, blob_of(IMAGE).digest)
    assert content == IMAGE, "another content than the digest's"


async def _written(store: SessionStore) -> None:
    author = await author_of(store, "s")
    await author.commit(text_input("after"))


async def read_journal(state: Path, workspace: Path) -> list[HarnessError]:
    """Open a manager and ask for all that it knows; return what it refused."""
    refusals: list[HarnessError] = []
    try:
        async with LocalOperationManager.open(state, name="local") as manager:
            for name in ("ended", "buried", "waiting", "never"):
                try:
                    await manager.get_operation(manager_pb2.GetOperationRequest(operation_id=name))
                    await manager.add_operations(adding([bash("echo again", operation_id=name)], workspace))
                    await manager.cancel_operation(cancelling(name, epoch=2**61))
                except HarnessError as error:
                    refusals.append(error)
            await manager.list_operations(manager_pb2.ListOperationsRequest())
    except HarnessError as error:
        refusals.append(error)
    return refusals
