"""Logs of a service: JSON lines on standard error. The only place that configures logging."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Final, TextIO

from services._server.interceptor import request_id_var

# What `logging` itself puts on a record; anything else is a field that the caller added.
_OWN_FIELDS: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}

_MAX_FIELD_CHARS: Final = 2000

# They log each request with its address at INFO, and headers at DEBUG.
_QUIET_LIBRARIES: Final = ("httpx", "httpcore", "PIL", "asyncio", "grpc")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the service's name, and the record's fields."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a field that has no JSON form is written as its text."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "component": self._component,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := request_id_var.get():
            line["request_id"] = request_id
        for name, value in record.__dict__.items():
            if name not in _OWN_FIELDS and name not in line:
                line[name] = value if isinstance(value, (int, float, bool)) else str(value)[:_MAX_FIELD_CHARS]
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line, ensure_ascii=False)


def configure_logging(component: str, level: str, stream: TextIO | None = None) -> None:
    """Send this process's log to standard error as JSON lines.

    Args:
        component: Name of the service, in every line.
        level: "debug", "info", "warning" or "error".
        stream: None: standard error.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
