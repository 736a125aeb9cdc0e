"""Keeps calls that name no session within the sessions that their caller's token is for."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator
from typing import TypeVar

from harness.errors import PermissionDeniedError
from services._server.identity import caller_var
from services.coordinator.tokens import TokenCaller
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2

MakingT = TypeVar("MakingT", coordinator_pb2.CreateSessionRequest, coordinator_pb2.ForkSessionRequest)


def prefix_of_caller() -> str:
    """Return what the IDs of the caller's sessions begin with; empty: they may be any."""
    caller = caller_var.get()
    return caller.token.session_prefix if isinstance(caller, TokenCaller) else ""


def named(request: MakingT) -> MakingT:
    """Return the request with an ID that its caller may use, where it leaves the ID to the server."""
    prefix = prefix_of_caller()
    if request.session_id or not prefix:
        return request
    result = type(request)()
    result.CopyFrom(request)
    result.session_id = f"{prefix}{_name_for(request)}"
    return result


def _name_for(request: coordinator_pb2.CreateSessionRequest | coordinator_pb2.ForkSessionRequest) -> str:
    """Return a name that is free; of a fork the same for the same request, which is sent again after a lost answer."""
    if isinstance(request, coordinator_pb2.ForkSessionRequest):
        # Lengths keep two requests apart whose texts only look alike when joined.
        parts = (request.parent_session_id, request.request_id)
        return hashlib.sha256("".join(f"{len(part)}:{part}" for part in parts).encode()).hexdigest()[:32]
    return uuid.uuid4().hex


def narrowed(request: coordinator_pb2.ListSessionsRequest) -> coordinator_pb2.ListSessionsRequest | None:
    """Return the request for what its caller may see of what it asks for; None where that is nothing."""
    prefix = prefix_of_caller()
    if request.id_prefix.startswith(prefix):
        return request
    if not prefix.startswith(request.id_prefix):
        return None
    result = coordinator_pb2.ListSessionsRequest()
    result.CopyFrom(request)
    result.id_prefix = prefix
    return result


async def named_import(
    requests: AsyncIterator[coordinator_pb2.ImportSessionRequest],
) -> AsyncIterator[coordinator_pb2.ImportSessionRequest]:
    """Yield the requests; refuse an import under the exported ID, which may be anybody's: SESSION_NOT_ALLOWED."""
    prefix = prefix_of_caller()
    is_first = True
    async for request in requests:
        if is_first and prefix and not request.session_id:
            raise PermissionDeniedError(
                f"the token is for sessions whose IDs begin with {prefix!r}: name the session to import as",
                reason="SESSION_NOT_ALLOWED",
                metadata={"session_prefix": prefix},
            )
        is_first = False
        yield request
