"""A link to an operation manager that breaks when it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from google.protobuf.message import Message

from clients.operation_manager.links import Link, Method, RequestT, ResponseT
from harness.errors import UnavailableError
from harness.primitives.streams import closing


class CuttingLink:
    """Passes everything on to another link, which is closed with this one."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.cuts: list[int] = []
        """After how many messages each of the next streams is cut; later ones are left alone."""

        self.requests: list[Message] = []
        """Those of all streams."""

    async def call(self, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        return await self._link.call(method, request, timeout_s=timeout_s)

    async def stream(self, method: Method[RequestT, ResponseT], request: RequestT) -> AsyncIterator[ResponseT]:
        self.requests.append(request)
        left = self.cuts.pop(0) if self.cuts else None
        async with closing(self._link.stream(method, request)) as responses:
            async for response in responses:
                if left == 0:
                    break
                yield response
                left = None if left is None else left - 1
            else:
                return
        raise UnavailableError("the test cut the link", reason="CONNECTION_LOST")

    def exchange(self, method: Method[Any, ResponseT], requests: AsyncIterator[Any]) -> AsyncIterator[ResponseT]:
        return self._link.exchange(method, requests)

    async def aclose(self) -> None:
        await self._link.aclose()
