"""Keeps the incarnation's lease: one renewal for all its sessions; nothing is started once it is two thirds old.

A process may be stopped for longer than its lease and not know: after such a lapse each session is looked up again
before anything is done for it that the store doesn't fence.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from importlib import metadata

from google.protobuf.duration_pb2 import Duration

from harness.clock import Clock
from harness.coordinator.coordinator import CoordinatorConfig
from harness.errors import (
    ConflictError,
    DeadlineExceededError,
    FailedPreconditionError,
    HarnessError,
    UnavailableError,
)
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
"""What giving sessions back may take; a store that is gone must not hold up the process."""

CONFIRM_RETRY_S = 0.2
"""Between attempts to ask a store that is away whose a session is."""


class LeaseKeeper:
    """The lease of one process's life."""

    def __init__(
        self,
        store: SessionStore,
        config: CoordinatorConfig,
        clock: Clock,
        *,
        on_replaced: Callable[[], None],
        on_lapse: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a new incarnation; `run` keeps it.

        Args:
            store: Where leases are; stays the caller's to close.
            config: Name, address and the lease's length.
            clock: Goes on while the machine sleeps.
            on_replaced: Called once another process of the same name has taken over.
            on_lapse: Called when the lease is kept again after a time in which others may have taken sessions.
        """
        self.incarnation = session_pb2.Incarnation(
            name=config.name, incarnation_id=uuid.uuid4().hex, address=config.address
        )
        self._store = store
        self._clock = clock
        self._lease_s = config.lease_s
        self._on_replaced = on_replaced
        self._on_lapse = on_lapse
        self._lapses = 0
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

    def hold(self, session_id: str, epoch: int) -> SessionLease:
        """Return the hold on a session that was acquired just now."""
        return SessionLease(self, session_id, epoch, self._lapses)

    @property
    def lapses(self) -> int:
        """Times that the lease may have been over before it was kept again."""
        return self._lapses

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
        await self.release(store_pb2.ReleaseLeaseRequest(incarnation=self.incarnation))

    async def owner_epoch(self, session_id: str) -> int:
        """Return the epoch of a session's latest lease; waits for a store that is away."""
        while True:
            try:
                found = await self._store.get_session(store_pb2.GetSessionRequest(session_id=session_id))
            except (UnavailableError, DeadlineExceededError):
                await asyncio.sleep(CONFIRM_RETRY_S)
                continue
            return found.session.epoch

    async def release(self, request: store_pb2.ReleaseLeaseRequest) -> None:
        """Give one session or all back."""
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._store.release_lease(request)
        except HarnessError as error:
            logger.warning("leases were not released", extra={"reason": error.reason})
        except TimeoutError:
            logger.warning("leases were not released", extra={"reason": "DEADLINE_EXCEEDED"})

    def _note_renewal(self, asked_s: float) -> None:
        before_s = self._renewed_s
        self._renewed_s = asked_s if before_s is None else max(asked_s, before_s)
        # By the time of the answer: when the store took the renewal is not known, and it may have been too late.
        if before_s is not None and self._clock.monotonic_s() - before_s >= self._lease_s:
            logger.warning("lease may have been over", extra={"elapsed_s": self._clock.monotonic_s() - before_s})
            self._lapses += 1
            self._on_lapse()
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


class SessionLease:
    """The hold of this process on one session, under one epoch."""

    def __init__(self, keeper: LeaseKeeper, session_id: str, epoch: int, lapses: int) -> None:
        """Use `LeaseKeeper.hold`."""
        self.session_id = session_id
        self.epoch = epoch
        self._keeper = keeper
        self._known_lapses = lapses

    def wait_until_fresh(self) -> Awaitable[None] | None:
        """As the keeper does; enough before what the store or a manager fences."""
        return self._keeper.wait_until_fresh()

    async def confirm(self) -> None:
        """Return once something may be started that nobody else fences: a model request.

        Raises:
            ConflictError: LEASE_LOST; another coordinator owns the session.
        """
        while True:
            waiting = self._keeper.wait_until_fresh()
            if waiting is not None:
                await waiting
            lapses = self._keeper.lapses
            if lapses == self._known_lapses:
                return
            epoch = await self._keeper.owner_epoch(self.session_id)
            if epoch != self.epoch:
                raise ConflictError(
                    f"session {self.session_id!r} is run under epoch {epoch} now, here under {self.epoch}",
                    reason="LEASE_LOST",
                    metadata={"session_id": self.session_id, "epoch": str(epoch)},
                )
            self._known_lapses = lapses

    async def release(self) -> None:
        """Give the session back; failing that, the lease of the whole process runs on."""
        await self._keeper.release(
            store_pb2.ReleaseLeaseRequest(
                incarnation=self._keeper.incarnation, session_id=self.session_id, epoch=self.epoch
            )
        )


def _duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))
