"""Takes up sessions that have work in hand and no owner, without a client having to ask."""

from __future__ import annotations

import asyncio
import logging

from harness.coordinator.lease_keeper import READER_VERSIONS
from harness.coordinator.local_coordinator import LocalCoordinator
from harness.errors import FailedPreconditionError, HarnessError
from harness.session_store import SessionStore
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

logger = logging.getLogger(__name__)

MAX_SESSIONS_IN_HAND = 10_000
RETRY_S = 1.0


async def run_runnable_sessions(store: SessionStore, coordinator: LocalCoordinator) -> None:
    """Load every session that the store offers, until this process is replaced.

    An offer is a hint: the lease decides. Trouble with the store is waited out.
    """
    request = store_pb2.WatchRunnableRequest(
        incarnation=coordinator.leases.incarnation, versions=READER_VERSIONS, capacity=MAX_SESSIONS_IN_HAND
    )
    while True:
        try:
            async for offer in store.watch_runnable(request):
                for session_id in offer.session_ids:
                    await _resume(coordinator, session_id)
        except HarnessError as error:
            if isinstance(error, FailedPreconditionError) and error.reason == "INCARNATION_REPLACED":
                coordinator.leases.note_replaced(error)
                return
            logger.warning("watch of runnable sessions ended", extra={"reason": error.reason})
        await asyncio.sleep(RETRY_S)


async def _resume(coordinator: LocalCoordinator, session_id: str) -> None:
    try:
        await coordinator.resume(session_id)
    except HarnessError as error:
        logger.warning("offered session was not taken up", extra={"session_id": session_id, "reason": error.reason})
