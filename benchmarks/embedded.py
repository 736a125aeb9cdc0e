"""Runs the agent in this process, over a store that is given or over one of its own."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from harness.app import open_coordinator
from harness.coordinator import CoordinatorConfig
from harness.llm import LLMAdapter
from harness.operations.local_manager import LocalOperationManager
from harness.session_store import SessionStore
from harness.session_store.sqlite import SqliteSessionStore
from harness.tools.registry import default_registry
from tests.support.world import World


@asynccontextmanager
async def embedded(adapter: LLMAdapter, store: SessionStore | None = None) -> AsyncIterator[World]:
    """Give an agent while the block runs, with the settings of `unreal-agent run`."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workspace = directory / "workspace"
        workspace.mkdir()
        if store is None:
            store = await stack.enter_async_context(SqliteSessionStore.open(directory / "sessions.db"))
        manager = await stack.enter_async_context(LocalOperationManager.open(directory / "operations", name="local"))
        coordinator = await stack.enter_async_context(
            open_coordinator(
                store=store,
                managers={"local": manager},
                open_adapter=lambda _: adapter,
                tools=default_registry(),
                config=CoordinatorConfig(),
            )
        )
        yield World(coordinator=coordinator, workspace=workspace)
