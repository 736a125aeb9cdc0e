"""Reads the beginning and the end of a command's output for the model. Reads a bounded part of the file, blocks.

Text is cleaned before the limit is applied: terminal escapes are dropped, and of a line that overwrites itself with
carriage returns the last frame is kept. The file keeps the raw bytes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from harness.primitives.process_table import OUT_OF_RESOURCES
from unreal_agent.operation.v1 import operation_pb2

# Read beyond the characters that are needed, since cleaning shortens.
EXTRA_WINDOW_BYTES = 64 * 1024
MAX_BYTES_PER_CHAR = 4

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # strings for the terminal
    r"|\x1b[ -/]*[0-~]?"  # all others
    r"|[\x00-\x08\x0b-\x1f\x7f]"
)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Cleaned text that knows where each of its characters was."""

    raw: str
    """Decoded with surrogateescape."""

    slices: list[tuple[int, int]]
    """What was kept of `raw`, in order."""

    @property
    def length(self) -> int:
        """Characters kept."""
        return sum(end - start for start, end in self.slices)

    def head(self, chars: int) -> tuple[str, int]:
        """Return the first characters, and how many bytes of the raw text they cover."""
        kept = []
        position = 0
        for start, end in self.slices:
            if chars <= 0:
                break
            end = min(end, start + chars)
            kept.append(self.raw[start:end])
            chars -= end - start
            position = end
        return "".join(kept), _byte_length(self.raw[:position])

    def tail(self, chars: int) -> tuple[str, int]:
        """Return the last characters, and how many bytes of the raw text they cover."""
        kept = []
        position = len(self.raw)
        for start, end in reversed(self.slices):
            if chars <= 0:
                break
            start = max(start, end - chars)
            kept.append(self.raw[start:end])
            chars -= end - start
            position = start
        return "".join(reversed(kept)), _byte_length(self.raw[position:])


def _byte_length(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def clean(raw_bytes: bytes) -> Cleaned:
    """Return output without what only a terminal understands; newlines and tabs stay."""
    raw = raw_bytes.decode("utf-8", "surrogateescape")
    if _CONTROL.search(raw) is None:
        return Cleaned(raw=raw, slices=[(0, len(raw))] if raw else [])
    slices: list[tuple[int, int]] = []
    start = 0
    while start < len(raw):
        newline = raw.find("\n", start)
        end = len(raw) if newline < 0 else newline
        slices += _clean_line(raw, start, end)
        if newline >= 0:
            slices.append((newline, newline + 1))
        start = end + 1
    return Cleaned(raw=raw, slices=slices)


def _clean_line(raw: str, start: int, end: int) -> list[tuple[int, int]]:
    """Return what is kept of one line: of several frames the last that shows anything."""
    if _CONTROL.search(raw, start, end) is None:
        return [(start, end)] if end > start else []
    while True:
        # A carriage return before the newline, or at the end, overwrites nothing.
        while end > start and raw[end - 1] == "\r":
            end -= 1
        frame = raw.rfind("\r", start, end) + 1
        kept = _clean_frame(raw, max(frame, start), end)
        if kept or frame <= start:
            return kept
        end = frame


def _clean_frame(raw: str, start: int, end: int) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    position = start
    for escape in _ESCAPE.finditer(raw, start, end):
        if escape.start() > position:
            kept.append((position, escape.start()))
        position = escape.end()
        if escape.group() == "\b" and kept:
            last_start, last_end = kept.pop()
            if last_end - 1 > last_start:
                kept.append((last_start, last_end - 1))
    if end > position:
        kept.append((position, end))
    return kept


def capture(path: str, max_chars: int, frozen_bytes: int | None = None) -> operation_pb2.CapturedOutput:
    """Return the head and tail of a file of output.

    Args:
        path: The file; one that is gone counts as empty.
        max_chars: Characters kept, half at either end.
        frozen_bytes: Size that counts, whatever was appended since; None: the present size.

    Raises:
        OSError: OUT_OF_RESOURCES: what it holds is not known.
    """
    try:
        with open(path, "rb") as file:
            present_bytes = os.fstat(file.fileno()).st_size
            size = present_bytes if frozen_bytes is None else min(frozen_bytes, present_bytes)
            window = MAX_BYTES_PER_CHAR * max_chars + EXTRA_WINDOW_BYTES
            first = file.read(size if size <= 2 * window else window)[:size]
            last = b""
            if size > 2 * window:
                file.seek(size - window)
                last = file.read(window)
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            raise
        return operation_pb2.CapturedOutput(path=path)
    return _cut(path, max_chars, size, first, last)


def _cut(path: str, max_chars: int, size: int, first: bytes, last: bytes) -> operation_pb2.CapturedOutput:
    tail_chars = max_chars // 2
    beginning = clean(_to_character(first) if last else first)
    if not last and beginning.length <= max_chars:
        head, _ = beginning.head(max_chars)
        return _captured(path, size, head, "", 0)
    head, head_bytes = beginning.head(max_chars - tail_chars)
    tail, tail_bytes = (clean(_from_line(last)) if last else beginning).tail(tail_chars)
    return _captured(path, size, head, tail, max(0, size - head_bytes - tail_bytes))


def _from_line(window: bytes) -> bytes:
    """Leave out the rest of a line that began before the window, if it is short, or of a character."""
    newline = window.find(b"\n", 0, EXTRA_WINDOW_BYTES)
    if newline >= 0:
        return window[newline + 1 :]
    start = 0
    while start < MAX_BYTES_PER_CHAR - 1 and 0x80 <= window[start] < 0xC0:
        start += 1
    return window[start:]


def _to_character(window: bytes) -> bytes:
    """Leave out a character that the window's end cuts."""
    for length in range(1, MAX_BYTES_PER_CHAR):
        lead = window[-length]
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return window[:-length] if needed > length else window
        if lead < 0x80:
            break
    return window


def _captured(path: str, size: int, head: str, tail: str, omitted: int) -> operation_pb2.CapturedOutput:
    shown_head, shown_tail = _show(head), _show(tail)
    return operation_pb2.CapturedOutput(
        head=shown_head,
        tail=shown_tail,
        omitted_bytes=omitted,
        total_bytes=size,
        path=path,
        is_lossy=shown_head != head or shown_tail != tail,
    )


def _show(text: str) -> str:
    """Replace bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
