"""Offers sessions that need a coordinator: unowned, and working or due. Each is offered to one coordinator at a time.

Owns the offers, which live in memory: an offer is a hint, the lease decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from harness.clock import Clock
from harness.errors import FailedPreconditionError, HarnessError
from harness.session_store.sql import rows
from harness.session_store.sql.errors import closed_error
from harness.session_store.sql.leases import Leases
from harness.session_store.sql.sql import Connection, Reader
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

logger = logging.getLogger(__name__)

OFFER_S: Final = 5.0
"""An offer that is not taken for this long goes to the next coordinator."""

_LONGEST_WAIT_S: Final = 30.0
"""Due times are by the wall clock, which may jump: looked at again after this long at the latest."""

_RETRY_S: Final = 1.0
_MAX_OFFERS: Final = 500

# Steps from one owner to the next by index; there are few owners and may be many sessions.
_OWNERS: Final = """
WITH RECURSIVE owners (owner_id) AS (
    SELECT min(owner_id) FROM sessions WHERE owner_id <> ''
    UNION ALL
    SELECT (SELECT min(sessions.owner_id) FROM sessions
        WHERE sessions.owner_id <> '' AND sessions.owner_id > owners.owner_id)
    FROM owners WHERE owner_id IS NOT NULL
)
SELECT owner_id FROM owners WHERE owner_id IS NOT NULL
"""


@dataclass(slots=True, eq=False)
class _Watcher:
    request: store_pb2.WatchRunnableRequest
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    offered: list[str] = field(default_factory=list)
    """Not sent yet; within the capacity."""

    is_replaced: bool = False
    in_hand: int = 0
    """Sessions that it owns or was offered, as of the latest look."""

    @property
    def incarnation_id(self) -> str:
        return self.request.incarnation.incarnation_id


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    session_id: str
    versions: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """What of the store decides about offers."""

    candidates: list[_Candidate]
    owned: dict[str, int]
    """Sessions by owner, for the watching incarnations."""

    owner_ids: list[str]
    next_due_us: int | None


class RunnableSessions:
    """Watchers for work, and what each was offered."""

    def __init__(self, readers: Reader, leases: Leases, clock: Clock) -> None:
        self._readers = readers
        self._leases = leases
        self._clock = clock
        self._watchers: list[_Watcher] = []
        self._offers: dict[str, tuple[_Watcher, float]] = {}
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def watching(self) -> list[str]:
        """Return the incarnations that watch."""
        return [watcher.incarnation_id for watcher in self._watchers]

    def notify(self) -> None:
        """Tell that a session may have become runnable, or a coordinator free."""
        self._changed.set()

    def acquired(self, session_id: str, replaced_id: str) -> None:
        """Tell that a session has an owner, and which incarnation was replaced by it, if any."""
        self._offers.pop(session_id, None)
        self.replaced(replaced_id)

    def replaced(self, incarnation_id: str) -> None:
        """Tell that an incarnation is over: its watch ends and its sessions are free. Empty for none."""
        if not incarnation_id:
            return
        for watcher in self._watchers:
            if watcher.incarnation_id == incarnation_id:
                watcher.is_replaced = True
                watcher.changed.set()
        self._changed.set()

    def close(self) -> None:
        """End every watch, and `run`."""
        self._is_closed = True
        self._changed.set()
        for watcher in self._watchers:
            watcher.changed.set()

    async def watch(
        self, request: store_pb2.WatchRunnableRequest, register: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[store_pb2.WatchRunnableResponse]:
        """Yield offers to one coordinator, after `register` has let its incarnation in."""
        watcher = _Watcher(request)
        # Before it is let in: a newer incarnation that comes directly after that must find it here.
        self._watchers.append(watcher)
        try:
            await register()
            self._changed.set()
            while not self._is_closed:
                await watcher.changed.wait()
                watcher.changed.clear()
                if watcher.is_replaced:
                    raise FailedPreconditionError(
                        f"incarnation {watcher.incarnation_id!r} was replaced: drop everything and exit",
                        reason="INCARNATION_REPLACED",
                        metadata={"incarnation_id": watcher.incarnation_id},
                    )
                session_ids, watcher.offered = watcher.offered, []
                if session_ids:
                    yield store_pb2.WatchRunnableResponse(session_ids=session_ids)
            raise closed_error()
        finally:
            self._watchers.remove(watcher)
            self._offers = {one: offer for one, offer in self._offers.items() if offer[0] is not watcher}
            self._changed.set()

    async def run(self) -> None:
        """Make offers until the store closes."""
        while not self._is_closed:
            self._changed.clear()
            wait_s = None
            if self._watchers:
                try:
                    wait_s = await self._offer()
                except HarnessError:
                    logger.exception("runnable sessions could not be read")
                    wait_s = _RETRY_S
            if self._is_closed:
                return
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _offer(self) -> float:
        """Hand out what is runnable; return the seconds until something may change by itself."""
        now_s = self._clock.monotonic_s()
        self._offers = {one: offer for one, offer in self._offers.items() if offer[1] > now_s}
        now = self._clock.now()
        limit = len(self._offers) + _MAX_OFFERS
        survey = await self._readers.read(_Look(self.watching, self._leases.is_alive, now, limit))
        for watcher in self._watchers:
            watcher.in_hand = survey.owned.get(watcher.incarnation_id, 0)
        for taker, _ in self._offers.values():
            taker.in_hand += 1
        for candidate in survey.candidates:
            if candidate.session_id not in self._offers:
                self._offer_to_next(candidate)
        return self._seconds_to_wait(survey, now)

    def _offer_to_next(self, candidate: _Candidate) -> None:
        for index, watcher in enumerate(self._watchers):
            if watcher.in_hand < watcher.request.capacity and _can_read(watcher, candidate):
                # Whoever was given work goes to the end of the line.
                self._watchers.append(self._watchers.pop(index))
                self._offers[candidate.session_id] = (watcher, self._clock.monotonic_s() + OFFER_S)
                watcher.in_hand += 1
                watcher.offered.append(candidate.session_id)
                watcher.changed.set()
                return

    def _seconds_to_wait(self, survey: _Survey, now: datetime) -> float:
        waits = [_LONGEST_WAIT_S]
        now_s = self._clock.monotonic_s()
        waits.extend(deadline - now_s for _, deadline in self._offers.values())
        alive = (self._leases.remaining_s(owner_id) for owner_id in survey.owner_ids)
        waits.extend(remaining_s for remaining_s in alive if remaining_s > 0)
        if survey.next_due_us is not None:
            waits.append((survey.next_due_us - rows.microseconds(now)) / 1e6)
        return max(min(waits), 0.0)


def _can_read(watcher: _Watcher, candidate: _Candidate) -> bool:
    versions = watcher.request.versions
    read = (versions.session_format, versions.item, versions.operation)
    return all(written <= known for written, known in zip(candidate.versions, read, strict=True))


class _Look:
    """Reads what decides about offers, by index."""

    def __init__(self, watching: list[str], is_alive: Callable[[str], bool], now: datetime, limit: int) -> None:
        self._watching = watching
        self._is_alive = is_alive
        self._now_us = rows.microseconds(now)
        self._limit = limit

    def __call__(self, connection: Connection) -> _Survey:
        owner_ids = [owner_id for (owner_id,) in connection.execute(_OWNERS)]
        free = ["", *(owner_id for owner_id in owner_ids if not self._is_alive(owner_id))]
        candidates: list[_Candidate] = []
        next_due: list[int] = []
        for owner_id in free:
            candidates.extend(self._due(connection, owner_id))
            (due_us,) = connection.execute(
                "SELECT min(due_time_us) FROM sessions WHERE owner_id = ? AND due_time_us > ?",
                (owner_id, self._now_us),
            ).fetchone()
            if due_us is not None:
                next_due.append(due_us)
        owned = {
            owner_id: connection.execute(
                "SELECT count(*) FROM sessions WHERE owner_id = ? AND owner_id <> ''", (owner_id,)
            ).fetchone()[0]
            for owner_id in self._watching
        }
        return _Survey(candidates=candidates, owned=owned, owner_ids=owner_ids, next_due_us=min(next_due, default=None))

    def _due(self, connection: Connection, owner_id: str) -> list[_Candidate]:
        found = connection.execute(
            "SELECT session_id, format_version, max_item_version, max_operation_version FROM sessions"
            f" WHERE owner_id = ? AND due_time_us <= ? AND visibility = {rows.VISIBLE} ORDER BY due_time_us LIMIT ?",
            (owner_id, self._now_us, self._limit),
        )
        return [_Candidate(session_id=found_id, versions=tuple(versions)) for found_id, *versions in found]
