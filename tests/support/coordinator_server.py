"""The coordinator's server in this process, over local parts: a test sees its tasks, its calls and what it holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from services._server.server import Server, ServerSettings, serve
from services.coordinator.forwarding import Forwarder
from services.coordinator.servicer import service_of
from tests.support.world import Script, World, embedded_world


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWorld:
    """An agent, and the server in front of it."""

    world: World
    server: Server

    @property
    def address(self) -> str:
        """Its TCP address."""
        return self.server.addresses[0]


@asynccontextmanager
async def served_world(directory: Path, responses: Script = ()) -> AsyncIterator[ServedWorld]:
    """Serve an agent on a free port of loopback."""
    forwarder = Forwarder("")
    async with embedded_world(directory, responses) as world:
        try:
            services = [service_of(world.coordinator, ["scripted"], forwarder)]
            async with serve(ServerSettings(addresses=("127.0.0.1:0",), drain_grace_s=5.0), services) as server:
                yield ServedWorld(world=world, server=server)
        finally:
            await forwarder.aclose()
