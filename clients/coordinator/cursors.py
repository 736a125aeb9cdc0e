"""Where a stream goes on after a break, so that nothing is lost and nothing comes twice. Pure: no network, no time."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeVar

from harness.operations import is_terminal
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

RequestT_co = TypeVar("RequestT_co", covariant=True)
ResponseT = TypeVar("ResponseT")


class Cursor(Protocol[RequestT_co, ResponseT]):
    """Knows what of one stream has been handed over."""

    has_last_message: ClassVar[bool]
    """True where a stream that ends without its last message was broken off."""

    @property
    def request(self) -> RequestT_co:
        """What to ask for now: what is missing."""
        ...

    @property
    def is_end(self) -> bool:
        """True once nothing can follow."""
        ...

    def take(self, response: ResponseT) -> ResponseT | None:
        """Note a response and return what of it is new; None where nothing is."""
        ...


class WatchCursor:
    """A watch of a session: goes on behind its last revision. Deltas that fall into a break are lost.

    Output of commands that run is sent anew after a break; what of it was handed over is left out.
    """

    has_last_message: ClassVar[bool] = True

    def __init__(self, request: coordinator_pb2.WatchSessionRequest) -> None:
        """Begin where `request` says; it is not changed."""
        self._request = coordinator_pb2.WatchSessionRequest()
        self._request.CopyFrom(request)
        self._has_begun = False
        self._was_current = False
        self._output_bytes: dict[tuple[str, int], int] = {}
        self.is_end = False

    @property
    def request(self) -> coordinator_pb2.WatchSessionRequest:
        """What to ask for now."""
        return self._request

    def take(self, response: coordinator_pb2.WatchSessionResponse) -> coordinator_pb2.WatchSessionResponse | None:
        """Note a response; None for the empty change that begins a resumed watch."""
        if response.HasField("rest_reached"):
            self.is_end = True
        if response.HasField("output_delta"):
            return self._new_output(response)
        if not response.HasField("change"):
            return response
        change = response.change
        for operation in change.operations:
            if is_terminal(operation):
                self._forget_output(operation.operation_id)
        is_known = self._has_begun and self._says_nothing_new(change)
        self._has_begun = True
        self._was_current = change.is_current
        self.is_end = change.is_deleted
        self._request.after_revision = max(change.revision, self._request.after_revision)
        return None if is_known else response

    def _new_output(
        self, response: coordinator_pb2.WatchSessionResponse
    ) -> coordinator_pb2.WatchSessionResponse | None:
        delta = response.output_delta
        key = (delta.operation_id, delta.stream)
        known, end = self._output_bytes.get(key, 0), delta.offset + len(delta.data)
        if end <= known and delta.data:
            return None
        self._output_bytes[key] = max(known, end)
        if delta.offset >= known:
            return response
        fresh = coordinator_pb2.WatchSessionResponse()
        fresh.CopyFrom(response)
        fresh.output_delta.offset = known
        fresh.output_delta.data = delta.data[known - delta.offset :]
        return fresh

    def _forget_output(self, operation_id: str) -> None:
        for key in [key for key in self._output_bytes if key[0] == operation_id]:
            del self._output_bytes[key]

    def _says_nothing_new(self, change: store_pb2.WatchSessionResponse) -> bool:
        if change.items or change.operations or change.is_deleted:
            return False
        # That there is no more, and how the session rests, may be news where the break fell between two pages.
        is_news = change.is_current and not self._was_current
        return change.revision <= self._request.after_revision and not is_news


class OutputCursor:
    """An operation's output: goes on behind the last byte."""

    has_last_message: ClassVar[bool] = False

    def __init__(self, request: coordinator_pb2.ReadOutputRequest) -> None:
        """Begin where `request` says; it is not changed."""
        self._request = coordinator_pb2.ReadOutputRequest()
        self._request.CopyFrom(request)
        self.is_end = False

    @property
    def request(self) -> coordinator_pb2.ReadOutputRequest:
        """What to ask for now."""
        return self._request

    def take(self, response: coordinator_pb2.ReadOutputResponse) -> coordinator_pb2.ReadOutputResponse | None:
        """Note a piece."""
        piece, wanted = response.piece, self._request.request
        wanted.offset = piece.offset + len(piece.data)
        wanted.tail_bytes = 0
        self.is_end = piece.is_end
        if wanted.limit_bytes:
            # 0 would ask for all there is.
            self.is_end = self.is_end or len(piece.data) >= wanted.limit_bytes
            wanted.limit_bytes = max(1, wanted.limit_bytes - len(piece.data))
        return response


class BlobCursor:
    """A blob: asked for anew from its beginning, of which what was handed over is left out."""

    has_last_message: ClassVar[bool] = True

    def __init__(self, request: coordinator_pb2.GetBlobRequest) -> None:
        """Begin at the beginning."""
        self._request = request
        self._handed_over_bytes = 0
        self._to_skip_bytes = 0
        self._size_bytes: int | None = None

    @property
    def request(self) -> coordinator_pb2.GetBlobRequest:
        """What to ask for now; the next response is the blob's first."""
        self._to_skip_bytes = self._handed_over_bytes
        return self._request

    @property
    def is_end(self) -> bool:
        """True once every byte has been handed over."""
        return self._size_bytes is not None and self._handed_over_bytes >= self._size_bytes

    def take(self, response: coordinator_pb2.GetBlobResponse) -> coordinator_pb2.GetBlobResponse | None:
        """Note a piece and return what of it is new."""
        piece = response.piece
        is_first = self._size_bytes is None
        if piece.HasField("blob"):
            self._size_bytes = piece.blob.size_bytes
        skipped = min(self._to_skip_bytes, len(piece.data))
        self._to_skip_bytes -= skipped
        self._handed_over_bytes += len(piece.data) - skipped
        if is_first or not skipped:
            return response
        if skipped == len(piece.data):
            return None
        return coordinator_pb2.GetBlobResponse(piece=store_pb2.GetBlobResponse(data=piece.data[skipped:]))
