"""`python -m services.coordinator`: the flags, and what they mean."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from clients._rpc.channel import is_local
from harness.coordinator import CoordinatorConfig
from services._server.config import (
    Setting,
    ValueProblem,
    client_tls,
    one_of,
    parse_address,
    parse_path,
    parse_seconds,
    parse_switch,
    parse_text,
    server_options,
)
from services._server.main import Opened, Program, run_service
from services.coordinator.app import ATTACHED, CoordinatorServiceConfig, default_settings, open_coordinator_service

NAME = "coordinator"

DEFAULT_LISTEN = "unix:{state_dir}/coordinator.sock"


def parse_manager(text: str) -> tuple[str, str]:
    """Return a manager's name and address."""
    name, separator, address = text.partition("=")
    if not (separator and name.replace("-", "").replace("_", "").isalnum()):
        raise ValueProblem("must be NAME=ADDRESS, for example local=127.0.0.1:7779, or NAME=attached")
    return name, address if address == ATTACHED else parse_address(address)


def parse_percent(text: str) -> int:
    """Return a share of the window at which there is still room to ask for a summary."""
    if not (text.isascii() and text.isdigit() and 10 <= int(text) <= 95):
        raise ValueProblem("must be a whole number from 10 to 95")
    return int(text)


OPTIONS = (
    *server_options(default_listen=DEFAULT_LISTEN),
    Setting(
        flag="--name",
        parse=parse_text,
        default=NAME,
        metavar="NAME",
        help="a new process of the same name takes over the sessions of the old one at once",
    ),
    Setting(
        flag="--advertise",
        parse=parse_address,
        default=None,
        metavar="ADDRESS",
        help="where other coordinators reach this one; default: the first address that it listens on",
    ),
    Setting(
        flag="--session-store",
        parse=parse_address,
        default="unix:{state_dir}/session-store.sock",
        metavar="ADDRESS",
        help="the session store; it may start later",
    ),
    Setting(
        flag="--manager",
        parse=parse_manager,
        default="local=unix:{state_dir}/operation-manager.sock",
        is_repeated=True,
        metavar="NAME=ADDRESS",
        help="an operation manager; it may start later; may be repeated. NAME=attached: it dials this coordinator",
    ),
    Setting(
        flag="--authenticate",
        parse=one_of("nobody", "tokens"),
        default="nobody",
        metavar="nobody|tokens",
        help="tokens: every call needs one that `unreal-agent tokens create` made, and may do what that allows",
    ),
    Setting(
        flag="--script",
        parse=parse_path,
        default=None,
        metavar="FILE",
        help="what the provider 'scripted' plays to sessions without a script of their own",
    ),
    Setting(
        flag="--record",
        parse=parse_path,
        default=None,
        metavar="DIR",
        help="keep what models are sent and answer there, without credentials; --script plays it",
    ),
    Setting(
        flag="--session-scripts",
        parse=parse_switch,
        default=None,
        help="let a session name a script, a file of this machine, by its label 'script';"
        " default: true where nobody beyond this machine can reach the coordinator",
    ),
    Setting(
        flag="--grace-seconds",
        parse=parse_seconds,
        default="1",
        metavar="SECONDS",
        help="how long results of one response are gathered before the next turn",
    ),
    Setting(
        flag="--heartbeat-seconds",
        parse=parse_seconds,
        default="600",
        metavar="SECONDS",
        help="how long calls run before the model is woken with a note",
    ),
    Setting(
        flag="--lease-seconds",
        parse=parse_seconds,
        default="10",
        metavar="SECONDS",
        help="after this without a sign of life another coordinator may go on with its sessions",
    ),
    Setting(
        flag="--idle-seconds",
        parse=parse_seconds,
        default="30",
        metavar="SECONDS",
        help="how long a session that has nothing to do stays in memory",
    ),
    Setting(
        flag="--compaction-percent",
        parse=parse_percent,
        default="80",
        metavar="PERCENT",
        help="share of a model's window from which on room is made: old output is cut down, older turns are summarised",
    ),
)


@asynccontextmanager
async def _open(values: Mapping[str, Any], stop: asyncio.Event) -> AsyncIterator[Opened]:
    script = str(values["script"]) if values["script"] is not None else None
    allows_session_scripts = values["session_scripts"]
    if allows_session_scripts is None:
        allows_session_scripts = all(is_local(address) for address in values["listen"])
    config = CoordinatorServiceConfig(
        store_address=values["session_store"],
        manager_addresses=dict(values["manager"]),
        script=script,
        record=str(values["record"]) if values["record"] is not None else None,
        allows_session_scripts=allows_session_scripts,
        tls=client_tls(values),
        asks_for_tokens=values["authenticate"] == "tokens",
        environ=os.environ,
        coordinator=CoordinatorConfig(
            name=values["name"],
            address=_advertised(values),
            default_settings=default_settings(os.environ, script),
            grace_s=values["grace_seconds"],
            heartbeat_interval_s=values["heartbeat_seconds"],
            lease_s=values["lease_seconds"],
            idle_s=values["idle_seconds"],
            compaction_threshold=values["compaction_percent"] / 100,
            takes_runnable_sessions=True,
        ),
    )
    async with open_coordinator_service(config, stop, _say) as opened:
        managers = ", ".join(
            f"{name} {'attaches' if address == ATTACHED else f'at {address}'}"
            for name, address in config.manager_addresses.items()
        )
        notes = [f"session store at {config.store_address}", f"operation managers: {managers}"]
        yield replace(opened, notes=notes)


def _advertised(values: Mapping[str, Any]) -> str:
    if values["advertise"] is not None:
        return str(values["advertise"])
    # A port that is not chosen yet can't be told to anybody.
    return next((address for address in values["listen"] if not address.endswith(":0")), "")


def _say(line: str) -> None:
    print(f"{NAME} {line}", flush=True)  # noqa: T201  # for the person who started it


PROGRAM = Program(
    name=NAME,
    description="Runs sessions: accepts inputs, asks the model, hands operations to their managers.",
    options=OPTIONS,
    open=_open,
)

if __name__ == "__main__":
    sys.exit(run_service(PROGRAM, sys.argv[1:]))
