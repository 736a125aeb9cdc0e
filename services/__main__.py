"""`python -m services`: the three services on one state directory. Light: no service is imported, each is a process."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from clients.cli.failures import CommandError
from clients.cli.state_dir import StateDirectory, state_directory
from harness.llm.providers import without_credentials
from services.supervisor import Child, Supervisor

PROGRAM = "services"

MANAGER_NAME = "local"
"""As the embedded mode names its manager: a session may move between the two."""


def main(arguments: Sequence[str]) -> int:
    """Run the services until SIGTERM or SIGINT and return the exit code."""
    known, for_coordinator = _parser().parse_known_args(arguments)
    state = state_directory(known.state_dir, os.environ)
    try:
        with state.hold() as lock:
            children = _children(state, known, for_coordinator)
            with state.served_at(_address(state, "coordinator")):
                return asyncio.run(Supervisor(children, lock, known.drain_grace_seconds).run())
    except CommandError as error:
        print(f"{PROGRAM}: {error}. {error.what_to_do}", file=sys.stderr)  # noqa: T201  # for whoever started it
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m services",
        description="Starts session store, operation manager and coordinator on one state directory, watches them and"
        " starts again what dies. SIGTERM and SIGINT end all of them in order; a second one ends them at once.",
        epilog="Every other flag is the coordinator's, for example --listen 127.0.0.1:7777 or --script FILE: see"
        " python -m services.coordinator --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--state-dir", metavar="DIRECTORY", help="where state and sockets lie")
    parser.add_argument("--log-level", metavar="LEVEL", default="warning", help="of all three (default: warning)")
    parser.add_argument(
        "--drain-grace-seconds",
        metavar="SECONDS",
        type=float,
        default=20.0,
        help="what calls in hand may take after SIGTERM, in each of the three (default: 20)",
    )
    return parser


def _children(state: StateDirectory, known: argparse.Namespace, for_coordinator: list[str]) -> list[Child]:
    """Return the services in the order in which they end: each before those that it uses."""
    shared = ["--state-dir", str(state.path), "--log-level", known.log_level]
    shared += ["--drain-grace-seconds", str(known.drain_grace_seconds)]
    store, manager, own = (_address(state, name) for name in ("session-store", "operation-manager", "coordinator"))
    coordinator = ["--listen", own, "--session-store", store, "--manager", f"{MANAGER_NAME}={manager}"]
    # Who asks no provider holds no provider's key: neither does what the manager starts.
    without_keys = without_credentials(os.environ)
    return [
        Child(name="coordinator", arguments=(*shared, *coordinator, *for_coordinator)),
        Child(name="operation-manager", arguments=(*shared, "--listen", manager), environment=without_keys),
        Child(name="session-store", arguments=(*shared, "--listen", store), environment=without_keys),
    ]


def _address(state: StateDirectory, name: str) -> str:
    return f"unix:{state.socket_directory() / f'{name}.sock'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
