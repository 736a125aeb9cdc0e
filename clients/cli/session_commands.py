"""`unreal-agent sessions …` and `unreal-agent input`: the options. Light; the work is in `session_actions`."""

from __future__ import annotations

import os

import click

from clients.cli.options import output_option, state_dir_option
from clients.cli.state_dir import state_directory


@click.group(short_help="See, follow, fork, stop, move and delete sessions.")
def sessions() -> None:
    """See, follow, fork, stop, move and delete sessions."""


@sessions.command("list")
@output_option("text", "jsonl")
@state_dir_option
def list_sessions(output: str, state_dir: str | None) -> int:
    """List the sessions, the oldest first."""
    from clients.cli import session_actions as actions

    return actions.read(state_directory(state_dir, os.environ), lambda c: actions.list_sessions(c, output))


@sessions.command("show")
@click.argument("session_id", metavar="SESSION")
@output_option("text", "jsonl")
@state_dir_option
def show_session(session_id: str, output: str, state_dir: str | None) -> int:
    """Show a session's settings, state and history. Nothing of it goes on."""
    from clients.cli import session_actions as actions

    return actions.read(state_directory(state_dir, os.environ), lambda c: actions.show_session(c, session_id, output))


@sessions.command("watch")
@click.argument("session_id", metavar="SESSION")
@output_option("text", "jsonl")
@click.option("--script", metavar="FILE", help="Script of a session whose provider is scripted.")
@state_dir_option
def watch_session(session_id: str, output: str, script: str | None, state_dir: str | None) -> int:
    """Show a session from its beginning and follow it until it rests; what is unfinished goes on."""
    from clients.cli.run_job import WatchJob, watch_job

    state = state_directory(state_dir, os.environ)
    return watch_job(WatchJob(session_id=session_id, script=script, state=state, is_jsonl=output == "jsonl"))


@sessions.command("context")
@click.argument("session_id", metavar="SESSION")
@click.option("--full", is_flag=True, help="Also show the texts, as the model would be sent them.")
@output_option("text", "jsonl")
@state_dir_option
def show_context(session_id: str, full: bool, output: str, state_dir: str | None) -> int:
    """Show what the model would be sent now, and what takes the room. Asks nobody."""
    from clients.cli import session_actions as actions

    return actions.read(
        state_directory(state_dir, os.environ),
        lambda c: actions.show_context(c, session_id, is_full=full, output=output),
    )


@sessions.command("fork")
@click.argument("session_id", metavar="SESSION")
@click.option("--at", "sequence", type=click.IntRange(min=1), metavar="N", help="Last item to keep. Default: all.")
@click.option("--as", "new_id", metavar="ID", help="ID of the fork. Default: made up.")
@state_dir_option
def fork_session(session_id: str, sequence: int | None, new_id: str | None, state_dir: str | None) -> int:
    """Begin another session with the history of this one; nothing is copied, and this one stays as it is."""
    from clients.cli import session_actions as actions

    state = state_directory(state_dir, os.environ)
    return actions.read(state, lambda c: actions.fork_session(c, session_id, sequence or 0, new_id, state))


@sessions.command("stop")
@click.argument("session_id", metavar="SESSION")
@click.option("--reason", default="", metavar="TEXT", help="Shown with the stop.")
@state_dir_option
def stop_session(session_id: str, reason: str, state_dir: str | None) -> int:
    """Stop a session: what it still runs is ended. Its next input starts it again."""
    from clients.cli import session_actions as actions

    return actions.act(state_directory(state_dir, os.environ), lambda c: actions.stop_session(c, session_id, reason))


@sessions.command("export")
@click.argument("session_id", metavar="SESSION")
@click.option("--to", "path", metavar="FILE", help="File to write. Default: standard output.")
@state_dir_option
def export_session(session_id: str, path: str | None, state_dir: str | None) -> int:
    """Write a session as JSON lines, images and all, at one consistent point."""
    from clients.cli import session_actions as actions

    return actions.read(state_directory(state_dir, os.environ), lambda c: actions.export_session(c, session_id, path))


@sessions.command("import")
@click.argument("path", metavar="FILE")
@click.option("--as", "new_id", metavar="ID", help="ID of the session. Default: that in the file.")
@state_dir_option
def import_session(path: str, new_id: str | None, state_dir: str | None) -> int:
    """Make a session from an export ('-': standard input), whole or not at all."""
    from clients.cli import session_actions as actions

    state = state_directory(state_dir, os.environ)
    return actions.read(state, lambda c: actions.import_session(c, path, new_id, state))


@sessions.command("delete")
@click.argument("session_id", metavar="SESSION")
@click.option("--force", is_flag=True, help="Also where it does not rest: it is stopped first.")
@state_dir_option
def delete_session(session_id: str, force: bool, state_dir: str | None) -> int:
    """Delete a session for good. Its ID is never used again; forks of it stay whole."""
    from clients.cli import session_actions as actions

    return actions.act(state_directory(state_dir, os.environ), lambda c: actions.delete_session(c, session_id, force))


@click.command("input", short_help="Send a text to a session without running it.")
@click.argument("session_id", metavar="SESSION")
@click.argument("text", metavar="TEXT")
@click.option("--input-id", metavar="ID", help="The same ID and text again is accepted once. Default: a new one.")
@state_dir_option
def send_input(session_id: str, text: str, input_id: str | None, state_dir: str | None) -> int:
    """Record TEXT as an input of SESSION; it is answered when the session runs."""
    from clients.cli import session_actions as actions

    state = state_directory(state_dir, os.environ)
    return actions.act(state, lambda c: actions.send_input(c, session_id, text, input_id, state))
