"""Opens a coordinator over a given store, managers and adapters: for embedded use, services and tests alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from harness.clock import Clock, SystemClock
from harness.coordinator import Coordinator, CoordinatorConfig
from harness.coordinator.local_coordinator import LocalCoordinator
from harness.coordinator.runnable_sessions import run_runnable_sessions
from harness.llm import LLMAdapter
from harness.llm.models import window_tokens as known_window_tokens
from harness.operations import OperationManager
from harness.primitives.task_groups import tasks_behind
from harness.session_store import SessionStore
from harness.tools.registry import ToolRegistry


@asynccontextmanager
async def open_coordinator(
    *,
    store: SessionStore,
    managers: Mapping[str, OperationManager],
    open_adapter: Callable[[str], LLMAdapter],
    tools: ToolRegistry,
    config: CoordinatorConfig,
    clock: Clock | None = None,
    window_tokens: Callable[[str], int] = known_window_tokens,
    on_replaced: Callable[[], None] = lambda: None,
) -> AsyncIterator[Coordinator]:
    """Run a coordinator while the block runs.

    Args:
        store: Where sessions live; stays the caller's to close.
        managers: Operation managers by name; stay the caller's to close. Their commands run on after the block.
        open_adapter: Returns the adapter of a provider by name, each opened once and closed here. Raises
            InvalidArgumentError or FailedPreconditionError for a provider that is unknown or not set up.
        tools: What the host offers.
        config: How it behaves.
        clock: The machine's where None.
        window_tokens: Tokens that a model can take; 0 where not known.
        on_replaced: Called once another process of the same name has taken over; this one can do nothing more.

    Leaving the block ends each session after its commit in flight; whatever is unfinished goes on at the next start.
    """
    adapters: dict[str, LLMAdapter] = {}

    def cached_adapter(provider: str) -> LLMAdapter:
        if provider not in adapters:
            adapters[provider] = open_adapter(provider)
        return adapters[provider]

    try:
        async with tasks_behind() as tasks:
            coordinator = LocalCoordinator(
                store=store,
                managers=managers,
                open_adapter=cached_adapter,
                tools=tools,
                window_tokens=window_tokens,
                on_replaced=on_replaced,
                config=config,
                clock=clock or SystemClock(),
                tasks=tasks,
            )
            background = [tasks.create_task(link.run()) for link in coordinator.links.values()]
            background.append(tasks.create_task(coordinator.leases.run()))
            if config.takes_runnable_sessions:
                background.append(tasks.create_task(run_runnable_sessions(store, coordinator)))
            try:
                yield coordinator
            finally:
                await coordinator.aclose()
                for task in background:
                    task.cancel()
    finally:
        for adapter in adapters.values():
            await adapter.aclose()
