"""Keeps the incarnation's lease: one renewal for all its sessions; nothing is started once it is two thirds old."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from importlib import metadata

from google.protobuf.duration_pb2 import Duration

from harness.clock import Clock
from harness.coordinator.coordinator import CoordinatorConfig
from harness.errors import FailedPreconditionError, HarnessError, UnavailableError
from harness.session_store import (
    ITEM_SCHEMA_VERSION,
    OPERATION_SCHEMA_VERSION,
    SESSION_FORMAT_VERSION,
    SessionStore,
)
from unreal_agent.server.v1 import server_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

logger = logging.getLogger(__name__)

READER_VERSIONS = server_pb2.ReaderVersions(
    session_format=SESSION_FORMAT_VERSION, item=ITEM_SCHEMA_VERSION, operation=OPERATION_SCHEMA_VERSION
)
SAFE_PART = 2 / 3
"""Part of the lease after which an owner that has not renewed starts nothing."""

RENEWALS_PER_LEASE = 3

RELEASE_S = 2.0
"""What giving sessions back may take at the end; a store that is gone must not hold up the process."""


class LeaseKeeper:
    """The lease of one process's life."""

    def __init__(
        self, store: SessionStore, config: CoordinatorConfig, clock: Clock, *, on_replaced: Callable[[], None]
    ) -> None:
        """Make a new incarnation; `run` keeps it."""
        self.incarnation = session_pb2.Incarnation(
            name=config.name, incarnation_id=uuid.uuid4().hex, address=config.address
        )
        self._store = store
        self._clock = clock
        self._lease_s = config.lease_s
        self._on_replaced = on_replaced
        self._is_replaced = False
        self._is_released = False
        self._renewed_s: float | None = None
        self._renewed = asyncio.Event()

    def server_info(self) -> server_pb2.ServerInfo:
        """Say who this process is and what it reads and writes."""
        versions = {
            "session_format": SESSION_FORMAT_VERSION,
            "item": ITEM_SCHEMA_VERSION,
            "operation": OPERATION_SCHEMA_VERSION,
        }
        return server_pb2.ServerInfo(
            component="coordinator",
            name=self.incarnation.name,
            instance_id=self.incarnation.incarnation_id,
            release=metadata.version("unreal-agent"),
            versions=[
                server_pb2.VersionRange(kind=kind, min_read=1, max_read=version, write=version)
                for kind, version in versions.items()
            ],
        )

    async def acquire(self, session_id: str) -> store_pb2.AcquireLeaseResponse:
        """Bind a session to this incarnation under a new epoch.

        Raises:
            UnavailableError: Another live incarnation owns it (NOT_OWNER), or this one was replaced.
            UnsupportedError: The session holds versions that this release does not read.
        """
        if self._is_replaced:
            raise UnavailableError(
                f"coordinator {self.incarnation.name!r} was replaced by a newer process", reason="DRAINING"
            )
        asked_s = self._clock.monotonic_s()
        response = await self._store.acquire_lease(
            store_pb2.AcquireLeaseRequest(
                session_id=session_id,
                incarnation=self.incarnation,
                versions=READER_VERSIONS,
                lease=_duration(self._lease_s),
            )
        )
        self._note_renewal(asked_s)
        return response

    def wait_until_fresh(self) -> Awaitable[None] | None:
        """Return None where the lease is young enough to act under, else what to wait for."""
        if self._is_fresh():
            return None
        return self._wait()

    async def run(self) -> None:
        """Renew for ever; ends where this incarnation was replaced."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            if self._renewed_s is None:
                continue  # holds no session yet
            asked_s = self._clock.monotonic_s()
            try:
                await self._store.renew_lease(
                    store_pb2.RenewLeaseRequest(incarnation=self.incarnation, lease=_duration(self._lease_s))
                )
            except FailedPreconditionError as error:
                self.note_replaced(error)
                return
            except HarnessError as error:
                logger.warning("lease was not renewed", extra={"reason": error.reason})
                continue
            self._note_renewal(asked_s)

    def note_replaced(self, error: FailedPreconditionError) -> None:
        """Start nothing more: the store says that another process of the same name has taken over."""
        if self._is_replaced or self._is_released:
            return
        logger.error("incarnation was replaced", extra={"reason": error.reason})
        self._is_replaced = True
        self._on_replaced()

    async def release_all(self) -> None:
        """Give every session back, so that the next owner need not wait; failing that, the lease runs out."""
        if self._renewed_s is None or self._is_replaced:
            return
        self._is_released = True
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._store.release_lease(store_pb2.ReleaseLeaseRequest(incarnation=self.incarnation))
        except HarnessError as error:
            logger.warning("leases were not released", extra={"reason": error.reason})
        except TimeoutError:
            logger.warning("leases were not released", extra={"reason": "DEADLINE_EXCEEDED"})

    def _note_renewal(self, asked_s: float) -> None:
        self._renewed_s = asked_s if self._renewed_s is None else max(asked_s, self._renewed_s)
        self._renewed.set()

    def _is_fresh(self) -> bool:
        return (
            not self._is_replaced
            and self._renewed_s is not None
            and self._clock.monotonic_s() - self._renewed_s < self._lease_s * SAFE_PART
        )

    async def _wait(self) -> None:
        while not self._is_fresh():
            self._renewed.clear()
            await self._renewed.wait()


def _duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))
