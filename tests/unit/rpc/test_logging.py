"""A service's log is JSON lines that hold fields, and nothing of noisy libraries."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from services._server.interceptor import request_id_var
from services._server.logging import configure_logging


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("httpx", "httpcore", "PIL", "asyncio", "grpc")}
    stream = io.StringIO()
    configure_logging("session-store", "info", stream)
    try:
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name, former in levels.items():
            logging.getLogger(name).setLevel(former)


def parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_holds_message_fields_and_request_id(lines: io.StringIO) -> None:
    token = request_id_var.set("r1")
    logging.getLogger("a.b").info("thing done", extra={"session_id": "s\n1", "elapsed_s": 0.5, "what": object})
    request_id_var.reset(token)
    (line,) = parsed(lines)
    assert line.pop("time").endswith("+00:00")
    assert line.pop("what") == "<class 'object'>"
    assert line == {
        "level": "INFO",
        "component": "session-store",
        "logger": "a.b",
        "message": "thing done",
        "request_id": "r1",
        "session_id": "s\n1",
        "elapsed_s": 0.5,
    }


def test_a_traceback_stays_on_its_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("a").exception("fault")
    (line,) = parsed(lines)
    assert "ValueError: boom" in line["traceback"]


def test_requests_to_providers_are_not_logged(lines: io.StringIO) -> None:
    for name in ("httpx", "httpcore.http11"):
        logging.getLogger(name).info("HTTP Request: POST https://host/v1?key=secret")
        logging.getLogger(name).debug("headers: secret")
    assert parsed(lines) == []
