"""Errors as a person is told them: one line that says what, which value, what to do. And what a bug leaves behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk, a quota, a bound on a file's size."""

# The library's messages say what failed and which value; these add what to type here. Keys: `HarnessError.reason`.
_WHAT_TO_DO = {
    "SESSION_NOT_FOUND": "See which there are: unreal-agent sessions list.",
    "SESSION_EXISTS": "Go on with it: unreal-agent run --session ID.",
    "SESSION_NOT_AT_REST": "Stop it first (unreal-agent sessions stop ID), or delete it with --force.",
    "OPERATION_NOT_FOUND": "See which there are: unreal-agent operations list SESSION.",
    "OPERATION_TERMINAL": "It has ended; there is nothing to cancel.",
    "INPUT_ID_CONFLICT": "Use another --input-id, or send the same content again.",
    "UNSUPPORTED_SESSION_VERSION": "A newer release wrote it; nothing was changed: upgrade unreal-agent.",
    "UNSUPPORTED_OPERATION_VERSION": "A newer release wrote it; nothing was changed: upgrade unreal-agent.",
    "CONNECTION_LOST": "What was accepted goes on there; see it: unreal-agent sessions watch SESSION.",
    "STORAGE_FULL": "Nothing that was acknowledged is lost: run --session ID goes on.",
    "STORAGE_FAILED": "See that the disk has room and is sound; run --session ID goes on.",
    "STORE_CORRUPT": "Restore the directory from a copy, or begin anew with another --state-dir.",
    "HISTORY_DAMAGED": "See all that is damaged: unreal-agent doctor --check-state. Other sessions are not concerned.",
    "RECORD_CORRUPT": "See all that is damaged: unreal-agent doctor --check-state. Other sessions are not concerned.",
    "BLOB_DAMAGED": "See all that is damaged: unreal-agent doctor --check-state. Other sessions are not concerned.",
    "TOO_MANY_OPEN_FILES": "Nothing that was acknowledged is lost: run --session ID goes on.",
    "STORE_OUTDATED": "Put the whole directory back from one copy, or move its 'operations' away to go on from here.",
    "STORE_GONE": "Put it back, if there is a copy; what the session did since is not recorded.",
    "JOURNAL_UNREADABLE": "Move it away to go on; of what was running then, the outcome counts as unknown.",
    "MANAGER_REQUIRED": "Name one: unreal-agent run --manager NAME.",
    "FORK_POINT_NOT_FOUND": "See the sequences: unreal-agent sessions show SESSION --output jsonl.",
}


class CommandError(Exception):
    """Raised by the command line itself; ends it with one line."""

    def __init__(self, message: str, what_to_do: str = "", *, exit_code: int = EXIT_FAILED) -> None:
        """Say what is wrong, with the value, and what to do about it; both are sentences."""
        super().__init__(message)
        self.what_to_do = what_to_do
        self.exit_code = exit_code


class UsageError(CommandError):
    """Raised where the command line itself is wrong."""

    def __init__(self, message: str, what_to_do: str = "") -> None:
        """Say what is wrong and what would be right."""
        super().__init__(message, what_to_do, exit_code=EXIT_USAGE)


def error_line(error: BaseException) -> str | None:
    """Return the line that tells of an error which is no bug; None for anything else."""
    from harness.errors import HarnessError

    if isinstance(error, BaseExceptionGroup):
        # Of tasks that failed together the first one tells; the others were cancelled or failed for the same reason.
        lines = [error_line(inner) for inner in error.exceptions]
        return lines[0] if lines and all(lines) else None
    if isinstance(error, CommandError):
        return _sentences(str(error), error.what_to_do)
    if isinstance(error, HarnessError):
        what_to_do = _WHAT_TO_DO.get(error.reason, "")
        if not what_to_do and error.retry_after_s is not None:
            what_to_do = f"Try again in {error.retry_after_s:.0f} s."
        return _sentences(error.message, what_to_do)
    if isinstance(error, FileNotFoundError) and not _is_somewhere():
        return "the current directory was deleted. Change to another."
    if isinstance(error, UnicodeEncodeError):
        shown = ascii(error.object[max(0, error.start - 30) : error.start + 30])
        return _sentences(f"a text or a path is not UTF-8 ({shown})", "Give it in UTF-8, or name another.")
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        where = f"{error.filename}: " if error.filename else ""
        return _sentences(f"there is no room to write ({where}{os_error_text(error)})", "Make room, and try again.")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return _sentences(os_error_text(error), "Raise the limit (ulimit -n), and try again.")
    return None


def exit_code_of(error: BaseException) -> int:
    """Return the exit code that an error ends the command with."""
    if isinstance(error, BaseExceptionGroup):
        return exit_code_of(error.exceptions[0])
    return error.exit_code if isinstance(error, CommandError) else EXIT_FAILED


def bug_line(error: BaseException, directory: Path | None) -> str:
    """Write the traceback of a bug to a file and return the line that names it."""
    import tempfile
    import traceback
    from datetime import UTC, datetime

    text = "".join(traceback.format_exception(error))
    name = f"unreal-agent-bug-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    for place in (directory, Path(tempfile.gettempdir())):
        if place is None:
            continue
        try:
            path = place / name
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            continue
        return f"a fault in unreal-agent itself ({type(error).__name__}). Please report it with {path}."
    return f"a fault in unreal-agent itself ({type(error).__name__}: {error}). Please report it."


def os_error_text(error: OSError) -> str:
    """Return what the system said, without the number."""
    return (error.strerror or str(error)).lower()


def _is_somewhere() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _sentences(message: str, what_to_do: str) -> str:
    message = " ".join(message.split())
    if not what_to_do:
        return message
    return f"{message if message.endswith(('.', '!', '?')) else message + '.'} {what_to_do}"
