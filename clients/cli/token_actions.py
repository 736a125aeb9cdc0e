"""What the commands about tokens do, over a session store; each prints, and returns the exit code."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from clients._rpc.tls import ClientTls
from clients.cli.failures import CommandError
from clients.cli.jsonl_display import json_line
from clients.cli.tables import ago, print_table
from clients.session_store.remote_session_store import RemoteSessionStore
from harness.clock import instant, timestamp
from harness.errors import DeadlineExceededError, UnavailableError
from harness.session_store import SessionStore
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

PATIENCE_S = 5.0
"""How long a store that is not there is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWish:
    """Which token to make."""

    label: str
    prefix: str
    rights: tuple[str, ...]
    manager: str
    days: float | None
    """None: for ever."""


def with_store(store: tuple[str, ClientTls | None], action: Callable[[SessionStore], Awaitable[int]]) -> int:
    """Do something with the tokens of a store at an address."""
    return asyncio.run(_with_store(*store, action))


async def _with_store(address: str, tls: ClientTls | None, action: Callable[[SessionStore], Awaitable[int]]) -> int:
    async with RemoteSessionStore(address, tls=tls, timeout_s=PATIENCE_S) as store:
        try:
            return await action(store)
        except (UnavailableError, DeadlineExceededError) as error:
            raise CommandError(
                f"no session store answers at {address}",
                "Start one: unreal-agent serve all. Or name another with --session-store or --state-dir.",
            ) from error


async def create(store: SessionStore, wish: TokenWish) -> int:
    """Make a token; its secret alone goes to standard output."""
    token = store_pb2.Token(
        label=wish.label,
        session_prefix=wish.prefix,
        rights=[store_pb2.Right.Value(f"RIGHT_{right.upper()}") for right in dict.fromkeys(wish.rights)],
        manager_name=wish.manager,
    )
    if wish.days is not None:
        token.expire_time.CopyFrom(timestamp(datetime.now(UTC) + timedelta(days=wish.days)))
    made = await store.create_token(store_pb2.CreateTokenRequest(request_id=uuid.uuid4().hex, token=token))
    print(
        f"Token {made.token.token_id}: {_scope(made.token)}. Keep its secret, it is not shown again:", file=sys.stderr
    )
    print(made.secret)
    return 0


async def list_all(store: SessionStore, output: str) -> int:
    """Print the tokens, the oldest first."""
    found = [token async for token in _all(store)]
    if output == "jsonl":
        for token in found:
            print(json_line(token))
        return 0
    if not found:
        print("No tokens yet. Make one: unreal-agent tokens create")
        return 0
    now = datetime.now(UTC)
    rows = [
        (token.token_id, _state(token, now), _scope(token), ago(token.create_time, now), token.label) for token in found
    ]
    print_table(("token", "state", "for", "made", "label"), rows)
    return 0


async def revoke(store: SessionStore, token_id: str) -> int:
    """Revoke a token."""
    await store.revoke_token(store_pb2.RevokeTokenRequest(token_id=token_id))
    print(f"Token {token_id} is revoked.")
    return 0


async def _all(store: SessionStore) -> AsyncIterator[store_pb2.Token]:
    request = store_pb2.ListTokensRequest(page_size=500)
    while True:
        page = await store.list_tokens(request)
        for token in page.tokens:
            yield token
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _scope(token: store_pb2.Token) -> str:
    rights = ", ".join(store_pb2.Right.Name(right).removeprefix("RIGHT_").lower() for right in token.rights)
    if token.manager_name:
        return f"{rights} as manager {token.manager_name}"
    return f"{rights} on {token.session_prefix}*" if token.session_prefix else f"{rights} on all sessions"


def _state(token: store_pb2.Token, now: datetime) -> str:
    if token.HasField("revoke_time"):
        return "revoked"
    if not token.HasField("expire_time"):
        return "valid"
    end = instant(token.expire_time)
    return "expired" if end <= now else f"valid until {end.astimezone():%Y-%m-%d %H:%M}"
