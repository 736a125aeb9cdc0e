"""`unreal-agent sessions …` and `unreal-agent input`: the options. Light; the work is in `session_actions`."""

from __future__ import annotations

import click

from clients.cli.options import output_option, place_options
from clients.cli.place import Place


@click.group(short_help="See, follow, fork, stop, move and delete sessions.")
def sessions() -> None:
    """See, follow, fork, stop, move and delete sessions."""


@sessions.command("list")
@output_option("text", "jsonl")
@place_options
def list_sessions(output: str, place: Place) -> int:
    """List the sessions, the oldest first."""
    from clients.cli import session_actions as actions

    return actions.read(place, lambda c: actions.list_sessions(c, output))


@sessions.command("show")
@click.argument("session_id", metavar="SESSION")
@output_option("text", "jsonl")
@place_options
def show_session(session_id: str, output: str, place: Place) -> int:
    """Show a session's settings, state and history. Nothing of it goes on."""
    from clients.cli import session_actions as actions

    return actions.read(place, lambda c: actions.show_session(c, session_id, output))


@sessions.command("watch")
@click.argument("session_id", metavar="SESSION")
@output_option("text", "jsonl")
@click.option("--script", metavar="FILE", help="Script of a session whose provider is scripted.")
@place_options
def watch_session(session_id: str, output: str, script: str | None, place: Place) -> int:
    """Show a session from its beginning and follow it until it rests; what is unfinished goes on."""
    from clients.cli.run_job import WatchJob, watch_job

    return watch_job(WatchJob(session_id=session_id, script=script, place=place, is_jsonl=output == "jsonl"))


@sessions.command("context")
@click.argument("session_id", metavar="SESSION")
@click.option("--full", is_flag=True, help="Also show the texts, as the model would be sent them.")
@output_option("text", "jsonl")
@place_options
def show_context(session_id: str, full: bool, output: str, place: Place) -> int:
    """Show what the model would be sent now, and what takes the room. Asks nobody."""
    from clients.cli import session_actions as actions

    return actions.read(
        place,
        lambda c: actions.show_context(c, session_id, is_full=full, output=output),
    )


@sessions.command("fork")
@click.argument("session_id", metavar="SESSION")
@click.option("--at", "sequence", type=click.IntRange(min=1), metavar="N", help="Last item to keep. Default: all.")
@click.option("--as", "new_id", metavar="ID", help="ID of the fork. Default: made up.")
@place_options
def fork_session(session_id: str, sequence: int | None, new_id: str | None, place: Place) -> int:
    """Begin another session with the history of this one; nothing is copied, and this one stays as it is."""
    from clients.cli import session_actions as actions

    return actions.read(place, lambda c: actions.fork_session(c, session_id, sequence or 0, new_id, place))


@sessions.command("stop")
@click.argument("session_id", metavar="SESSION")
@click.option("--reason", default="", metavar="TEXT", help="Shown with the stop.")
@place_options
def stop_session(session_id: str, reason: str, place: Place) -> int:
    """Stop a session: what it still runs is ended. Its next input starts it again."""
    from clients.cli import session_actions as actions

    return actions.act(place, lambda c: actions.stop_session(c, session_id, reason))


@sessions.command("export")
@click.argument("session_id", metavar="SESSION")
@click.option("--to", "path", metavar="FILE", help="File to write. Default: standard output.")
@place_options
def export_session(session_id: str, path: str | None, place: Place) -> int:
    """Write a session as JSON lines, images and all, at one consistent point."""
    from clients.cli import session_actions as actions

    return actions.read(place, lambda c: actions.export_session(c, session_id, path))


@sessions.command("import")
@click.argument("path", metavar="FILE")
@click.option("--as", "new_id", metavar="ID", help="ID of the session. Default: that in the file.")
@place_options
def import_session(path: str, new_id: str | None, place: Place) -> int:
    """Make a session from an export ('-': standard input), whole or not at all."""
    from clients.cli import session_actions as actions

    return actions.read(place, lambda c: actions.import_session(c, path, new_id, place))


@sessions.command("storage")
@click.argument("session_id", metavar="[SESSION]", default="")
@output_option("text", "jsonl")
@place_options
def show_storage(session_id: str, output: str, place: Place) -> int:
    """Show what a session takes up, by kind, and what it shares with forks; without SESSION: what each takes up."""
    from clients.cli import session_actions as actions
    from clients.cli.storage_actions import show_storage as show

    return actions.read(place, lambda c: show(c, session_id, output))


@sessions.command("delete")
@click.argument("session_id", metavar="SESSION")
@click.option("--force", is_flag=True, help="Also where it does not rest: it is stopped first.")
@place_options
def delete_session(session_id: str, force: bool, place: Place) -> int:
    """Delete a session for good: history, operations, images. Its ID is never used again; forks of it stay whole.

    Files with what its commands printed stay at the operation manager, out of sight, for 7 days at most.
    """
    from clients.cli import session_actions as actions

    return actions.act(place, lambda c: actions.delete_session(c, session_id, force))


@click.command("input", short_help="Send a text to a session without running it.")
@click.argument("session_id", metavar="SESSION")
@click.argument("text", metavar="TEXT")
@click.option("--input-id", metavar="ID", help="The same ID and text again is accepted once. Default: a new one.")
@place_options
def send_input(session_id: str, text: str, input_id: str | None, place: Place) -> int:
    """Record TEXT as an input of SESSION; it is answered when the session runs."""
    from clients.cli import session_actions as actions

    return actions.act(place, lambda c: actions.send_input(c, session_id, text, input_id, place))
