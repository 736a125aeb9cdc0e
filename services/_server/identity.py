"""Who calls, and what that caller may do: the interface between a server's calls and whoever knows its callers."""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import Message

from harness.errors import HarnessError, PermissionDeniedError


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What an identity hook sees of a call."""

    method: str
    """For example "/unreal_agent.coordinator.v1.CoordinatorService/SubmitInput"."""

    metadata: Mapping[str, str | bytes]
    peer: str
    peer_names: tuple[str, ...]
    """Names in the certificate that the caller showed; empty without mutual TLS."""


class Caller(Protocol):
    """Who makes a call. A handler finds it in `caller_var`."""

    def check(self, method: str, request: Message) -> None:
        """Refuse what this caller may not ask for; called with every message of a stream of requests.

        Raises:
            PermissionDeniedError: It may not.
            UnauthenticatedError: It was known when the call began and is no longer.
        """
        ...

    def until_gone(self, end: Callable[[HarnessError], None]) -> AbstractContextManager[None]:
        """Call `end` if the caller stops being known during the block: what runs for it is to end with that error."""
        ...


IdentityHook = Callable[[CallFacts], Awaitable[Caller]]
"""Returns who calls, or raises UnauthenticatedError or PermissionDeniedError."""

caller_var: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("caller", default=None)
"""Who makes the call that the current task serves; None where the server asks nobody who it is."""


class CertifiedCaller:
    """A service that its certificate names: may do everything."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def check(self, method: str, request: Message) -> None:
        """Allow it."""

    def until_gone(self, end: Callable[[HarnessError], None]) -> AbstractContextManager[None]:
        """Never end: a certificate counts for as long as its connection."""
        return nullcontext()


def only_certified(names: Collection[str]) -> IdentityHook:
    """Return a hook that lets in those whose certificate holds one of the names."""

    async def identify(facts: CallFacts) -> Caller:
        if not set(names) & set(facts.peer_names):
            shown = ", ".join(repr(name) for name in facts.peer_names) or "no name"
            raise PermissionDeniedError(
                f"the caller's certificate holds {shown[:200]}; allowed here: {', '.join(sorted(names))}",
                reason="CLIENT_NOT_ALLOWED",
            )
        return CertifiedCaller(facts.peer_names)

    return identify
