"""The one place where a command opens its coordinator: in this process over a state directory, or behind an address."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from clients.cli.failures import CommandError, UsageError
from clients.cli.isolation import NO_OPTIONS, IsolationOptions
from clients.cli.place import Place
from harness.coordinator import Coordinator
from harness.errors import DeadlineExceededError, HarnessError, InvalidArgumentError, UnavailableError
from harness.llm import LLMAdapter
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2

CONNECT_PATIENCE_S = 3.0
"""How long a coordinator at an address that somebody named may take to answer first."""

START_PATIENCE_S = 15.0
"""How long one may take that is known to run: it may just have been started."""

PATIENCE_S = 120.0
"""How long a coordinator that answered before may be away: for a restart, or the move to another release."""


@contextlib.asynccontextmanager
async def open_place(
    place: Place,
    open_provider: Callable[[str], LLMAdapter] | None,
    *,
    has_manager: bool = True,
    on_trouble: Callable[[HarnessError], None] | None = None,
    on_connection: Callable[[bool], None] | None = None,
    isolation: IsolationOptions = NO_OPTIONS,
    on_isolation: Callable[[str], None] | None = None,
) -> AsyncIterator[Coordinator]:
    """Give a coordinator while the block runs; the state directory, where there is no server, is held for as long.

    Args:
        place: Where.
        open_provider: As of `open_embedded`; a server has its own.
        has_manager: As of `open_embedded`; a server has its own.
        on_trouble: As of `open_embedded`.
        on_connection: As of `CoordinatorClient`.
        isolation: As of `open_embedded`; a server has its own.
        on_isolation: As of `open_embedded`.

    Raises:
        CommandError: Nobody answers there, or the directory can't be used.
    """
    if place.server:
        async with _connected(place, on_connection) as coordinator:
            yield coordinator
        return
    from clients.cli.embedded import open_embedded

    with place.state.hold():
        async with open_embedded(
            place.state,
            open_provider,
            has_manager=has_manager,
            on_trouble=on_trouble,
            isolation=isolation,
            on_isolation=on_isolation,
        ) as coordinator:
            yield coordinator


@contextlib.asynccontextmanager
async def _connected(place: Place, on_connection: Callable[[bool], None] | None) -> AsyncIterator[Coordinator]:
    from clients.coordinator import CoordinatorClient

    try:
        client = CoordinatorClient(
            place.server, token=place.token, tls=place.tls, patience_s=PATIENCE_S, on_connection=on_connection
        )
    except InvalidArgumentError as error:
        raise UsageError(error.message, "Write for example unix:/path/to/socket or 127.0.0.1:7777.") from error
    async with client:
        is_known = place.state.server_address() == place.server
        patience_s = START_PATIENCE_S if is_known else CONNECT_PATIENCE_S
        try:
            await client.get_server_info(coordinator_pb2.GetServerInfoRequest(), patience_s=patience_s)
        except (UnavailableError, DeadlineExceededError) as error:
            raise CommandError(
                f"no coordinator answers at {place.server}",
                "Start one with unreal-agent serve all, or name another with --server.",
            ) from error
        yield client
