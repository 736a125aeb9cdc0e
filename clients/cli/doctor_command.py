"""`unreal-agent doctor`: the options. Light; the work is in `doctor`."""

from __future__ import annotations

import os

import click

from clients.cli.options import state_dir_option
from clients.cli.state_dir import state_directory


@click.command(short_help="What is set up, what is missing, what to type.")
@click.option("--workspace", metavar="DIR", default=".", help="Directory to work in. Default: this one.")
@click.option("--check-state", is_flag=True, help="Also read all that is stored and say whether it is sound.")
@state_dir_option
def doctor(workspace: str, check_state: bool, state_dir: str | None) -> int:
    """Say what is set up and what is missing, with what to type for it. Changes nothing.

    Exit codes: 0 all that is needed is there, 1 something is missing or damaged.
    """
    from clients.cli.doctor import examine

    return examine(state_directory(state_dir, os.environ), workspace, checks_state=check_state)
