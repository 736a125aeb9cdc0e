"""Large messages and histories: they go through whole, or are refused with their bound before anything is sent."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clients.session_store import RemoteSessionStore
from harness.errors import InvalidArgumentError
from harness.session_store import get_blob_bytes, put_blob_bytes
from tests.support.session_records import items_of, new_session, text_input
from tests.support.store_service import served_sqlite
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

MIB = 1024 * 1024


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[RemoteSessionStore]:
    async with served_sqlite(tmp_path) as server, RemoteSessionStore(server.addresses[0]) as remote:
        yield remote


@pytest.mark.parametrize(
    "size_bytes", [4_194_303, 4_194_304, 4_194_305, 5 * MIB, 12 * MIB, 31 * MIB], ids=lambda size: f"{size}"
)
async def test_a_large_item_goes_to_the_store_and_comes_back(store: RemoteSessionStore, size_bytes: int) -> None:
    author = await new_session(store)
    await author.commit(text_input("large", "x" * size_bytes))
    (item,) = await items_of(store, "s")
    assert len(item.input.content.parts[0].text.text) == size_bytes
    watch = aiter(store.watch_session(store_pb2.WatchSessionRequest(session_id="s")))
    assert [item] == list((await anext(watch)).items)
    await watch.aclose()  # type: ignore[attr-defined]  # an async generator


async def test_a_commit_over_the_bound_is_refused_and_others_on_the_stream_go_on(store: RemoteSessionStore) -> None:
    author, other = await new_session(store, "s"), await new_session(store, "other")
    with pytest.raises(InvalidArgumentError) as caught:
        await author.commit(text_input("large", "x" * (32 * MIB)))
    assert caught.value.reason == "COMMIT_TOO_LARGE"
    await other.commit(text_input("i"))
    await author.send(author.request(text_input("small")))


async def test_a_long_history_comes_in_pages(store: RemoteSessionStore) -> None:
    author = await new_session(store)
    for number in range(24):
        await author.commit(*(text_input(f"i{number}-{index}", "x" * 500_000) for index in range(4)))
    items = await items_of(store, "s")
    assert [item.sequence for item in items] == list(range(1, 97))
    assert sum(item.ByteSize() for item in items) > 45 * MIB


async def test_a_blob_of_12_mib_goes_in_pieces(store: RemoteSessionStore) -> None:
    await new_session(store)
    data = bytes(range(256)) * (12 * MIB // 256)
    blob = llm_pb2.BlobRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data), media_type="image/png")
    await put_blob_bytes(store, "s", blob, data)
    assert await get_blob_bytes(store, "s", blob.digest) == data


async def test_a_failing_source_of_an_upload_tells_its_own_error(store: RemoteSessionStore) -> None:
    await new_session(store)

    async def frames() -> AsyncIterator[store_pb2.PutBlobRequest]:
        blob = llm_pb2.BlobRef(digest="0" * 64, size_bytes=10, media_type="text/plain")
        yield store_pb2.PutBlobRequest(session_id="s", blob=blob, data=b"12345")
        raise InvalidArgumentError("the client's own stream broke", reason="BROKEN")

    with pytest.raises(InvalidArgumentError) as caught:
        await store.put_blob(frames())
    assert caught.value.reason == "BROKEN"
