"""Where a watch gets its messages: from this coordinator, and from the session's owner where that is another.

The durable part could come from anywhere; what is said while it is said is only with the owner. So the watch follows
the session from one to the other, from the revision that it is at.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from clients.coordinator.cursors import WatchCursor
from harness.coordinator import Coordinator
from harness.errors import UnavailableError
from harness.primitives.streams import closing
from services.coordinator.forwarding import Forwarder
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2

Context = grpc.aio.ServicerContext[Any, Any]

_MOVED_REASONS: Final = frozenset({"NOT_OWNER", "DRAINING"})


async def watch_anywhere(
    coordinator: Coordinator, forwarder: Forwarder, request: coordinator_pb2.WatchSessionRequest, context: Context
) -> AsyncIterator[coordinator_pb2.WatchSessionResponse]:
    """Yield a watch's messages, each durable change once, wherever the session is run.

    Raises:
        UnavailableError: NOT_OWNER; the owner can't be reached, or this call was passed on already.
    """
    cursor = WatchCursor(request)
    while True:
        try:
            async with closing(coordinator.watch_session(_copy(cursor.request))) as responses:
                async for response in responses:
                    fresh = cursor.take(response)
                    if fresh is not None:
                        yield fresh
            return
        except UnavailableError as error:
            owner = forwarder.owner(error, context)
            if owner is None:
                raise
            not_owner = error
        was_answered = False
        forwarded = forwarder.stream(owner, "WatchSession", _copy(cursor.request), context, not_owner)
        try:
            async with closing(forwarded) as responses:
                async for response in responses:
                    was_answered = True
                    fresh = cursor.take(response)
                    if fresh is not None:
                        yield fresh
            return
        except UnavailableError as error:
            # An owner that answered has lost the session since; one that didn't is not asked again and again.
            if error.reason not in _MOVED_REASONS or not was_answered:
                raise


def _copy(request: coordinator_pb2.WatchSessionRequest) -> coordinator_pb2.WatchSessionRequest:
    result = coordinator_pb2.WatchSessionRequest()
    result.CopyFrom(request)
    return result
