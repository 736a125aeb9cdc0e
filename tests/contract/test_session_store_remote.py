"""The session store's contract, on the SQLite engine behind a live server, over a Unix socket and over TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clients.session_store import RemoteSessionStore
from harness.session_store.sqlite import SqliteSessionStore
from services._server.server import ServerSettings, serve
from services.session_store.servicer import store_service
from tests.contract.session_store_suite.blobs import *  # noqa: F403
from tests.contract.session_store_suite.commits import *  # noqa: F403
from tests.contract.session_store_suite.exports import *  # noqa: F403
from tests.contract.session_store_suite.forks import *  # noqa: F403
from tests.contract.session_store_suite.leases import *  # noqa: F403
from tests.contract.session_store_suite.watches import *  # noqa: F403


@pytest.fixture(params=["unix", "tcp"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RemoteSessionStore]:
    address = f"unix:{tmp_path}/store.sock" if request.param == "unix" else "127.0.0.1:0"
    async with (
        SqliteSessionStore.open(tmp_path / "state" / "sessions.db") as local,
        store_service(local) as service,
        serve(ServerSettings(addresses=(address,)), [service]) as server,
        RemoteSessionStore(server.addresses[0]) as remote,
    ):
        yield remote
