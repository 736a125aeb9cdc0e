"""Options that several commands share. Imported by each of them: nothing heavy here."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from clients.cli.place import find_place

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def place_options(command: CommandT) -> CommandT:
    """Add `--state-dir` and `--server`; the command gets what they and the environment name as `place`."""

    @functools.wraps(command)
    def at_place(*arguments: Any, state_dir: str | None, server: str | None, tls_ca: str | None, **options: Any) -> Any:
        return command(*arguments, place=find_place(state_dir, server, os.environ, tls_ca=tls_ca), **options)

    with_tls = click.option(
        "--tls-ca",
        metavar="FILE",
        help="Authority of the coordinator's certificate (PEM), for TLS to host:port. Default: $UNREAL_AGENT_TLS_CA.",
    )(at_place)

    with_server = click.option(
        "--server",
        metavar="ADDRESS",
        help="Coordinator to work with: unix:/path or host:port. Default: $UNREAL_AGENT_SERVER, else none.",
    )(with_tls)
    return click.option(
        "--state-dir",
        metavar="DIR",
        help="Where sessions live. Default: $UNREAL_AGENT_STATE_DIR, else ~/.local/state/unreal-agent.",
    )(with_server)  # type: ignore[return-value]  # the wrapper takes other arguments, which click alone passes


def output_option(*values: str) -> Callable[[CommandT], CommandT]:
    """Add `--output` with these values, the first as default."""

    def add(command: CommandT) -> CommandT:
        return click.option(
            "--output",
            "-o",
            type=click.Choice(values),
            default=values[0],
            help="text: for people. jsonl: for programs, one JSON object per line and nothing else.",
        )(command)

    return add
