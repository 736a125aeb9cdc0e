"""`unreal-agent doctor`: the options. Light; the work is in `doctor`."""

from __future__ import annotations

import click

from clients.cli.options import place_options
from clients.cli.place import Place


@click.command(short_help="What is set up, what is missing, what to type.")
@click.option("--workspace", metavar="DIR", default=".", help="Directory to work in. Default: this one.")
@click.option("--check-state", is_flag=True, help="Also read all that is stored and say whether it is sound.")
@place_options
def doctor(workspace: str, check_state: bool, place: Place) -> int:
    """Say what is set up and what is missing, with what to type for it. Changes nothing.

    Exit codes: 0 all that is needed is there, 1 something is missing or damaged.
    """
    from clients.cli.doctor import examine

    return examine(place, workspace, checks_state=check_state)
