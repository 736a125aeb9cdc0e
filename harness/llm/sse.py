"""Incremental decoder of server-sent events, from bytes to events. Does no I/O and knows no provider.

Lines are split before anything is decoded, so a chunk may end anywhere: inside a character, a line end or an event.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Bound of one event: larger than any response that a model's output limit allows, small enough to keep in memory."""

_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\r|\n")


class SSEError(Exception):
    """Raised when a stream breaks the format; the message names the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSentEvent:
    """One event with data."""

    number: int
    """Place in the stream, from 1."""

    name: str
    """The `event` field; empty if it was not sent."""

    data: str
    """Data lines, joined with a line feed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What had arrived of an event that was not ended by an empty line when the stream ended."""

    event: ServerSentEvent | None
    """The event as far as it came; None if nothing was left, or no data."""

    is_inside_character: bool
    """True where the bytes end within a UTF-8 sequence."""


class SSEDecoder:
    """Decodes one stream: feed chunks as they come, then `finish`."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        """Start at the beginning of a stream."""
        self._max_event_bytes = max_event_bytes
        self._line: list[bytes] = []
        self._line_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = b""
        self._count = 0
        self._is_first_line = True
        self._skip_line_feed = False

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events that are complete with this chunk, those before a broken one too, however chunks are cut.

        Raises:
            SSEError: An event is larger than the bound, or is not UTF-8.
        """
        if self._skip_line_feed and chunk:
            self._skip_line_feed = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        start = 0
        for end in _LINE_END.finditer(chunk):
            self._keep(chunk[start : end.start()])
            start = end.end()
            event = self._take_line()
            if event is not None:
                yield event
        if chunk.endswith(b"\r"):
            self._skip_line_feed = True
        self._keep(chunk[start:])

    def finish(self) -> Leftover:
        """Return what is left when the stream has ended."""
        if self._line_bytes:
            try:
                self._take_line()
            except SSEError:
                return Leftover(event=None, is_inside_character=False)
        try:
            return Leftover(event=self._dispatch(), is_inside_character=False)
        except _NotUTF8Error as err:
            return Leftover(event=None, is_inside_character=err.is_cut)

    def _keep(self, piece: bytes) -> None:
        if not piece:
            return
        self._line.append(piece)
        self._line_bytes += len(piece)
        if self._line_bytes + self._data_bytes > self._max_event_bytes:
            raise SSEError(f"event {self._count + 1} is larger than {self._max_event_bytes} bytes")

    def _take_line(self) -> ServerSentEvent | None:
        line = b"".join(self._line)
        self._line.clear()
        self._line_bytes = 0
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._data_bytes += len(value) + 1
        elif field == b"event":
            self._name = value
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        lines, name = self._data, self._name
        self._data, self._data_bytes, self._name = [], 0, b""
        if not lines:
            return None
        self._count += 1
        data = b"\n".join(lines)
        try:
            text = data.decode()
        except UnicodeDecodeError as err:
            # "unexpected end" is the codec's word for a sequence that is right as far as it goes.
            raise _NotUTF8Error(self._count, err.start, is_cut=err.reason == "unexpected end of data") from None
        return ServerSentEvent(number=self._count, name=name.decode(errors="replace"), data=text)


class _NotUTF8Error(SSEError):
    def __init__(self, number: int, place: int, *, is_cut: bool) -> None:
        super().__init__(f"event {number} is not UTF-8 at byte {place} of its data")
        self.is_cut = is_cut
