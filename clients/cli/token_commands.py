"""`unreal-agent tokens …`: the options. Light; the work is in `token_actions`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from clients.cli.failures import UsageError
from clients.cli.options import output_option
from clients.cli.place import find_place

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

STORE_VARIABLE = "UNREAL_AGENT_SESSION_STORE"

RIGHTS = ("read", "submit", "control", "operate")


def store_options(command: CommandT) -> CommandT:
    """Add `--state-dir` and `--session-store`."""
    with_store = click.option(
        "--session-store",
        metavar="ADDRESS",
        envvar=STORE_VARIABLE,
        help="The session store that keeps them. Default: the one that serves the state directory.",
    )(command)
    return click.option("--state-dir", metavar="DIR", help="Directory that `serve` was given.")(with_store)


@click.group(short_help="Let clients and managers in, and shut them out.")
def tokens() -> None:
    """Make, list and revoke the tokens by which a coordinator knows its clients.

    A coordinator asks for them where it was started with --authenticate tokens. Clients give theirs in
    UNREAL_AGENT_TOKEN.
    """


@tokens.command("create")
@click.option("--label", default="", metavar="TEXT", help="Whose it is, for people.")
@click.option("--prefix", metavar="PREFIX", help="Only sessions whose IDs begin with this. Default: all.")
@click.option(
    "--right",
    "rights",
    multiple=True,
    type=click.Choice(RIGHTS),
    help="What it allows; may be repeated. read: see sessions. submit: create them and send inputs. control: stop,"
    " cancel, change, fork, delete. operate: attach as the manager of --manager. Default: read, submit, control.",
)
@click.option("--manager", default="", metavar="NAME", help="The one manager that a token to operate is good for.")
@click.option(
    "--days", type=click.FloatRange(min=0, min_open=True, max=36_500), help="How long it is good. Default: for ever."
)
@store_options
def create_token(
    label: str,
    prefix: str | None,
    rights: tuple[str, ...],
    manager: str,
    days: float | None,
    state_dir: str | None,
    session_store: str | None,
) -> int:
    """Make a token and print its secret, which is not kept and never shown again."""
    from clients.cli import token_actions as actions

    rights = rights or (("operate",) if manager else ("read", "submit", "control"))
    _check_scope(prefix, rights, manager)
    wish = actions.TokenWish(
        label=label,
        prefix=prefix or "",
        rights=rights,
        manager=manager,
        days=days,
    )
    return actions.with_store(_store(state_dir, session_store), lambda store: actions.create(store, wish))


def _check_scope(prefix: str | None, rights: tuple[str, ...], manager: str) -> None:
    """Refuse what would make a token for more, or for less, than was meant."""
    if prefix == "":
        # The value of a variable that is not set must not open all sessions.
        raise UsageError("--prefix is empty", "Leave it out for a token to all sessions.")
    if "operate" in rights and not manager:
        raise UsageError("--right operate is given without --manager", "Name the one manager that it is for.")
    if manager and "operate" not in rights:
        raise UsageError(f"--manager {manager} is for a token to operate", "Give --right operate too, or leave it out.")
    if prefix and set(rights) == {"operate"}:
        raise UsageError(f"--prefix {prefix} is for sessions, and the token is for a manager", "Leave one of them out.")


@tokens.command("list")
@output_option("text", "jsonl")
@store_options
def list_tokens(output: str, state_dir: str | None, session_store: str | None) -> int:
    """List the tokens, without their secrets."""
    from clients.cli import token_actions as actions

    return actions.with_store(_store(state_dir, session_store), lambda store: actions.list_all(store, output))


@tokens.command("revoke")
@click.argument("token_id", metavar="TOKEN")
@store_options
def revoke_token(token_id: str, state_dir: str | None, session_store: str | None) -> int:
    """Refuse a token from now on, and end what runs for it: watches, uploads, an attached manager."""
    from clients.cli import token_actions as actions

    return actions.with_store(_store(state_dir, session_store), lambda store: actions.revoke(store, token_id))


def _store(state_dir: str | None, session_store: str | None) -> tuple[str, Any]:
    """Return the store's address, and how it is dialled."""
    place = find_place(state_dir, None, os.environ)
    return session_store or f"unix:{place.state.path / 'session-store.sock'}", place.tls
