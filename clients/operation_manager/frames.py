"""Frames of an attached manager's stream: which field carries which method, in what order, within which credit.

Both ends use it. Pure but for waiting; knows no gRPC.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import Message

from clients.operation_manager import links
from clients.operation_manager.links import Method
from harness.errors import ResourceExhaustedError

CALL_CREDIT_BYTES: Final = 512 * 1024
"""What either side may send on a call before the other has taken any of it. A message larger than the rest of a credit
goes once, so that none is too large to go at all."""

METHODS: Final[Mapping[str, Method[Any, Any]]] = {
    "get_server_info": links.GET_SERVER_INFO,
    "add_operations": links.ADD_OPERATIONS,
    "cancel_operation": links.CANCEL_OPERATION,
    "get_operation": links.GET_OPERATION,
    "list_operations": links.LIST_OPERATIONS,
    "watch_operations": links.WATCH_OPERATIONS,
    "acknowledge_updates": links.ACKNOWLEDGE_UPDATES,
    "read_output": links.READ_OUTPUT,
    "upload_workspace": links.UPLOAD_WORKSPACE,
    "download_workspace": links.DOWNLOAD_WORKSPACE,
}
"""The method of each field of a frame."""

FIELDS: Final[Mapping[str, str]] = {method.name: field for field, method in METHODS.items()}

BULK: Final = frozenset({"read_output", "upload_workspace", "download_workspace"})
"""Fields that wait for all others: updates go before output."""

FrameT = TypeVar("FrameT", bound=Message)

_FRAME_BYTES: Final = 64


def weight(message: Message) -> int:
    """Return what a message costs of its call's credit: an empty one is not free."""
    return message.ByteSize() + _FRAME_BYTES


class Outbox(Generic[FrameT]):
    """Frames that wait to be written to the stream, the urgent ones first.

    What it holds is bounded by the callers: urgent frames answer something, bulk goes within the credit of its call.
    """

    def __init__(self) -> None:
        self._urgent: deque[FrameT] = deque()
        self._bulk: deque[FrameT] = deque()
        self._has_frames = asyncio.Event()
        self._end: Exception | None = None

    def put(self, frame: FrameT, *, is_bulk: bool = False) -> None:
        """Queue a frame."""
        (self._bulk if is_bulk else self._urgent).append(frame)
        self._has_frames.set()

    def end(self, failure: Exception) -> None:
        """Let nothing more be written: the stream is over, and whoever writes it hears why. The first end counts."""
        self._end = self._end or failure
        self._has_frames.set()

    async def frames(self) -> AsyncGenerator[FrameT, None]:
        """Yield frames in the order in which they are to be written, until `end`; then raise its failure."""
        while True:
            while self._end is None and (self._urgent or self._bulk):
                yield (self._urgent or self._bulk).popleft()
            if self._end is not None:
                raise self._end
            self._has_frames.clear()
            await self._has_frames.wait()


class Allowance:
    """The credit that one side has on a call."""

    def __init__(self) -> None:
        self._bytes = CALL_CREDIT_BYTES
        self._has_credit = asyncio.Event()
        self._has_credit.set()

    def grant(self, size_bytes: int) -> None:
        """Take in that the other side took so much; never beyond what a call begins with, whatever it says."""
        self._bytes = min(self._bytes + size_bytes, CALL_CREDIT_BYTES)
        if self._bytes > 0:
            self._has_credit.set()

    async def spend(self, size_bytes: int) -> None:
        """Return once a message of this size may go."""
        await self._has_credit.wait()
        self._bytes -= size_bytes
        if self._bytes <= 0:
            self._has_credit.clear()


class Inbox(Generic[FrameT]):
    """Messages of a call that came and were not taken; holds no more than the credit that was granted."""

    def __init__(self) -> None:
        self._messages: deque[FrameT] = deque()
        self._held_bytes = 0
        self._failure: Exception | None = None
        self._is_ended = False
        self._changed = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        """Whether nothing more comes."""
        return self._is_ended

    def put(self, message: FrameT) -> None:
        """Add a message.

        Raises:
            ResourceExhaustedError: CREDIT_EXCEEDED, the other side sends more than it may.
        """
        if self._held_bytes >= CALL_CREDIT_BYTES:
            raise ResourceExhaustedError(
                f"a call was sent more than its credit of {CALL_CREDIT_BYTES} bytes", reason="CREDIT_EXCEEDED"
            )
        self._messages.append(message)
        self._held_bytes += weight(message)
        self._changed.set()

    def end(self, failure: Exception | None = None) -> None:
        """Let readers have what came, then the end, or the failure. The first end counts."""
        if not self._is_ended:
            self._is_ended, self._failure = True, failure
            self._changed.set()

    async def messages(self) -> AsyncGenerator[FrameT, None]:
        """Yield messages until the end; raise the failure."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                self._held_bytes -= weight(message)
                yield message
            if self._is_ended:
                if self._failure is not None:
                    raise self._failure
                return
            self._changed.clear()
            await self._changed.wait()
