"""Opens the session store's service from its settings."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from harness.errors import FailedPreconditionError
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.sqlite_session_store import StoreOptions
from services._server.config import Setting, parse_size, parse_text, server_options
from services._server.main import Opened, Program
from services.session_store.servicer import store_service

if TYPE_CHECKING:
    from harness.session_store.postgres import PostgresSessionStore

_FILE_NAME: Final = "sessions.db"


@asynccontextmanager
async def _open(values: Mapping[str, Any], stop: asyncio.Event) -> AsyncIterator[Opened]:
    options = StoreOptions(
        name=values["store_name"], release=metadata.version("unreal-agent"), max_size_bytes=values["max_store_bytes"]
    )
    async with (
        _opened_store(values["store"], values["state_dir"] / _FILE_NAME, options) as (store, place),
        store_service(store) as service,
    ):

        def gauges() -> Mapping[str, float]:
            statistics = store.statistics
            return {
                "store_transactions": statistics.transactions,
                "store_changes": statistics.changes,
                "store_changes_waiting": statistics.waiting,
                "store_watchers": statistics.watchers,
            }

        yield Opened(services=[service], gauges=[gauges], notes=[f"sessions are kept in {place}"])


@asynccontextmanager
async def _opened_store(
    url: str | None, path: Path, options: StoreOptions
) -> AsyncIterator[tuple[SqliteSessionStore | PostgresSessionStore, str]]:
    """Open the store that a URL names, or the file where there is none; also say where it is, without a password."""
    scheme, _, rest = (url or f"sqlite://{path}").partition("://")
    if scheme in ("postgresql", "postgres"):
        async with _postgres().open(url or "", options=options) as store:
            yield store, store.place
        return
    if scheme != "sqlite" or not rest.startswith("/"):
        # The value itself may hold a password.
        raise FailedPreconditionError(
            "--store must be sqlite:///ABSOLUTE/PATH or postgresql://USER@HOST:PORT/DATABASE",
            reason="INVALID_STORE_URL",
        )
    path = Path(unquote(rest) if url else rest)
    with _held(path):
        async with SqliteSessionStore.open(path, options=options) as file_store:
            yield file_store, str(path)


def _postgres() -> type[PostgresSessionStore]:
    """Return the engine, whose driver is an optional dependency."""
    try:
        from harness.session_store.postgres import PostgresSessionStore
    except ImportError as err:
        raise FailedPreconditionError(
            "the driver of PostgreSQL is not installed: pip install 'unreal-agent[postgres]'",
            reason="DRIVER_MISSING",
        ) from err
    return PostgresSessionStore


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
    description="Keeps the histories of sessions in a SQLite file or in PostgreSQL and serves them over gRPC.",
    options=(
        *server_options(default_listen="unix:{state_dir}/session-store.sock"),
        Setting(
            flag="--store",
            parse=parse_text,
            default=None,
            metavar="URL",
            help="where sessions are kept: sqlite:///PATH or postgresql://USER@HOST:PORT/DATABASE, which several stores"
            " may share; its password also from PGPASSWORD or a password file. Without it a file in --state-dir",
        ),
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
