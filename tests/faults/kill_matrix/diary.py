"""What a client has sent and seen, one JSON line each, written before it goes on: what it remembers after its death."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict


class Line(TypedDict, total=False):
    """One line. `what` says which of the others are there."""

    what: str
    """ "begun", "sent", "accepted", "change", "context", "over"."""

    at_s: float
    """CLOCK_MONOTONIC, which all processes of a machine share."""

    session: str
    input_id: str
    sequence: int
    duplicate: bool
    revision: int
    items: list[tuple[int, str]]
    """Sequence and digest of each item."""

    operations: list[tuple[str, int]]
    """ID and step of each operation."""

    written_s: float
    """Newest time at which an item of a change was recorded; wall clock."""

    ended_s: float
    """Newest time at which an operation of a change ended; wall clock."""

    inputs: dict[str, int]
    """How often each input is in the model's context."""

    results: dict[str, int]
    """How often each operation's result is."""


class Diary:
    """Appends; a line that a death cut off is as good as never written."""

    def __init__(self, path: Path) -> None:
        """Open it, and cut off what is not whole."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        text = path.read_bytes()
        os.ftruncate(self._descriptor, text.rfind(b"\n") + 1)

    def write(self, line: Line) -> None:
        """Append a line."""
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


class DiaryReader:
    """Reads what has been added since it last looked."""

    def __init__(self, path: Path) -> None:
        """Begin at the beginning; the file may come later."""
        self._path = path
        self._offset = 0

    def new_lines(self) -> Iterator[Line]:
        """Yield every whole line that is new."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            value: Any = json.loads(line)
            yield value
