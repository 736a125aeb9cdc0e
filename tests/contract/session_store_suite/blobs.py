"""What every session store does with blobs and tokens. Needs a fixture `store`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable

import pytest

from harness.errors import AlreadyExistsError, FailedPreconditionError, InvalidArgumentError, NotFoundError
from harness.session_store import BLOB_CHUNK_BYTES, SessionStore, get_blob_bytes, put_blob_bytes
from tests.support.session_records import blob_of, blob_part, new_session, session_of, text_input
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


@pytest.mark.parametrize("size", [0, 1, BLOB_CHUNK_BYTES, BLOB_CHUNK_BYTES * 2 + 1])
async def test_blob_comes_back_as_it_was_put(store: SessionStore, size: int) -> None:
    author = await new_session(store)
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    blob = await author.put(data)
    assert await author.put(data) == blob
    frames = [frame async for frame in store.get_blob(store_pb2.GetBlobRequest(session_id="s", digest=blob.digest))]
    assert b"".join(frame.data for frame in frames) == data
    assert frames[0].blob == blob
    assert all(len(frame.data) <= BLOB_CHUNK_BYTES for frame in frames)


async def send(frames: Iterable[store_pb2.PutBlobRequest]) -> AsyncIterator[store_pb2.PutBlobRequest]:
    for frame in frames:
        yield frame


async def test_blob_in_odd_frames_comes_back_whole(store: SessionStore) -> None:
    await new_session(store)
    data = bytes(1000) * 700
    frames = [store_pb2.PutBlobRequest(session_id="s", blob=blob_of(data))]
    frames += [store_pb2.PutBlobRequest(data=data[start : start + 999]) for start in range(0, len(data), 999)]
    await store.put_blob(send(frames))
    assert await get_blob_bytes(store, "s", blob_of(data).digest) == data


async def test_content_that_does_not_fit_its_reference_is_refused(store: SessionStore) -> None:
    await new_session(store)
    wrong_digest, wrong_size = blob_of(b"abc"), blob_of(b"abc")
    wrong_digest.digest = blob_of(b"abd").digest
    wrong_size.size_bytes = 2
    for blob in (wrong_digest, wrong_size):
        with pytest.raises(InvalidArgumentError) as caught:
            await put_blob_bytes(store, "s", blob, b"abc")
        assert caught.value.reason == "DIGEST_MISMATCH"
        with pytest.raises(NotFoundError) as missing:
            await get_blob_bytes(store, "s", blob.digest)
        assert missing.value.reason == "BLOB_NOT_FOUND"


async def test_blob_belongs_to_its_session(store: SessionStore) -> None:
    author, _ = await new_session(store, "a"), await new_session(store, "b")
    blob = await author.put(b"mine")
    with pytest.raises(NotFoundError):
        await get_blob_bytes(store, "b", blob.digest)
    with pytest.raises(NotFoundError):
        await put_blob_bytes(store, "no", blob, b"mine")


async def test_commit_names_only_blobs_that_were_put(store: SessionStore) -> None:
    author = await new_session(store)
    blob = blob_of(b"image")
    for request in (
        author.request(text_input("i", "look", blob_part(blob))),
        author.request(text_input("i"), blobs=[blob]),
    ):
        with pytest.raises(FailedPreconditionError) as caught:
            await store.commit(request)
        assert caught.value.metadata["rule"] == "blob_is_put"
    assert (await session_of(store, "s")).revision == 0
    await author.put(b"image")
    await author.commit(text_input("i", "look", blob_part(blob)), blobs=[blob])
    await author.commit(text_input("i2", "again", blob_part(blob)))


async def test_image_bytes_are_not_stored_in_items(store: SessionStore) -> None:
    author = await new_session(store)
    part = blob_part(blob_of(b"image"))
    part.image.data = b"image"
    with pytest.raises(InvalidArgumentError):
        await author.commit(text_input("i", "look", part))


def token_request(request_id: str, *rights: store_pb2.Right.ValueType) -> store_pb2.CreateTokenRequest:
    token = store_pb2.Token(label="laptop", session_prefix="mine-", rights=rights or [store_pb2.RIGHT_READ])
    return store_pb2.CreateTokenRequest(request_id=request_id, token=token)


async def test_token_is_listed_without_its_secret_and_revoked(store: SessionStore) -> None:
    made = [await store.create_token(token_request(f"r{number}")) for number in range(3)]
    first = await store.list_tokens(store_pb2.ListTokensRequest(page_size=2))
    second = await store.list_tokens(store_pb2.ListTokensRequest(page_size=2, page_token=first.next_page_token))
    assert [*first.tokens, *second.tokens] == [one.token for one in made]
    assert not second.next_page_token
    revoke = store_pb2.RevokeTokenRequest(token_id=made[0].token.token_id)
    revoked = await store.revoke_token(revoke)
    assert revoked.token.HasField("revoke_time")
    assert await store.revoke_token(revoke) == revoked
    with pytest.raises(AlreadyExistsError):
        await store.create_token(token_request("r1"))
    with pytest.raises(NotFoundError):
        await store.revoke_token(store_pb2.RevokeTokenRequest(token_id="no"))


async def test_bad_token_is_refused(store: SessionStore) -> None:
    rightless = token_request("r")
    del rightless.token.rights[:]
    for request in (
        rightless,
        token_request("r", store_pb2.RIGHT_OPERATE),
        token_request("r", store_pb2.RIGHT_UNSPECIFIED),
        token_request(""),
    ):
        with pytest.raises(InvalidArgumentError):
            await store.create_token(request)


async def test_watcher_of_tokens_gets_the_valid_ones_then_changes(store: SessionStore) -> None:
    kept, gone = [await store.create_token(token_request(request_id)) for request_id in ("kept", "gone")]
    await store.revoke_token(store_pb2.RevokeTokenRequest(token_id=gone.token.token_id))
    watch = aiter(store.watch_tokens(store_pb2.WatchTokensRequest()))
    async with asyncio.timeout(10):
        first = await anext(watch)
        digest = hashlib.sha256(kept.secret.encode()).digest()
        assert first == store_pb2.WatchTokensResponse(
            changes=[store_pb2.TokenChange(token=kept.token, secret_sha256=digest)], is_current=True
        )
        revoked = await store.revoke_token(store_pb2.RevokeTokenRequest(token_id=kept.token.token_id))
        change = await anext(watch)
        assert [one.token for one in change.changes] == [revoked.token]
