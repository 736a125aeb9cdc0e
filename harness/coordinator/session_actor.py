"""The thin shell around one session: gathers stimuli, decides, commits, performs effects. Its only writer.

A session has one commit in flight; what arrives meanwhile is gathered into the next decision. After a failed commit
nothing that depends on it happens: the durable state is what it was, and what must not be lost is decided again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import assert_never

from pyrsistent import pmap

from harness import faults
from harness.clock import Clock, instant
from harness.coordinator.decide import decide
from harness.coordinator.lease_keeper import SessionLease
from harness.coordinator.loading import load_state
from harness.coordinator.manager_link import ManagerLink, Outgoing
from harness.coordinator.model_requests import ModelRequests
from harness.coordinator.protocol import (
    Acknowledge,
    Answer,
    BlobSource,
    CancelRequest,
    Decision,
    Dispatch,
    Effect,
    Environment,
    InputArrived,
    Loaded,
    Now,
    ResolveReport,
    SendCancel,
    SendRequest,
    Stimulus,
    Volatile,
)
from harness.coordinator.report_resolver import ReportResolver
from harness.coordinator.state import SessionState
from harness.errors import (
    ConflictError,
    DeadlineExceededError,
    FailedPreconditionError,
    HarnessError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
)
from harness.session_store import SessionStore, put_blob_bytes
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

logger = logging.getLogger(__name__)

BEFORE_COMMIT = faults.declare("coordinator.commit.before", "a decision is made, its commit is not sent")
AFTER_COMMIT = faults.declare("coordinator.commit.after", "a commit is durable, none of its effects is performed")
BEFORE_REQUEST = faults.declare("coordinator.request.before", "a turn is recorded, its model has not been asked")
AFTER_REQUEST = faults.declare("coordinator.request.after", "a model has answered, nothing of it is recorded")
AFTER_EFFECTS = faults.declare("coordinator.effects.after", "the effects of a commit are performed")

COMMIT_RETRY_S = 0.2
"""Between attempts of a commit whose outcome is unknown."""

STORAGE_RETRY_S = 2.0
"""Before what must not be lost is decided again, after the store could not write."""

MAX_WAITING_INPUTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorServices:
    """What every session of a coordinator shares; owned by the coordinator."""

    store: SessionStore
    environment: Environment
    clock: Clock
    links: Mapping[str, ManagerLink]
    resolver: ReportResolver


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A submission is durable."""

    sequence: int
    revision: int
    is_duplicate: bool


class SessionActor:
    """Runs one session under one lease."""

    def __init__(
        self,
        services: ActorServices,
        session: session_pb2.Session,
        requests: ModelRequests,
        lease: SessionLease,
        *,
        was_taken_over: bool,
    ) -> None:
        """Prepare to run a session whose lease is held."""
        self.session_id = session.session_id
        self.epoch = session.epoch
        self._services = services
        self._session = session
        self._requests = requests
        self._lease = lease
        # One incarnation may load a session twice under one epoch, and the store knows commits by their IDs.
        self._run_id = uuid.uuid4().hex[:12]
        self._was_taken_over = was_taken_over
        self._state: SessionState | None = None
        self._volatile = Volatile(rest=session.rest if session.HasField("rest") else None)
        self._revision = session.revision
        self._stimuli: list[Stimulus] = []
        self._wake = asyncio.Event()
        self._tickets: dict[int, asyncio.Future[Accepted]] = {}
        self._next_ticket = itertools.count(1)
        self._next_commit = itertools.count(1)
        self._request: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._loaded = asyncio.Event()
        self._ended: HarnessError | None = None
        self._is_closing = False
        self._is_passivated = False
        self._is_outdated = False

    @property
    def state(self) -> SessionState | None:
        """The durable state; None until loaded."""
        return self._state

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way and nothing waits to be decided."""
        rest = self._volatile.rest
        is_resting = rest is None or rest.state in {
            session_pb2.REST_STATE_UNSPECIFIED,
            session_pb2.REST_STATE_AT_REST,
        }
        return self._loaded.is_set() and is_resting and not self._stimuli and not self._tickets

    @property
    def is_passivated(self) -> bool:
        """Whether the session left memory of its own accord, having nothing to do here; its lease may be released."""
        return self._is_passivated

    @property
    def is_outdated(self) -> bool:
        """Whether it ended since the store has more of the session than it knew, under its own epoch: load it again."""
        return self._is_outdated

    @property
    def has_ended(self) -> bool:
        """Whether the session is not run by this actor any more."""
        return self._ended is not None

    def post(self, stimulus: Stimulus) -> None:
        """Take note of something that happened; decided with the next commit."""
        self._stimuli.append(stimulus)
        self._wake.set()

    async def submit(self, message: item_pb2.Input, blobs: Mapping[str, bytes]) -> Accepted:
        """Record an input; returns once it is durable. A caller that goes away leaves it recorded or not.

        Raises:
            HarnessError: The input was refused or could not be written; nothing was recorded.
            UnavailableError: The session is not run here any more.
        """
        if self._ended is not None:
            raise self._ended
        if len(self._tickets) >= MAX_WAITING_INPUTS:
            raise ResourceExhaustedError(
                f"session {self.session_id!r} has {MAX_WAITING_INPUTS} inputs waiting to be recorded",
                reason="INBOX_FULL",
                retry_after_s=1.0,
            )
        ticket = next(self._next_ticket)
        answer: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self._tickets[ticket] = answer
        self.post(InputArrived(ticket=ticket, message=message, blobs=blobs))
        return await answer

    async def wait_loaded(self) -> None:
        """Return once the history is read; raises what reading it, or running the session, ended with."""
        await self._loaded.wait()
        if self._ended is not None:
            raise self._ended
        self._wake.set()  # whoever asks has something in mind: the session stays for a while

    async def release(self) -> None:
        """Give the session back, once it has ended."""
        await self._lease.release()

    def close(self) -> None:
        """End after the commit in flight; nothing else is started."""
        self._is_closing = True
        self._wake.set()

    async def run(self) -> None:
        """Run the session until it is closed or its lease is lost; never raises but for cancellation."""
        try:
            self._state = await load_state(self._services.store, self._session)
            self._loaded.set()
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self._loop()
                self._cancel_request()
            self._end(_not_run_here(self.session_id))
        except* ConflictError as group:
            self._is_outdated = _first(group).reason == "SEQUENCE_CONFLICT"
            logger.info("session is run elsewhere", extra={"session_id": self.session_id, "reason": str(group)})
            self._end(_not_run_here(self.session_id))
        except* HarnessError as group:
            self._end(_first(group))
        except* Exception as group:
            logger.exception("session ended unexpectedly", extra={"session_id": self.session_id}, exc_info=group)
            self._end(_not_run_here(self.session_id))
        finally:
            self._end(_not_run_here(self.session_id))

    async def _loop(self) -> None:
        assert self._state is not None
        instances = {name: link.instance_id for name, link in self._services.links.items() if link.instance_id}
        lost = {name: self._now().monotonic_s for name in self._services.links if name not in instances}
        self._volatile = replace(self._volatile, instances=pmap(instances), lost_since_s=pmap(lost))
        self._stimuli.insert(0, Loaded(was_taken_over=self._was_taken_over))
        self._wake.set()
        wake_s: float | None = None
        while True:
            idle_s = self._idle_deadline_s()
            await self._wait(idle_s if wake_s is None else wake_s if idle_s is None else min(idle_s, wake_s))
            if self._is_closing:
                return
            if idle_s is not None and not self._wake.is_set() and self._leaves_memory(idle_s):
                return
            waiting = self._lease.wait_until_fresh()
            if waiting is not None:
                await waiting
            self._wake.clear()
            stimuli, self._stimuli = self._stimuli, []
            decision = decide(self._services.environment, self._state, self._volatile, stimuli, self._now())
            wake_s = await self._carry_out(decision, stimuli)

    def _idle_deadline_s(self) -> float | None:
        """Return when the session leaves memory if nothing happens; None while it may not."""
        if not self._may_leave():
            return None
        return self._services.clock.monotonic_s() + self._services.environment.config.idle_s

    def _leaves_memory(self, idle_s: float) -> bool:
        """End where the session was idle for long enough; from here on whoever wants it loads it anew."""
        if self._services.clock.monotonic_s() < idle_s or not self._may_leave():
            return False
        logger.info("session left memory", extra={"session_id": self.session_id, "epoch": self.epoch})
        self._is_passivated = True
        self._end(_not_run_here(self.session_id))
        return True

    def _may_leave(self) -> bool:
        state, rest = self._state, self._volatile.rest
        assert state is not None
        if self._stimuli or self._tickets or self._volatile.request_turn_id:
            return False
        if next(state.unsettled(), None) is not None:
            return False  # a failed session rests while its commands run; their ends must find it
        if rest is not None and rest.state == session_pb2.REST_STATE_WAITING_UNTIL:
            config = self._services.environment.config
            wait = instant(rest.wake_time) - self._services.clock.now()
            return config.takes_runnable_sessions and wait > timedelta(seconds=config.long_wait_s)
        return self.is_at_rest

    async def _wait(self, wake_s: float | None) -> None:
        if wake_s is None:
            await self._wake.wait()
            return
        delay_s = wake_s - self._services.clock.monotonic_s()
        if delay_s <= 0:
            return
        try:
            async with asyncio.timeout(delay_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _carry_out(self, decision: Decision, stimuli: list[Stimulus]) -> float | None:
        """Commit a decision and perform its effects; return when to decide again."""
        if decision.has_commit:
            try:
                faults.reach(BEFORE_COMMIT)
                await self._store_blobs(decision.blobs)
                self._revision = (await self._commit(decision)).revision
                faults.reach(AFTER_COMMIT)
            except ConflictError:
                raise
            except HarnessError as error:
                return self._after_failed_commit(error, stimuli)
        self._state, self._volatile = decision.next_state, decision.next_volatile
        self._answer(decision)
        for effect in decision.effects:
            self._perform(effect)
        faults.reach(AFTER_EFFECTS)
        return decision.wake_s

    def _after_failed_commit(self, error: HarnessError, stimuli: list[Stimulus]) -> float:
        """Refuse the submissions of a commit that was not written; keep what must not be lost for another decision."""
        logger.error(
            "commit failed", extra={"session_id": self.session_id, "reason": error.reason, "error": error.message}
        )
        kept: list[Stimulus] = []
        for stimulus in stimuli:
            if isinstance(stimulus, InputArrived):
                self._resolve(stimulus.ticket, error)
            else:
                kept.append(stimulus)
        self._stimuli = kept + self._stimuli
        return self._services.clock.monotonic_s() + STORAGE_RETRY_S

    async def _commit(self, decision: Decision) -> store_pb2.CommitResponse:
        """Write a decision; one of unknown outcome is repeated with the same ID until it is answered."""
        assert self._state is not None
        request = store_pb2.CommitRequest(
            session_id=self.session_id,
            commit_id=f"{self.epoch}-{self._run_id}-{next(self._next_commit)}",
            epoch=self.epoch,
            expected_sequence=self._state.last_sequence,
            items=decision.items,
            operations=decision.operations,
            blobs=[source.blob for source in decision.blobs],
            rest=decision.rest,
        )
        is_unknown = False
        while True:
            try:
                return await self._services.store.commit(request)
            except (UnavailableError, DeadlineExceededError) as error:
                is_unknown = True
                met: HarnessError = error
            except (ResourceExhaustedError, FailedPreconditionError, PermissionDeniedError) as error:
                if not is_unknown or isinstance(error, UnsupportedError) or error.reason == "SESSION_DELETED":
                    raise
                # The store refuses before it looks: that says nothing of the attempt whose answer was lost.
                met = error
            logger.warning(
                "commit of unknown outcome repeated",
                extra={"session_id": self.session_id, "commit_id": request.commit_id, "reason": met.reason},
            )
            await asyncio.sleep(met.retry_after_s or COMMIT_RETRY_S)

    async def _store_blobs(self, sources: tuple[BlobSource, ...]) -> None:
        for source in sources:
            data = source.data
            if data is None and source.operation is not None:
                data = await self._fetch_attachment(source)
            if data is not None:
                await put_blob_bytes(self._services.store, self.session_id, source.blob, data)

    async def _fetch_attachment(self, source: BlobSource) -> bytes:
        """Read an attachment that did not come with its update: the update was an answer, not a watch's."""
        assert source.operation is not None
        link = self._services.links[source.operation.manager_name]
        request = manager_pb2.ReadOutputRequest(
            operation_id=source.operation.operation_id, attachment_digest=source.blob.digest
        )
        return b"".join([piece.data async for piece in link.manager.read_output(request)])

    def _answer(self, decision: Decision) -> None:
        for answer in decision.answers:
            if isinstance(answer, Answer):
                accepted = Accepted(sequence=answer.sequence, revision=self._revision, is_duplicate=answer.is_duplicate)
                self._resolve(answer.ticket, accepted)
            else:
                self._resolve(answer.ticket, answer.error)

    def _resolve(self, ticket: int, outcome: Accepted | HarnessError) -> None:
        future = self._tickets.pop(ticket)
        if future.done():
            return
        if isinstance(outcome, Accepted):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case SendRequest():
                assert self._tasks is not None
                self._request = self._tasks.create_task(self._ask())
            case CancelRequest():
                self._cancel_request()
            case Dispatch() | SendCancel() | Acknowledge():
                self._send(effect)
            case ResolveReport():
                assert self._tasks is not None
                self._tasks.create_task(self._resolve_report(effect.operation))
            case _:
                assert_never(effect)

    def _send(self, effect: Dispatch | SendCancel | Acknowledge) -> None:
        assert self._state is not None
        outgoing = Outgoing(
            session_id=self.session_id,
            epoch=self.epoch,
            workspace=self._state.settings.workspace,
            effect=effect,
        )
        self._services.links[effect.manager_name].send(outgoing)

    async def _ask(self) -> None:
        assert self._state is not None
        faults.reach(BEFORE_REQUEST)
        answer = await self._requests.ask(self._state, self.epoch)
        faults.reach(AFTER_REQUEST)
        self.post(answer)

    def _cancel_request(self) -> None:
        if self._request is not None:
            self._request.cancel()
            self._request = None

    async def _resolve_report(self, reported: operation_pb2.Operation) -> None:
        """Acknowledge a report of an operation that is settled, as the store knows it."""
        try:
            outgoing = await self._services.resolver.resolve(reported)
        except HarnessError:
            return  # the manager reports again when the connection is next made
        if outgoing is not None:
            self._services.links[reported.manager_name].send(outgoing)

    def _end(self, error: HarnessError) -> None:
        if self._ended is None:
            self._ended = error
        self._loaded.set()
        for ticket in list(self._tickets):
            self._resolve(ticket, self._ended)

    def _now(self) -> Now:
        return Now(wall_time=self._services.clock.now(), monotonic_s=self._services.clock.monotonic_s())


def _not_run_here(session_id: str) -> UnavailableError:
    return UnavailableError(
        f"session {session_id!r} is not run here any more; try again", reason="NOT_OWNER", retry_after_s=0.2
    )


def _first(group: BaseExceptionGroup[HarnessError]) -> HarnessError:
    for error in group.exceptions:
        if isinstance(error, HarnessError):
            return error
        if isinstance(error, BaseExceptionGroup):
            return _first(error)
    return UnavailableError("the session ended", reason="NOT_OWNER")
