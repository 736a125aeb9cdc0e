"""Client tokens: only hashes of their secrets are kept. Functions run on the writer's or a reader's thread."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Final

from harness.clock import timestamp
from harness.errors import AlreadyExistsError, NotFoundError
from harness.session_store import records, validation
from harness.session_store.sql.reads import page_number
from harness.session_store.sql.sql import Connection, Reader
from harness.session_store.sql.watches import Hub
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

TOPIC: Final = "tokens/"
"""What watchers of tokens wait for; the slash is in no session's ID."""

_DEFAULT_PAGE: Final = 50
_MAX_PAGE: Final = 500
_NEXT_CHANGE: Final = "(SELECT coalesce(max(change_number), 0) + 1 FROM tokens)"


def check(request: store_pb2.CreateTokenRequest) -> None:
    """Check a token to make: INVALID_TOKEN, INVALID_SESSION_ID, INVALID_TIME."""
    validation.check_request_id(request.request_id, "request_id")
    rights = request.token.rights
    if not rights or store_pb2.RIGHT_UNSPECIFIED in rights:
        validation.refuse("INVALID_TOKEN", "token.rights", "must name at least one right")
    if (store_pb2.RIGHT_OPERATE in rights) != bool(request.token.manager_name):
        validation.refuse("INVALID_TOKEN", "token.manager_name", "must be set with RIGHT_OPERATE and only then")
    if request.token.session_prefix:
        # What begins a session's ID is itself one. Any other would let in nobody, and look as if it did.
        validation.check_session_id(request.token.session_prefix, "token.session_prefix")
    validation.check_timestamp(request.token.expire_time, "token.expire_time")


def create(
    connection: Connection, request: store_pb2.CreateTokenRequest, token_id: str, secret: str, now: datetime
) -> store_pb2.CreateTokenResponse:
    """Make a token whose secret is answered once."""
    token = store_pb2.Token()
    token.CopyFrom(request.token)
    token.token_id = token_id
    token.create_time.CopyFrom(timestamp(now))
    token.ClearField("revoke_time")
    if connection.execute("SELECT 1 FROM tokens WHERE request_id = ?", (request.request_id,)).fetchone():
        raise AlreadyExistsError(
            f"request {request.request_id!r} has made a token; its secret is not kept: make another",
            reason="TOKEN_EXISTS",
            metadata={"request_id": request.request_id},
        )
    connection.execute(
        "INSERT INTO tokens (token_id, request_id, change_number, secret_sha256, record)"
        f" VALUES (?, ?, {_NEXT_CHANGE}, ?, ?)",
        (token_id, request.request_id, hashlib.sha256(secret.encode()).digest(), token.SerializeToString()),
    )
    return store_pb2.CreateTokenResponse(token=token, secret=secret)


def list_page(connection: Connection, request: store_pb2.ListTokensRequest) -> store_pb2.ListTokensResponse:
    """Return a page of tokens, the oldest first."""
    size = min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE)
    found = connection.execute(
        "SELECT token_key, record FROM tokens WHERE token_key > ? ORDER BY token_key LIMIT ?",
        (page_number(request.page_token), size + 1),
    ).fetchall()
    response = store_pb2.ListTokensResponse(tokens=[_decode(record) for _, record in found[:size]])
    if len(found) > size:
        response.next_page_token = str(found[size - 1][0])
    return response


def revoke(connection: Connection, token_id: str, now: datetime) -> store_pb2.RevokeTokenResponse:
    """Revoke a token; one that is revoked stays as it is."""
    found = connection.execute("SELECT record FROM tokens WHERE token_id = ?", (token_id,)).fetchone()
    if found is None:
        raise NotFoundError(
            f"token {token_id[:140]!r} does not exist",
            reason="TOKEN_NOT_FOUND",
            metadata={"token_id": token_id[:140]},
        )
    token = _decode(found[0])
    if not token.HasField("revoke_time"):
        token.revoke_time.CopyFrom(timestamp(now))
        connection.execute(
            f"UPDATE tokens SET record = ?, change_number = {_NEXT_CHANGE} WHERE token_id = ?",
            (token.SerializeToString(), token_id),
        )
    return store_pb2.RevokeTokenResponse(token=token)


async def watch(readers: Reader, hub: Hub, now: datetime) -> AsyncIterator[store_pb2.WatchTokensResponse]:
    """Yield the tokens that are valid now, then each change."""
    with hub.subscribe(TOPIC) as changed:
        last_change = 0
        is_current = False
        while True:
            changed.clear()
            found = await readers.read(partial(_changes_behind, change_number=last_change))
            last_change = found[-1][0] if found else last_change
            changes = [
                store_pb2.TokenChange(token=_decode(record), secret_sha256=secret)
                for _, secret, record in found
                if is_current or _is_valid(_decode(record), now)
            ]
            has_all = len(found) < _MAX_PAGE
            if changes or (has_all and not is_current):
                is_current = is_current or has_all
                yield store_pb2.WatchTokensResponse(changes=changes, is_current=is_current)
            if has_all:
                await hub.wait(changed)


def _changes_behind(connection: Connection, change_number: int) -> list[tuple[int, bytes, bytes]]:
    return connection.execute(
        "SELECT change_number, secret_sha256, record FROM tokens WHERE change_number > ?"
        " ORDER BY change_number LIMIT ?",
        (change_number, _MAX_PAGE),
    ).fetchall()


def _is_valid(token: store_pb2.Token, now: datetime) -> bool:
    is_over = token.HasField("expire_time") and token.expire_time.ToDatetime(tzinfo=UTC) <= now
    return not token.HasField("revoke_time") and not is_over


def _decode(record: bytes) -> store_pb2.Token:
    return records.decode(store_pb2.Token, record, "a token")
