"""Where the library's log goes in embedded mode: a file of bounded size in the state directory, never the terminal."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
from collections.abc import Iterator
from pathlib import Path

MAX_LOG_BYTES = 1_000_000

# What `logging` itself puts on a record; anything else is a field that the library added.
_OWN_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


class _Formatter(logging.Formatter):
    """One line per record, the fields behind the message; a traceback follows."""

    def format(self, record: logging.LogRecord) -> str:
        line, *traceback = super().format(record).split("\n")
        fields = {name: value for name, value in record.__dict__.items() if name not in _OWN_FIELDS}
        return "\n".join([" ".join([line, *(f"{name}={value}" for name, value in fields.items())]), *traceback])


@contextlib.contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Write warnings and errors to a file during the block; a file that can't be written loses them, nothing else."""
    root = logging.getLogger()
    try:
        handler: logging.Handler = logging.handlers.RotatingFileHandler(
            path, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8", delay=False
        )
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.WARNING)
    # A full disk must not put a traceback on the terminal for every record.
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # the documented way to override it
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
