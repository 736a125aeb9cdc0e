"""`unreal-agent serve …`: becomes the service by executing it. Imports none; its flags are the service's own."""

from __future__ import annotations

import os
import sys

import click

# Flags are told of, and refused, by the program that has them.
_PASSED_ON = {"ignore_unknown_options": True, "help_option_names": []}


@click.group(short_help="Start services that programs and commands work with.")
def serve() -> None:
    """Start services that programs and commands work with.

    \b
      unreal-agent serve all                            all three, for this machine
      unreal-agent serve all --listen 127.0.0.1:7777    also on a port
      unreal-agent serve coordinator --help             the flags of one of them
    """  # noqa: D301 - click reads the backspace as "do not fill the next paragraph"


def _add(name: str, module: str, help_text: str) -> None:
    @serve.command(name, context_settings=_PASSED_ON, short_help=help_text, add_help_option=False)
    @click.argument("flags", nargs=-1, type=click.UNPROCESSED)
    def become(flags: tuple[str, ...]) -> None:
        sys.stdout.flush()
        # -P: a directory of the same name where the person stands is not meant.
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *flags])


_add("all", "services", "Store, manager and coordinator on one state directory, kept alive.")
_add("coordinator", "services.coordinator", "Runs sessions: asks the model, hands out operations.")
_add("session-store", "services.session_store", "Keeps the histories of sessions.")
_add("operation-manager", "services.operation_manager", "Runs commands durably.")
