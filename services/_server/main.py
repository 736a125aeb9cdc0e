"""Runs a service as a process: settings, log, signals, exit codes."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from harness import faults
from harness.errors import HarnessError
from services._server.config import EXIT_USAGE, ConfigError, Setting, read_settings, server_settings
from services._server.identity import IdentityHook, only_certified
from services._server.logging import configure_logging
from services._server.metrics import Gauges, serve_metrics
from services._server.server import Server, ServerSettings, Service, check_settings, serve

logger = logging.getLogger(__name__)

EXIT_FAILED: Final = 1

MIN_OPEN_FILES: Final = 64
"""A service without callers has about 30 open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What a service's `open` yields."""

    services: Sequence[Service]
    identify: IdentityHook | None = None
    gauges: Sequence[Gauges] = ()
    notes: Sequence[str] = ()
    """Lines for the person who started it: where its state is, what it needs."""


Open = Callable[[Mapping[str, Any], asyncio.Event], AbstractAsyncContextManager[Opened]]
"""Opens a service from its settings. It sets the event to stop the process, as SIGTERM would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A service as a program."""

    name: str
    """For example "session-store"; in every log line."""

    description: str
    options: Sequence[Setting]
    """`server_options(...)` and the service's own."""

    open: Open


def run_service(program: Program, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Run a service until SIGTERM or SIGINT, and return the exit code.

    The first signal drains: watches end at once, calls in hand within the grace. The second ends the process at once:
    its state is safe at any instruction. Prints a line `NAME listens on ADDRESS` to standard output for every address
    once it serves.
    """
    try:
        values = read_settings(
            f"python -m services.{program.name.replace('-', '_')}",
            program.description,
            program.options,
            arguments,
            os.environ if environ is None else environ,
        )
        settings = server_settings(values)
        _check_open_files()
    except ConfigError as err:
        print(f"{program.name}: {err}", file=sys.stderr)  # noqa: T201  # there is no log yet
        return EXIT_USAGE
    configure_logging(program.name, values["log_level"])
    faults.install_from_environment()
    exit_code = 0
    try:
        asyncio.run(_run(program, values, settings))
    except* HarnessError as group:
        exit_code = EXIT_FAILED
        for error in _leaves(group):
            logger.error("service ended", extra={"reason": error.reason, "error": error.message})
            print(f"{program.name}: {error.message}", file=sys.stderr)  # noqa: T201  # for the person who started it
    return exit_code


def _check_open_files() -> None:
    """Raise ConfigError where so few files may be open that gRPC, which must have some, would end the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < MIN_OPEN_FILES:
        raise ConfigError(
            f"only {limit} files may be open, at least {MIN_OPEN_FILES} are needed: raise the limit (ulimit -n)"
        )


async def _run(program: Program, values: Mapping[str, Any], settings: ServerSettings) -> None:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    async with AsyncExitStack() as stack:
        # The coordinator's way to know its callers is there only once its store is.
        asks_who_calls = bool(values["allow_client"]) or values.get("authenticate") == "tokens"
        check_settings(settings, is_authenticated=asks_who_calls)
        opened = await stack.enter_async_context(program.open(values, stop))
        server = await stack.enter_async_context(serve(settings, opened.services, identify=_identity(opened, values)))
        metrics_address = values["metrics"]
        if metrics_address is not None:
            metrics = serve_metrics(metrics_address, program.name, server.calls, opened.gauges)
            logger.info("metrics served", extra={"address": await stack.enter_async_context(metrics)})
        _announce(program, server, opened)
        await stop.wait()
        # Before anything that the calls use is closed.
        await server.drain()
    logger.info("service ended")


def _identity(opened: Opened, values: Mapping[str, Any]) -> IdentityHook | None:
    if opened.identify is None and values["allow_client"]:
        return only_certified(values["allow_client"])
    return opened.identify


def _announce(program: Program, server: Server, opened: Opened) -> None:
    logger.info("service began", extra={"addresses": ", ".join(server.addresses)})
    for address in server.addresses:
        print(f"{program.name} listens on {address}", flush=True)  # noqa: T201  # its starter waits for it
    for note in opened.notes:
        print(f"{program.name}: {note}", flush=True)  # noqa: T201  # for the person who started it


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal(name: str) -> None:
        if stop.is_set():
            logger.warning("forced to end", extra={"signal": name})
            logging.shutdown()
            os._exit(EXIT_FAILED)
        logger.info("asked to end", extra={"signal": name})
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)


def _leaves(group: BaseExceptionGroup[HarnessError]) -> list[HarnessError]:
    found: list[HarnessError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
