"""The embedded mode: store, manager and coordinator in this process, over a state directory that the caller holds."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

from clients.cli.isolation import NO_OPTIONS, IsolationOptions, isolation_settings
from clients.cli.log_file import logged_to
from clients.cli.state_dir import StateDirectory
from harness.app import open_coordinator
from harness.coordinator import Coordinator, CoordinatorConfig
from harness.errors import HarnessError
from harness.llm import LLMAdapter, LLMEvent, LLMRequest, TextDelta
from harness.operations import OperationManager
from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.manager_check import check_not_older
from harness.tools import default_registry
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

MANAGER_NAME = "local"

STORAGE_TROUBLES = frozenset(
    {"STORAGE_FULL", "STORAGE_FAILED", "TOO_MANY_OPEN_FILES", "STATE_DIR_NOT_WRITABLE", "STORE_CORRUPT", "STORE_GONE"}
)


class EmbeddedStore(SqliteSessionStore):
    """A store that also tells of what could not be written.

    The coordinator repeats them until there is room, which is right for a service. A person who waits at a terminal, or
    a program behind a pipe, must hear of it.
    """

    on_trouble: Callable[[HarnessError], None] | None = None

    async def commit(self, request: store_pb2.CommitRequest) -> store_pb2.CommitResponse:
        with self._told():
            return await super().commit(request)

    async def put_blob(self, requests: AsyncIterator[store_pb2.PutBlobRequest]) -> store_pb2.PutBlobResponse:
        with self._told():
            return await super().put_blob(requests)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except HarnessError as error:
            if error.reason in STORAGE_TROUBLES and self.on_trouble is not None:
                self.on_trouble(error)
            raise


class SilentAdapter:
    """Never answers. For commands that change a session without running it: no model is asked, nothing is recorded."""

    async def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        """Wait until cancelled."""
        await asyncio.Event().wait()
        yield TextDelta(attempt=1, text="")

    async def aclose(self) -> None:
        """Nothing is open."""


@contextlib.asynccontextmanager
async def open_embedded(
    state: StateDirectory,
    open_provider: Callable[[str], LLMAdapter] | None,
    *,
    has_manager: bool = True,
    on_trouble: Callable[[HarnessError], None] | None = None,
    isolation: IsolationOptions = NO_OPTIONS,
    on_isolation: Callable[[str], None] | None = None,
) -> AsyncIterator[Coordinator]:
    """Run a coordinator over a state directory while the block runs. The caller holds the directory.

    Sessions go on only when they are asked for: a look at one starts nothing in another.

    Args:
        state: Where the sessions live.
        open_provider: Returns a provider's adapter; None: no model is ever asked.
        has_manager: False where only recorded facts are wanted; no operation can be reached then.
        on_trouble: Called each time that a commit can't be written: the disk is full, or fails.
        isolation: What was said of the isolation of commands, beside the environment.
        on_isolation: Called with a line that says what holds.
    """
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(state.hold_store())
        stack.enter_context(logged_to(state.log_path))
        if has_manager:
            await asyncio.to_thread(check_not_older, state.sessions_path, state.operations_path)
        store = await stack.enter_async_context(EmbeddedStore.open(state.sessions_path))
        assert isinstance(store, EmbeddedStore)
        store.on_trouble = on_trouble
        managers: dict[str, OperationManager] = {}
        if has_manager:
            wanted = isolation_settings(isolation, os.environ, hidden=[str(state.path)])
            settings = LocalManagerSettings(isolation=wanted)
            opening = LocalOperationManager.open(state.operations_path, name=MANAGER_NAME, settings=settings)
            managers[MANAGER_NAME] = manager = await stack.enter_async_context(opening)
            if on_isolation is not None:
                on_isolation(manager.isolation.described)
        coordinator = await stack.enter_async_context(
            open_coordinator(
                store=store,
                managers=managers,
                open_adapter=open_provider or (lambda _: SilentAdapter()),
                tools=default_registry(),
                config=CoordinatorConfig(name="embedded"),
            )
        )
        yield coordinator
