"""Opens the coordinator's service: a coordinator over a remote store, remote managers and the providers set up here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from clients._rpc.tls import ClientTls
from clients.cli.model_providers import Providers
from clients.operation_manager.attached_link import AttachedLink
from clients.operation_manager.links import DialledLink, Link
from clients.operation_manager.proxy_operation_manager import ProxyOperationManager
from clients.session_store.remote_session_store import RemoteSessionStore
from harness.app import open_coordinator
from harness.clock import SystemClock
from harness.coordinator import CoordinatorConfig
from harness.errors import DeadlineExceededError, HarnessError, UnavailableError
from harness.llm import LLMAdapter
from harness.llm.providers import provider_names
from harness.operations import OperationManager
from harness.session_store import SessionStore
from harness.tools import default_registry
from services._server.main import Opened
from services.coordinator.forwarding import Forwarder
from services.coordinator.gateway import gateway_service
from services.coordinator.scripts import SessionScripts
from services.coordinator.servicer import service_of
from services.coordinator.tokens import TokenTable
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

logger = logging.getLogger(__name__)

SCRIPTED = "scripted"

ATTACHED = "attached"
"""In place of the address of a manager that can't be dialled."""

PATIENCE_TOLD_S = 1.0
"""A store that is not there after this is told of: it may have been started together with the coordinator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorServiceConfig:
    """What the service needs to know."""

    store_address: str
    manager_addresses: Mapping[str, str]
    """Address of each operation manager, by the name that operations are assigned to; ATTACHED: it dials here."""

    coordinator: CoordinatorConfig
    environ: Mapping[str, str] = field(repr=False)
    """Where providers' keys and addresses are read from."""

    script: str | None = None
    """File that the provider `scripted` plays to sessions without a script of their own."""

    record: str | None = None
    """Directory that keeps what providers are sent and answer; None: nothing is kept."""

    tls: ClientTls | None = None
    """How TCP addresses of the others are dialled; None: in plain text."""

    asks_for_tokens: bool = False
    """True where a call needs a token that the session store knows, and may do what that allows."""

    allows_session_scripts: bool = False
    """True where a session may name a script, a file of this machine, by its label."""


@asynccontextmanager
async def open_coordinator_service(
    config: CoordinatorServiceConfig, stop: asyncio.Event, say: Callable[[str], None]
) -> AsyncIterator[Opened]:
    """Run a coordinator while the block runs; it begins once the session store answers.

    Args:
        config: What it needs to know.
        stop: Set by the caller to give up waiting for the store; set here where another process replaced this one.
        say: Tells the person who started it what it waits for, one line each.

    Raises:
        UnavailableError: STORE_UNREACHABLE; `stop` was set before the store answered.
        HarnessError: The script can't be played, or an address is none.
    """
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(RemoteSessionStore(config.store_address, tls=config.tls))
        providers = _ServerProviders(config, store)
        managers: dict[str, OperationManager] = {}
        attached: dict[str, AttachedLink] = {}
        for name, address in config.manager_addresses.items():
            link: Link
            if address == ATTACHED:
                link = attached[name] = AttachedLink(name)
            else:
                link = DialledLink(address, tls=config.tls)
            managers[name] = await stack.enter_async_context(ProxyOperationManager(link))
        await _wait_for_store(store, config.store_address, stop, say)
        forwarder = Forwarder(config.coordinator.address, config.tls)
        stack.push_async_callback(forwarder.aclose)
        coordinator = await stack.enter_async_context(
            open_coordinator(
                store=store,
                managers=managers,
                open_adapter=providers.open,
                tools=default_registry(),
                config=config.coordinator,
                on_replaced=stop.set,
            )
        )
        identify = None
        if config.asks_for_tokens:
            identify = (await stack.enter_async_context(TokenTable.open(store, SystemClock()))).identify
        services = [service_of(coordinator, providers.names, forwarder)]
        if attached:
            services.append(gateway_service(attached))
        yield Opened(services=services, identify=identify)


async def _wait_for_store(store: SessionStore, address: str, stop: asyncio.Event, say: Callable[[str], None]) -> None:
    is_there = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(_ask(store, is_there))
        stopping = tasks.create_task(stop.wait())
        done, _ = await asyncio.wait((asking, stopping), timeout=PATIENCE_TOLD_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            logger.warning("session store is not there", extra={"address": address})
            say(f"waits for the session store at {address}")
            await asyncio.wait((asking, stopping), return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        stopping.cancel()
    if not is_there.is_set():
        raise UnavailableError(f"ended before the session store at {address} was there", reason="STORE_UNREACHABLE")


async def _ask(store: SessionStore, is_there: asyncio.Event) -> None:
    while True:
        try:
            await store.get_server_info(store_pb2.GetServerInfoRequest())
        except (UnavailableError, DeadlineExceededError):
            await asyncio.sleep(PATIENCE_TOLD_S)  # the call itself has waited and tried again
            continue
        is_there.set()
        return


class _ServerProviders:
    """The providers that the server's environment and flags set up."""

    def __init__(self, config: CoordinatorServiceConfig, store: SessionStore) -> None:
        self._providers = Providers(config.environ, script=config.script, record=config.record)
        self._environ = config.environ
        self._store = store
        self._allows_session_scripts = config.allows_session_scripts
        if config.script is not None:
            self._providers.config(SCRIPTED)  # a script that can't be played is told of at the start

    @property
    def names(self) -> list[str]:
        """Those that can be asked."""
        return [name for name in provider_names(self._environ) if self._is_set_up(name)]

    def open(self, name: str) -> LLMAdapter:
        if name != SCRIPTED or not self._allows_session_scripts:
            return self._providers.open(name)
        otherwise = self._providers.open(SCRIPTED) if self._providers.script else None
        return SessionScripts(self._store, otherwise, SystemClock())

    def _is_set_up(self, name: str) -> bool:
        if name == SCRIPTED:
            return bool(self._providers.script) or self._allows_session_scripts
        try:
            self._providers.config(name)
        except HarnessError:
            return False
        return True


def default_settings(environ: Mapping[str, str], script: str | None) -> session_pb2.SessionSettings:
    """Return what a new session gets that names no provider; empty where none is set up."""
    try:
        config = Providers(environ, script=script).config(None)
    except HarnessError:
        return session_pb2.SessionSettings()
    return session_pb2.SessionSettings(provider=config.provider, model=config.model)
