"""Speaks HTTP/2 by hand, to say what no library would: broken frames, calls that are never finished, silence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """Return a frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def call_headers(method: str, *, stream: int = 1) -> bytes:
    """Return the frame that begins a call; `method` is "/package.Service/Name"."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    return frame(HEADERS, b"".join(map(_literal, fields.items())), flags=END_HEADERS, stream=stream)


def message(data: bytes, *, claimed_size: int | None = None, stream: int = 1, is_last: bool = False) -> bytes:
    """Return a frame with a gRPC message, or with the beginning of one that is said to be larger."""
    size = len(data) if claimed_size is None else claimed_size
    return frame(DATA, b"\0" + size.to_bytes(4, "big") + data, flags=END_STREAM if is_last else 0, stream=stream)


def begin() -> bytes:
    """Return what a connection begins with."""
    return PREFACE + frame(SETTINGS)


@contextmanager
def closed_at_end(writers: list[asyncio.StreamWriter]) -> Iterator[None]:
    """Drop connections at the end of the block, without a word."""
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def connect(address: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to `host:port` and send something."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


def _literal(field: tuple[str, str]) -> bytes:
    """Return a header without compression (RFC 7541, 6.2.2); both parts are shorter than 127 bytes."""
    return b"\0" + b"".join(bytes((len(part),)) + part.encode() for part in field)
