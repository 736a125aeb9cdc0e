"""The session store's contract, on the PostgreSQL engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from harness.session_store.postgres import PostgresSessionStore
from tests.contract.session_store_suite.blobs import *  # noqa: F403
from tests.contract.session_store_suite.commits import *  # noqa: F403
from tests.contract.session_store_suite.exports import *  # noqa: F403
from tests.contract.session_store_suite.forks import *  # noqa: F403
from tests.contract.session_store_suite.leases import *  # noqa: F403
from tests.contract.session_store_suite.watches import *  # noqa: F403
from tests.support.postgres import PostgresServer, postgres_server


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture(scope="module")
def url(server: PostgresServer) -> str:
    return server.make_schema()


@pytest.fixture
async def store(server: PostgresServer, url: str) -> AsyncIterator[PostgresSessionStore]:
    server.empty(url)
    async with PostgresSessionStore.open(url) as opened:
        yield opened
