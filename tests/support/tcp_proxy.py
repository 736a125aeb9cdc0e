"""A cable for machines without network namespaces: a TCP proxy that holds back, delays and stalls what goes through."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

_CHUNK_BYTES: Final = 1400
_RETRANSMIT_S: Final = 0.25


class TcpCable:
    """Carries connections to one address on to another while `plugged_in` runs."""

    def __init__(self, dialler: str, listener: str, entry: tuple[str, int], exit_: tuple[str, int]) -> None:
        self._dialler, self._listener = dialler, listener
        self._entry, self._exit = entry, exit_
        self._open = {dialler: asyncio.Event(), listener: asyncio.Event()}
        self._random = random.Random(1)
        self._connections: set[asyncio.Task[None]] = set()
        self.loss = 0.0
        self.delay_s = 0.0
        self.lost = 0
        self.mend()

    def cut(self, *, toward: str | None = None) -> None:
        """Hold everything back, or only what goes toward one host."""
        for name, is_open in self._open.items():
            if toward in (None, name):
                is_open.clear()

    def mend(self) -> None:
        """Carry on: TCP would send again what was dropped."""
        for is_open in self._open.values():
            is_open.set()

    @asynccontextmanager
    async def plugged_in(self) -> AsyncIterator[None]:
        """Carry connections while the block runs."""
        server = await asyncio.start_server(self._connected, *self._entry)
        try:
            yield
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._open[self._listener].wait()
            far_reader, far_writer = await asyncio.open_connection(*self._exit)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._carry(reader, far_writer, toward=self._listener))
                    tasks.create_task(self._carry(far_reader, writer, toward=self._dialler))
            finally:
                far_writer.close()
        except* (OSError, EOFError):
            pass  # as seen by the other end too, which is closed now
        finally:
            writer.close()
            self._connections.discard(task)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, toward: str) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self._random.random() < self.loss:
                self.lost += 1
                await asyncio.sleep(_RETRANSMIT_S)
            await self._open[toward].wait()
            writer.write(chunk)
            await writer.drain()
        raise EOFError
