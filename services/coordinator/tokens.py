"""Clients by their bearer tokens: which are valid, as the session store tells, and what each of them allows."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from clients._rpc.calls import pauses_s
from harness.clock import Clock, instant
from harness.errors import (
    DeadlineExceededError,
    HarnessError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from harness.primitives.streams import closing
from harness.session_store import SessionStore
from services._server.identity import Caller, CallFacts
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

logger = logging.getLogger(__name__)

READ: Final = store_pb2.RIGHT_READ
SUBMIT: Final = store_pb2.RIGHT_SUBMIT
CONTROL: Final = store_pb2.RIGHT_CONTROL
OPERATE: Final = store_pb2.RIGHT_OPERATE

RIGHT_FOR: Final[Mapping[str, store_pb2.Right.ValueType]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("WatchSession", "GetSession", "ListSessions", "BuildContext", "ListItems", "ListOperations"), READ
        ),
        **dict.fromkeys(("ReadOutput", "GetBlob", "ExportSession", "DownloadWorkspace"), READ),
        **dict.fromkeys(("CreateSession", "SubmitInput", "PutBlob", "ImportSession", "UploadWorkspace"), SUBMIT),
        **dict.fromkeys(("StopSession", "CancelOperation", "UpdateSettings", "RetryTurn"), CONTROL),
        **dict.fromkeys(("ForkSession", "DeleteSession"), CONTROL),
        "Attach": OPERATE,
    }
)
"""What a token must allow, by RPC; one that is not here is for any token (`GetServerInfo`, reflection)."""

_SESSION_FIELDS: Final = frozenset({"session_id", "parent_session_id"})

_SCHEME: Final = "Bearer "

_NEWS_WAIT_S: Final = 1.0
"""How long a token that is not known is waited for: it may have been made a moment ago."""


class TokenCaller:
    """A client that showed a valid token."""

    def __init__(self, token: store_pb2.Token, clock: Clock) -> None:
        self.token = token
        self._clock = clock
        self._ends: set[Callable[[HarnessError], None]] = set()
        self._gone: UnauthenticatedError | None = None

    def check(self, method: str, request: Message) -> None:
        """Refuse what the token does not allow: RIGHT_MISSING, SESSION_NOT_ALLOWED, TOKEN_EXPIRED, TOKEN_REVOKED."""
        self.check_valid()
        right = RIGHT_FOR.get(method)
        if right is not None and right not in self.token.rights:
            name = store_pb2.Right.Name(right).removeprefix("RIGHT_").lower()
            raise PermissionDeniedError(
                f"token {self.token.token_id!r} does not allow {method}: it lacks the right {name!r}",
                reason="RIGHT_MISSING",
                metadata={"right": name},
            )
        for session_id in _named_sessions(request):
            if not session_id.startswith(self.token.session_prefix):
                raise PermissionDeniedError(
                    f"token {self.token.token_id!r} is for sessions whose IDs begin with"
                    f" {self.token.session_prefix!r}, got {session_id[:140]!r}",
                    reason="SESSION_NOT_ALLOWED",
                    metadata={"session_prefix": self.token.session_prefix},
                )

    def check_valid(self) -> None:
        """Refuse a token that was valid once: TOKEN_EXPIRED, TOKEN_REVOKED."""
        if self._gone is not None:
            raise self._gone
        if self._remaining_s() <= 0:
            raise self._expired()

    @contextmanager
    def until_gone(self, end: Callable[[HarnessError], None]) -> Iterator[None]:
        """Call `end` when the token is revoked or expires during the block."""
        remaining_s = self._remaining_s()
        # A loop's timer is as long as the clock is; a far one is not worth having.
        timer = (
            asyncio.get_running_loop().call_later(remaining_s, lambda: end(self._expired()))
            if remaining_s < 86_400 * 365
            else None
        )
        self._ends.add(end)
        try:
            yield
        finally:
            self._ends.discard(end)
            if timer is not None:
                timer.cancel()

    def revoke(self) -> None:
        """Refuse it from now on, and end what runs for it."""
        self._gone = UnauthenticatedError(
            f"token {self.token.token_id!r} was revoked: ask for another", reason="TOKEN_REVOKED"
        )
        for end in tuple(self._ends):
            end(self._gone)

    def _remaining_s(self) -> float:
        if not self.token.HasField("expire_time"):
            return float("inf")
        return (instant(self.token.expire_time) - self._clock.now()).total_seconds()

    def _expired(self) -> UnauthenticatedError:
        return UnauthenticatedError(
            f"token {self.token.token_id!r} has expired: ask for another", reason="TOKEN_EXPIRED"
        )


class TokenTable:
    """The tokens that are valid, kept current by the store's watch; while the store is away, as it last told."""

    def __init__(self, store: SessionStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._callers: dict[bytes, TokenCaller] = {}
        self._is_current = False
        self._changed = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def open(cls, store: SessionStore, clock: Clock) -> AsyncIterator[TokenTable]:
        """Keep a table while the block runs. The store stays the caller's to close."""
        table = cls(store, clock)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(table._follow())
            try:
                yield table
            finally:
                following.cancel()

    async def identify(self, facts: CallFacts) -> Caller:
        """Return who calls; an identity hook.

        Raises:
            UnauthenticatedError: TOKEN_MISSING, TOKEN_UNKNOWN, TOKEN_REVOKED, TOKEN_EXPIRED.
            UnavailableError: TOKENS_UNKNOWN; the store is away, and has not told of this one.
        """
        digest = hashlib.sha256(_secret(facts.metadata).encode()).digest()
        with suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_WAIT_S):
                while digest not in self._callers:
                    await self._changed.wait()
        caller = self._callers.get(digest)
        if caller is not None:
            caller.check_valid()
            return caller
        if not self._is_current:
            raise UnavailableError(
                "the session store, which knows the tokens, can't be reached",
                reason="TOKENS_UNKNOWN",
                retry_after_s=_NEWS_WAIT_S,
            )
        raise UnauthenticatedError(
            "the token is not known here: make one with `unreal-agent tokens create`", reason="TOKEN_UNKNOWN"
        )

    async def _follow(self) -> None:
        pauses = pauses_s()
        while True:
            try:
                async with closing(self._store.watch_tokens(store_pb2.WatchTokensRequest())) as responses:
                    await self._take(responses)
            except (UnavailableError, DeadlineExceededError) as error:
                logger.warning("watch of tokens broke", extra={"reason": error.reason})
            finally:
                self._is_current = False
            await asyncio.sleep(next(pauses))

    async def _take(self, responses: AsyncIterator[store_pb2.WatchTokensResponse]) -> None:
        told: set[bytes] = set()
        async for response in responses:
            for change in response.changes:
                self._note(change)
                told.add(change.secret_sha256)
            if response.is_current and not self._is_current:
                self._is_current = True
                # Revoked while nobody told us: the store sends only those that are valid.
                for secret in self._callers.keys() - told:
                    self._callers[secret].revoke()
            self._changed.set()
            self._changed = asyncio.Event()

    def _note(self, change: store_pb2.TokenChange) -> None:
        caller = self._callers.get(change.secret_sha256)
        if caller is None:
            caller = self._callers[change.secret_sha256] = TokenCaller(change.token, self._clock)
        if change.token.HasField("revoke_time"):
            caller.revoke()


def _named_sessions(request: Message) -> Iterator[str]:
    """Yield the IDs by which a request names sessions; none where it leaves them out."""
    for path in _session_paths(request.DESCRIPTOR):
        found: Any = request
        for name in path:
            found = getattr(found, name)
        if found:
            yield found


@functools.cache
def _session_paths(descriptor: Descriptor) -> tuple[tuple[str, ...], ...]:
    """Return where a request names sessions, also within requests that it passes on. Records to import name none."""
    paths: list[tuple[str, ...]] = []
    for field in descriptor.fields:
        if field.is_repeated:
            continue
        if field.name in _SESSION_FIELDS:
            paths.append((field.name,))
        elif field.message_type is not None and field.message_type.full_name.endswith("Request"):
            paths += [(field.name, *path) for path in _session_paths(field.message_type)]
    return tuple(paths)


def _secret(metadata: Mapping[str, Any]) -> str:
    value = metadata.get("authorization", "")
    if not isinstance(value, str) or not value.startswith(_SCHEME) or len(value) == len(_SCHEME):
        raise UnauthenticatedError(
            "the call has no token: set UNREAL_AGENT_TOKEN, or send the metadata 'authorization: Bearer TOKEN'",
            reason="TOKEN_MISSING",
        )
    return value.removeprefix(_SCHEME)
