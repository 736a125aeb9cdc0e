"""Opens the session store's service from its settings."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from harness.errors import FailedPreconditionError
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.sqlite_session_store import StoreOptions
from services._server.config import Setting, parse_size, parse_text, server_options
from services._server.main import Opened, Program
from services.session_store.servicer import store_service

_FILE_NAME: Final = "sessions.db"


@asynccontextmanager
async def _open(values: Mapping[str, Any], stop: asyncio.Event) -> AsyncIterator[Opened]:
    path = values["state_dir"] / _FILE_NAME
    options = StoreOptions(
        name=values["store_name"], release=metadata.version("unreal-agent"), max_size_bytes=values["max_store_bytes"]
    )
    async with AsyncExitStack() as stack:
        stack.enter_context(_held(path))
        store = await stack.enter_async_context(SqliteSessionStore.open(path, options=options))
        service = await stack.enter_async_context(store_service(store))

        def gauges() -> Mapping[str, float]:
            statistics = store.statistics
            return {
                "store_transactions": statistics.transactions,
                "store_changes": statistics.changes,
                "store_changes_waiting": statistics.waiting,
                "store_watchers": statistics.watchers,
            }

        yield Opened(services=[service], gauges=[gauges], notes=[f"sessions are kept in {path}"])


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Keep a second store off the file: leases end by one process's clock."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        raise FailedPreconditionError(
            f"{str(path.parent)!r} cannot be written ({err.strerror}): check its owner, or choose another --state-dir",
            reason="STATE_DIR_NOT_WRITABLE",
            metadata={"path": str(path.parent)},
        ) from err
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        os.close(descriptor)
        raise FailedPreconditionError(
            f"{str(path)!r} is open in another session store: stop that, or choose another --state-dir",
            reason="STATE_DIRECTORY_IN_USE",
            metadata={"path": str(path)},
        ) from err
    try:
        yield
    finally:
        os.close(descriptor)


PROGRAM: Final = Program(
    name="session-store",
    description="Keeps the histories of sessions in one SQLite file and serves them over gRPC.",
    options=(
        *server_options(default_listen="unix:{state_dir}/session-store.sock"),
        Setting(
            flag="--max-store-bytes",
            parse=parse_size,
            default=None,
            metavar="SIZE",
            help="bound of the file; beyond it writes fail. Without it the disk's",
        ),
        Setting(
            flag="--store-name", parse=parse_text, default="session-store", metavar="NAME", help="what it is called"
        ),
    ),
    open=_open,
)
