"""Asks a model only while its session is held here: a provider knows no epochs, so nobody else would refuse it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from harness.llm import LLMAdapter, LLMEvent, LLMRequest


class FencedAdapter:
    """An adapter for one session."""

    def __init__(self, adapter: LLMAdapter, confirm: Callable[[], Awaitable[None]]) -> None:
        """Wrap an adapter, which stays the caller's to close; `confirm` raises where the session is not held."""
        self._adapter = adapter
        self._confirm = confirm

    async def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        """As the adapter does, once the session is known to be held."""
        await self._confirm()
        async with aclosing(self._adapter.respond(request)) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        """Leave the adapter open: other sessions use it."""
