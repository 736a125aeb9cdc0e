"""Options that several commands share. Imported by each of them: nothing heavy here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


def state_dir_option(command: CommandT) -> CommandT:
    """Add `--state-dir`."""
    return click.option(
        "--state-dir",
        metavar="DIR",
        help="Where sessions live. Default: $UNREAL_AGENT_STATE_DIR, else ~/.local/state/unreal-agent.",
    )(command)


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
