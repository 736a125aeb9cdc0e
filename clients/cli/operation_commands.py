"""`unreal-agent operations …`: the options. Light; the work is in `operation_actions`."""

from __future__ import annotations

import click

from clients.cli.options import output_option, place_options
from clients.cli.place import Place


@click.group(short_help="See and cancel what sessions run.")
def operations() -> None:
    """See and cancel what sessions run: commands, images, skills, and a host's own jobs."""


@operations.command("list")
@click.argument("session_id", metavar="SESSION")
@click.option("--unsettled", is_flag=True, help="Only those that run or whose result is not delivered.")
@output_option("text", "jsonl")
@place_options
def list_operations(session_id: str, unsettled: bool, output: str, place: Place) -> int:
    """List a session's operations, the oldest first."""
    from clients.cli import operation_actions as actions
    from clients.cli.session_actions import read

    return read(
        place,
        lambda c: actions.list_operations(c, session_id, is_unsettled=unsettled, output=output),
    )


@operations.command("show")
@click.argument("session_id", metavar="SESSION")
@click.argument("operation_id", metavar="OPERATION")
@output_option("text", "jsonl")
@place_options
def show_operation(session_id: str, operation_id: str, output: str, place: Place) -> int:
    """Show all that is recorded of one operation."""
    from clients.cli import operation_actions as actions
    from clients.cli.session_actions import read

    return read(place, lambda c: actions.show_operation(c, session_id, operation_id, output))


@operations.command("output")
@click.argument("session_id", metavar="SESSION")
@click.argument("operation_id", metavar="OPERATION")
@click.option("--stderr", is_flag=True, help="Standard error, not standard output.")
@click.option("--follow", "-f", is_flag=True, help="Go on while it runs.")
@click.option("--tail", "tail_bytes", type=click.IntRange(min=1), metavar="BYTES", help="Only the end.")
@place_options
def show_output(
    session_id: str, operation_id: str, stderr: bool, follow: bool, tail_bytes: int | None, place: Place
) -> int:
    """Write a command's whole output, byte for byte."""
    from clients.cli import operation_actions as actions
    from clients.cli.session_actions import act

    wish = actions.OutputWish(
        session_id=session_id,
        operation_id=operation_id,
        is_stderr=stderr,
        follows=follow,
        tail_bytes=tail_bytes or 0,
    )
    return act(place, lambda c: actions.show_output(c, wish))


@operations.command("cancel")
@click.argument("session_id", metavar="SESSION")
@click.argument("operation_id", metavar="OPERATION")
@click.option("--reason", default="", metavar="TEXT", help="Told to the model.")
@place_options
def cancel_operation(session_id: str, operation_id: str, reason: str, place: Place) -> int:
    """End one operation; its session goes on with that result."""
    from clients.cli import operation_actions as actions
    from clients.cli.session_actions import act

    return act(
        place,
        lambda c: actions.cancel_operation(c, session_id, operation_id, reason, is_abandoned=False),
    )


@operations.command("abandon")
@click.argument("session_id", metavar="SESSION")
@click.argument("operation_id", metavar="OPERATION")
@click.option("--reason", default="", metavar="TEXT", help="Told to the model.")
@place_options
def abandon_operation(session_id: str, operation_id: str, reason: str, place: Place) -> int:
    """Give up an operation whose end nobody can know; its session goes on with "outcome unknown"."""
    from clients.cli import operation_actions as actions
    from clients.cli.session_actions import act

    return act(
        place,
        lambda c: actions.cancel_operation(c, session_id, operation_id, reason, is_abandoned=True),
    )
