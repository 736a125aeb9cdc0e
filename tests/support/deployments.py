"""The same agent embedded and as three processes, so that scenarios run on both, the same files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from harness.coordinator import CoordinatorConfig
from harness.llm.providers import ProviderConfig, open_adapter
from harness.llm.retry import RetryPolicy
from tests.support.stack import COORDINATOR, three_services
from tests.support.world import Script, World, embedded_world

PATIENT_GRACE_S = 5.0
"""For conversations whose model counts on all results of a response, also on a machine that is busy."""

Open = Callable[[Script], AbstractAsyncContextManager[World]]
"""Opens an agent that plays a script; opening it again is a restart."""


@asynccontextmanager
async def services_world(
    directory: Path,
    responses: Script | None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Sequence[str]] | None = None,
    manager_attaches_to: Sequence[str] = (),
) -> AsyncIterator[World]:
    """Run an agent as three processes over `directory`; open it again to restart."""
    services = three_services(
        directory, responses, environment=environment, flags=flags, manager_attaches_to=manager_attaches_to
    )
    async with services as stack, stack.world() as world:
        yield world


DEPLOYMENTS: Mapping[str, Callable[[Path, Script], AbstractAsyncContextManager[World]]] = {
    "embedded": embedded_world,
    "services": services_world,
    "attached": partial(services_world, manager_attaches_to=(COORDINATOR,)),
}


@asynccontextmanager
async def world_of_provider(
    deployment: str, directory: Path, *, provider: str, base_url: str, grace_s: float = PATIENT_GRACE_S
) -> AsyncIterator[World]:
    """Run an agent in a deployment whose model is asked over HTTP."""
    if deployment == "embedded":
        config = ProviderConfig(
            provider=provider, model="m1", base_url=base_url, api_key="test-key", retries=RetryPolicy(attempts=1)
        )
        opened: AbstractAsyncContextManager[World] = embedded_world(
            directory, open_adapter(config), config=CoordinatorConfig(grace_s=grace_s)
        )
    else:
        environment = {
            "UNREAL_AGENT_LLM_PROVIDER": provider,
            "UNREAL_AGENT_LLM_MODEL": "m1",
            "UNREAL_AGENT_LLM_BASE_URL": base_url,
            "UNREAL_AGENT_LLM_API_KEY": "test-key",
        }
        flags = {COORDINATOR: ("--grace-seconds", str(grace_s))}
        opened = services_world(directory, None, environment=environment, flags=flags)
    async with opened as world:
        world.provider = provider
        yield world
