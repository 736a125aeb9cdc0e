"""The coordinator's server in this process, over local parts: a test sees its tasks, its calls and what it holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.clock import SystemClock
from harness.session_store import SessionStore
from services._server.server import Server, ServerSettings, serve
from services.coordinator.forwarding import Forwarder
from services.coordinator.servicer import service_of
from services.coordinator.tokens import TokenTable
from tests.support.world import Script, World, embedded_world


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWorld:
    """An agent, and the server in front of it."""

    world: World
    server: Server
    store: SessionStore

    @property
    def address(self) -> str:
        """Its TCP address."""
        return self.server.addresses[0]


@asynccontextmanager
async def served_world(
    directory: Path, responses: Script = (), *, asks_for_tokens: bool = False
) -> AsyncIterator[ServedWorld]:
    """Serve an agent on a free port of loopback."""
    stores: list[SessionStore] = []

    def seen(store: SessionStore) -> SessionStore:
        stores.append(store)
        return store

    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(embedded_world(directory, responses, wrap_store=seen))
        (store,) = stores
        forwarder = Forwarder("")
        stack.push_async_callback(forwarder.aclose)
        identify = None
        if asks_for_tokens:
            identify = (await stack.enter_async_context(TokenTable.open(store, SystemClock()))).identify
        services = [service_of(world.coordinator, ["scripted"], forwarder)]
        settings = ServerSettings(addresses=("127.0.0.1:0",), drain_grace_s=5.0)
        server = await stack.enter_async_context(serve(settings, services, identify=identify))
        yield ServedWorld(world=world, server=server, store=store)
