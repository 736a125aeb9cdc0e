"""Where a broken stream goes on: every durable change once, every byte once."""

from __future__ import annotations

import pytest

from clients.coordinator.cursors import BlobCursor, OutputCursor, WatchCursor
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


def watching(after: int = 0) -> WatchCursor:
    return WatchCursor(coordinator_pb2.WatchSessionRequest(session_id="s1", after_revision=after, until_idle=True))


def change(revision: int, *sequences: int, is_current: bool = True) -> coordinator_pb2.WatchSessionResponse:
    items = [item_pb2.Item(sequence=sequence) for sequence in sequences]
    return coordinator_pb2.WatchSessionResponse(
        change=store_pb2.WatchSessionResponse(revision=revision, items=items, is_current=is_current)
    )


def test_a_watch_goes_on_behind_its_last_revision() -> None:
    cursor = watching(after=2)
    assert cursor.request.after_revision == 2
    assert cursor.take(change(5, 3, 4)) == change(5, 3, 4)
    assert cursor.request == coordinator_pb2.WatchSessionRequest(session_id="s1", after_revision=5, until_idle=True)


def test_the_request_of_the_caller_stays_as_it_is() -> None:
    request = coordinator_pb2.WatchSessionRequest(session_id="s1")
    WatchCursor(request).take(change(5, 3))
    assert request == coordinator_pb2.WatchSessionRequest(session_id="s1")


def test_the_empty_change_that_begins_a_resumed_watch_is_no_news() -> None:
    cursor = watching()
    cursor.take(change(5, 1))
    assert cursor.take(change(5)) is None
    assert cursor.take(change(6, 2)) == change(6, 2)


def test_the_first_change_is_news_although_it_is_empty() -> None:
    assert watching(after=5).take(change(5)) == change(5)


def test_that_there_is_no_more_is_news_where_it_was_not_said() -> None:
    cursor = watching()
    cursor.take(change(5, 1, is_current=False))
    assert cursor.take(change(5)) == change(5)
    assert cursor.take(change(5)) is None


@pytest.mark.parametrize(
    "last",
    [
        coordinator_pb2.WatchSessionResponse(rest_reached=coordinator_pb2.RestReached(revision=5)),
        coordinator_pb2.WatchSessionResponse(change=store_pb2.WatchSessionResponse(revision=5, is_deleted=True)),
    ],
)
def test_rest_and_deletion_end_a_watch(last: coordinator_pb2.WatchSessionResponse) -> None:
    cursor = watching()
    cursor.take(change(5, 1))
    assert not cursor.is_end
    assert cursor.take(last) == last
    assert cursor.is_end


def test_output_goes_on_behind_its_last_byte() -> None:
    wish = manager_pb2.ReadOutputRequest(operation_id="o1", tail_bytes=-10, limit_bytes=8, follow=True)
    cursor = OutputCursor(coordinator_pb2.ReadOutputRequest(session_id="s1", request=wish))
    cursor.take(coordinator_pb2.ReadOutputResponse(piece=manager_pb2.ReadOutputResponse(offset=90, data=b"abc")))
    rest = manager_pb2.ReadOutputRequest(operation_id="o1", offset=93, limit_bytes=5, follow=True)
    assert cursor.request == coordinator_pb2.ReadOutputRequest(session_id="s1", request=rest)
    assert not cursor.is_end
    cursor.take(coordinator_pb2.ReadOutputResponse(piece=manager_pb2.ReadOutputResponse(offset=93, data=b"defgh")))
    assert cursor.is_end


def test_a_blob_is_handed_over_once_wherever_it_breaks() -> None:
    data = bytes(range(10))
    for first_break in range(10):
        cursor = BlobCursor(coordinator_pb2.GetBlobRequest())
        taken = b""
        for attempt in (data[:first_break], data):
            assert cursor.request == coordinator_pb2.GetBlobRequest()
            for start in range(0, len(attempt), 3):
                fresh = cursor.take(_piece(attempt[start : start + 3], size=10 if start == 0 else None))
                taken += fresh.piece.data if fresh is not None else b""
        assert taken == data
        assert cursor.is_end


def test_an_empty_blob_is_whole_with_its_first_piece() -> None:
    cursor = BlobCursor(coordinator_pb2.GetBlobRequest())
    assert cursor.request == coordinator_pb2.GetBlobRequest()
    assert cursor.take(_piece(b"", size=0)) == _piece(b"", size=0)
    assert cursor.is_end


def _piece(data: bytes, *, size: int | None) -> coordinator_pb2.GetBlobResponse:
    blob = llm_pb2.BlobRef(size_bytes=size) if size is not None else None
    return coordinator_pb2.GetBlobResponse(piece=store_pb2.GetBlobResponse(blob=blob, data=data))


def printed(offset: int, data: bytes, operation_id: str = "o1") -> coordinator_pb2.WatchSessionResponse:
    delta = coordinator_pb2.OutputDelta(
        operation_id=operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT, offset=offset, data=data
    )
    return coordinator_pb2.WatchSessionResponse(output_delta=delta)


def test_output_that_is_sent_again_after_a_break_comes_once() -> None:
    cursor = watching()
    assert cursor.take(printed(0, b"one")) == printed(0, b"one")
    assert cursor.take(printed(0, b"on")) is None
    assert cursor.take(printed(0, b"one two")) == printed(3, b" two")
    assert cursor.take(printed(9, b"gap")) == printed(9, b"gap")
    assert cursor.take(printed(0, b"other", "o2")) == printed(0, b"other", "o2")
