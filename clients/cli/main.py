"""Entry point of the command line `unreal-agent`: the commands, and the one place where an error becomes a line.

Must stay light: what a command needs is imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from clients.cli.doctor_command import doctor
from clients.cli.failures import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    UsageError,
    bug_line,
    error_line,
    exit_code_of,
    os_error_text,
)
from clients.cli.operation_commands import operations
from clients.cli.run_command import run
from clients.cli.serve_commands import serve
from clients.cli.session_commands import send_input, sessions
from clients.cli.state_dir import state_directory
from clients.cli.token_commands import tokens

MAX_SHOWN_CHARS = 60
"""Of a value in an error."""


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="unreal-agent", message="unreal-agent %(version)s")
def cli() -> None:
    """Run AI agents durably: any process may be killed at any moment, and the work goes on.

    \b
      unreal-agent run -p "Fix the failing test"     do something in this directory
      unreal-agent run --session ID                  go on where it was left
      unreal-agent doctor                            what is set up, what is missing
    """  # noqa: D301 - click reads the backspace as "do not fill the next paragraph"


cli.add_command(run)
cli.add_command(sessions)
cli.add_command(operations)
cli.add_command(send_input)
cli.add_command(tokens)
cli.add_command(serve)
cli.add_command(doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    _open_missing_streams()
    code = _run(sys.argv[1:] if arguments is None else arguments)
    sys.exit(code if _flush_output() else code or EXIT_FAILED)


def _open_missing_streams() -> None:
    """Put /dev/null where the caller closed a stream: a file of ours would get its number and its output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open for life


def _run(arguments: Sequence[str]) -> int:
    try:
        _refuse_bytes(arguments)
        result = cli.main(args=arguments, prog_name="unreal-agent", standalone_mode=False)
    except click.exceptions.Exit as exit_wish:
        return exit_wish.exit_code
    except click.exceptions.Abort:
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(f"{error.format_message()}\n")
        return EXIT_USAGE
    except click.UsageError as error:
        # click's own text is of several lines; one says as much.
        where = error.ctx.command_path if error.ctx is not None else "unreal-agent"
        _complain(f"{error.format_message().rstrip('.')}. See: {where} --help.")
        return EXIT_USAGE
    except click.ClickException as error:
        _complain(error.format_message())
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILED  # whoever closed the output knows
    except Exception as error:  # the top of the program: whatever it is, a person gets one line
        return _tell(error)
    return result if isinstance(result, int) else 0


def _refuse_bytes(arguments: Sequence[str]) -> None:
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            shown = ascii(argument)[:MAX_SHOWN_CHARS]
            raise UsageError(f"an argument is not UTF-8 ({shown})", "Give it in UTF-8.") from None


def _tell(error: Exception) -> int:
    line = error_line(error)
    if line is not None:
        _complain(line)
        return exit_code_of(error)
    directory = state_directory(None, os.environ).path
    _complain(bug_line(error, directory if directory.is_dir() else None))
    return EXIT_FAILED


def _complain(line: str) -> None:
    sys.stderr.write(f"unreal-agent: {line}\n")


def _flush_output() -> bool:
    """Write what is left of the output; return whether it could be."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _complain(f"the output can't be written ({os_error_text(error)})")
        # The interpreter would try once more on its way out, and say so at length.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
