"""A real HTTP server in place of a model provider: it answers at the socket, in any chunks, delays and breaks.

Every request is recorded. Replies are taken in order, or made by a function of the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """One request as it arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""

    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Pause:
    """Send nothing for some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Send nothing until the test sets the event."""

    event: asyncio.Event


@dataclass(frozen=True, slots=True)
class Hang:
    """Send nothing until the client goes away."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Break the connection with a reset."""


@dataclass(frozen=True, slots=True)
class CloseUnfinished:
    """Close the connection without the end of the body."""


Step = bytes | Pause | WaitFor | Hang | Reset | CloseUnfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One response. Each `bytes` step is one chunk on the wire."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})
    steps: Sequence[Step] = ()
    before_headers: Sequence[Step] = ()
    """Steps taken before the status line is sent."""


def error_reply(status: int, error: object, headers: Mapping[str, str] | None = None) -> Reply:
    """Return a JSON answer; `error` is its whole body."""
    body = json.dumps(error).encode()
    return Reply(status=status, headers={"content-type": "application/json", **(headers or {})}, steps=[body])


def gzipped(stream: bytes, chunk_bytes: int = 7) -> Reply:
    """Return a compressed event stream in small chunks."""
    packed = gzip.compress(stream)
    chunks = [packed[start : start + chunk_bytes] for start in range(0, len(packed), chunk_bytes)]
    return Reply(headers={"content-type": "text/event-stream", "content-encoding": "gzip"}, steps=chunks)


class _ConnectionOverError(Exception):
    """Ends a connection's work."""


class ScriptedProvider:
    """The server; use `scripted_provider`, which starts and stops it."""

    def __init__(self, replies: Sequence[Reply] | Callable[[RecordedRequest], Reply]) -> None:
        self.requests: list[RecordedRequest] = []
        self.connections = 0
        self.disconnects = 0
        """Times that a client went away while a reply was being given."""
        self.request_arrived = asyncio.Event()
        self.client_left = asyncio.Event()
        self._replies = replies
        self._writers: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._is_stopping = False
        self.base_url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        task = asyncio.current_task()
        assert task is not None
        self.connections += 1
        self._writers[task] = writer
        try:
            while (request := await _read_request(reader)) is not None:
                self.requests.append(request)
                self.request_arrived.set()
                await self._answer(self._reply_to(request), reader, writer)
        except (_ConnectionOverError, ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            # The stream server reports a cancelled handler as a fault.
            if not self._is_stopping:
                raise
        finally:
            del self._writers[task]
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def close_connections(self) -> None:
        """Close every connection, idle ones included."""
        for writer in self._writers.values():
            writer.close()

    async def stop(self) -> None:
        """End every connection's work, whatever it waits for."""
        self._is_stopping = True
        tasks = list(self._writers)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _reply_to(self, request: RecordedRequest) -> Reply:
        if callable(self._replies):
            return self._replies(request)
        number = len(self.requests) - 1
        if number < len(self._replies):
            return self._replies[number]
        return error_reply(501, {"error": {"message": f"the test has no reply {number + 1}"}})

    async def _answer(self, reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for step in reply.before_headers:
            await self._take(step, reader, writer, is_body=False)
        headers = {**reply.headers, "transfer-encoding": "chunked"}
        lines = [f"HTTP/1.1 {reply.status} Scripted", *(f"{name}: {value}" for name, value in headers.items())]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        for step in reply.steps:
            await self._take(step, reader, writer, is_body=True)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _take(
        self, step: Step, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_body: bool
    ) -> None:
        match step:
            case bytes():
                if step:
                    writer.write(b"%x\r\n%s\r\n" % (len(step), step) if is_body else step)
                    await writer.drain()
            case Pause():
                await asyncio.sleep(step.seconds)
            case WaitFor():
                await step.event.wait()
            case Hang():
                await writer.drain()
                await reader.read(1)
                self.disconnects += 1
                self.client_left.set()
                raise _ConnectionOverError
            case Reset():
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                raise _ConnectionOverError
            case CloseUnfinished():
                await writer.drain()
                raise _ConnectionOverError


@contextlib.asynccontextmanager
async def scripted_provider(
    replies: Sequence[Reply] | Callable[[RecordedRequest], Reply],
) -> AsyncIterator[ScriptedProvider]:
    """Serve the replies on a free port of 127.0.0.1; `base_url` ends with /v1."""
    provider = ScriptedProvider(replies)
    server = await asyncio.start_server(provider.handle, "127.0.0.1", 0, limit=2**20)
    provider.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield provider
    finally:
        server.close()
        await provider.stop()
        await server.wait_closed()


@contextlib.contextmanager
def silent_listener() -> Any:
    """Yield the address of a port at which connecting neither succeeds nor fails: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


async def _read_request(reader: asyncio.StreamReader) -> RecordedRequest | None:
    """Return the next request of a connection, or None at its end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    request_line, *header_lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = request_line.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in header_lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return RecordedRequest(method=method, path=path, headers=headers, body=body)
