"""The session store's contract, on the SQLite engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.session_store.sqlite import SqliteSessionStore
from tests.contract.session_store_suite.blobs import *  # noqa: F403
from tests.contract.session_store_suite.commits import *  # noqa: F403
from tests.contract.session_store_suite.exports import *  # noqa: F403
from tests.contract.session_store_suite.forks import *  # noqa: F403
from tests.contract.session_store_suite.leases import *  # noqa: F403
from tests.contract.session_store_suite.watches import *  # noqa: F403
from tests.contract.session_store_suite.watches import until_current, watch_of
from tests.support.session_records import new_session, operation


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteSessionStore]:
    async with SqliteSessionStore.open(tmp_path / "state" / "sessions.db") as opened:
        yield opened


async def test_slow_watcher_is_spared_overtaken_states(store: SqliteSessionStore) -> None:
    author = await new_session(store)
    watch = watch_of(store)
    await until_current(watch)
    for step in range(1, 30):
        await author.commit(operations=[operation("s", "o", step=step)])
    assert len(await until_current(watch, revision=29)) == 1
