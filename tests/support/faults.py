"""Makes the n-th call of a dependency fail, and keeps a trace of what was called."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, cast

from harness.clock import SystemClock, timestamp
from harness.errors import (
    ConflictError,
    FailedPreconditionError,
    HarnessError,
    ResourceExhaustedError,
    UnavailableError,
)
from harness.llm import LLMAdapter, LLMError, LLMEvent, LLMRequest
from harness.operations import OperationManager
from harness.session_store import SessionStore
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

STREAMS = frozenset(
    {"watch_session", "watch_runnable", "get_blob", "export_session", "watch_operations", "read_output"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure of one dependency."""

    call: str
    """For example "store.commit" or "manager.add_operations"."""

    number: int
    """Which call of it fails, from 1."""

    is_after: bool = False
    """The call has its effect, only its answer is lost."""

    is_full_disk: bool = False
    """A definite failure in place of an unknown outcome."""

    is_denied: bool = False
    """Permission was lost: likewise definite."""

    messages: int = 1
    """How many messages of a stream come before it breaks, where `is_after`."""

    times: int = 1
    """How many calls on end fail, from `number` on; only the first can be one whose answer alone is lost."""

    is_refused_then: bool = False
    """Of several calls the first is one whose answer is lost, the others meet a full disk."""

    is_conflict: bool = False
    """The history is said to have gone on meanwhile."""

    def __str__(self) -> str:
        """Return a name for tests."""
        kind = "after" if self.is_after else "before"
        kind = "conflict" if self.is_conflict else kind
        kind = "full-disk" if self.is_full_disk else "denied" if self.is_denied else kind
        return (
            f"{self.call}-{self.number}-{kind}-{self.messages}x{self.times}{'-refused' if self.is_refused_then else ''}"
        )

    def error(self, *, is_first: bool = True) -> HarnessError:
        """Return what the caller sees."""
        if self.is_full_disk or (self.is_refused_then and not is_first):
            return ResourceExhaustedError("the disk is full", reason="STORAGE_FULL")
        if self.is_conflict:
            return ConflictError("the session went on", reason="SEQUENCE_CONFLICT")
        if self.is_denied:
            return FailedPreconditionError("the directory is closed", reason="STATE_DIR_NOT_WRITABLE")
        return UnavailableError("injected", reason="INJECTED", retry_after_s=0.01)


@dataclass(slots=True)
class JumpingClock:
    """The machine's clocks, ahead by what a test says."""

    wall_ahead: timedelta = timedelta()
    monotonic_ahead_s: float = 0.0

    def now(self) -> datetime:
        """Return the wall clock's time in UTC."""
        return SystemClock().now() + self.wall_ahead

    def monotonic_s(self) -> float:
        """Return seconds since the machine started."""
        return SystemClock().monotonic_s() + self.monotonic_ahead_s


@dataclass(slots=True)
class FaultyCalls:
    """Counts calls, records them, and fails the one that a fault names."""

    fault: Fault | None = None
    counts: Counter[str] = field(default_factory=Counter)
    trace: list[tuple[str, object]] = field(default_factory=list)
    was_hit: bool = False

    def store(self, store: SessionStore) -> SessionStore:
        """Return a store whose calls pass through here."""
        return cast(SessionStore, _Faulty(self, "store", store))

    def manager(self, manager: OperationManager) -> OperationManager:
        """Return a manager whose calls pass through here."""
        return cast(OperationManager, _Faulty(self, "manager", manager))

    def adapter(self, adapter: LLMAdapter) -> LLMAdapter:
        """Return an adapter whose requests pass through here."""
        return FaultyAdapter(self, adapter)

    def is_hit(self, call: str, request: object) -> bool:
        """Note a call and return whether it is the one that fails."""
        self.counts[call] += 1
        self.trace.append((call, request))
        fault, count = self.fault, self.counts[call]
        hit = fault is not None and fault.call == call and fault.number <= count < fault.number + fault.times
        self.was_hit = self.was_hit or hit
        return hit


class _Faulty:
    """Passes every method on to a real dependency, but for the call that fails."""

    def __init__(self, calls: FaultyCalls, prefix: str, target: object) -> None:
        self._calls = calls
        self._prefix = prefix
        self._target = target

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._target, name)
        call = f"{self._prefix}.{name}"
        return self._stream(call, method) if name in STREAMS else self._unary(call, method)

    def _unary(self, call: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*arguments: object) -> object:
            hit = self._calls.is_hit(call, arguments[0] if arguments else None)
            fault = self._calls.fault
            is_first = fault is not None and self._calls.counts[call] == fault.number
            if hit and fault is not None and not (fault.is_after and is_first):
                raise fault.error(is_first=is_first)
            answer = await method(*arguments)
            if hit and fault is not None:
                raise fault.error(is_first=is_first)
            return answer

        return wrapped

    def _stream(self, call: str, method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def wrapped(*arguments: object) -> AsyncIterator[object]:
            hit = self._calls.is_hit(call, arguments[0] if arguments else None)
            fault = self._calls.fault
            if hit and fault is not None and not fault.is_after:
                raise fault.error()
            stream = method(*arguments)
            seen = 0
            try:
                async for message in stream:
                    yield message
                    seen += 1
                    if hit and fault is not None and seen == fault.messages:
                        raise fault.error()
            finally:
                await stream.aclose()  # type: ignore[attr-defined]  # the real ones are generators

        return wrapped


class FaultyAdapter:
    """Passes requests on, but for the one that fails."""

    def __init__(self, calls: FaultyCalls, adapter: LLMAdapter) -> None:
        """Keep the real adapter."""
        self._calls = calls
        self._adapter = adapter

    async def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        """Yield the real events, or fail before or after the first one."""
        hit = self._calls.is_hit("model.respond", request)
        failure = llm_pb2.Failure(
            error_class=llm_pb2.ERROR_CLASS_OVERLOAD,
            message="injected",
            provider_code="injected",
            retry_time=timestamp(SystemClock().now() + timedelta(seconds=0.2)),
        )
        fault = self._calls.fault
        if hit and fault is not None and not fault.is_after:
            raise LLMError(failure)
        seen = 0
        async for event in self._adapter.respond(request):
            yield event
            seen += 1
            if hit and fault is not None and seen == fault.messages:
                raise LLMError(failure)

    async def aclose(self) -> None:
        """Close the real adapter."""
        await self._adapter.aclose()


def check_trace(calls: FaultyCalls, operations: Sequence[operation_pb2.Operation]) -> None:
    """Fail where something was done before it was recorded: dispatch, cancellation, acknowledgement, request.

    Args:
        calls: With the trace of a whole session.
        operations: What is stored at its end.
    """
    committed: dict[str, set[bytes]] = {}
    dispatched: set[str] = set()
    turns: set[str] = set()
    requests = 0
    for call, request in calls.trace:
        if call == "store.commit":
            commit = cast(store_pb2.CommitRequest, request)
            turns |= {item.turn.turn_id for item in commit.items if item.HasField("turn")}
            for operation in commit.operations:
                committed.setdefault(operation.operation_id, set()).add(operation.SerializeToString(deterministic=True))
        elif call == "manager.add_operations":
            for assignment in cast(manager_pb2.AddOperationsRequest, request).assignments:
                operation = assignment.operation
                assert operation.SerializeToString(deterministic=True) in committed[operation.operation_id]
                dispatched.add(operation.operation_id)
        elif call == "manager.cancel_operation":
            cancelled = cast(manager_pb2.CancelOperationRequest, request).operation_id
            assert cancelled in dispatched, "an operation is cancelled that was never dispatched"
        elif call == "manager.acknowledge_updates":
            for one in cast(manager_pb2.AcknowledgeUpdatesRequest, request).acknowledgements:
                assert one.operation_id in committed, "a report is acknowledged before it is recorded"
        elif call == "model.respond":
            requests += 1
            assert requests <= len(turns), "a model is asked before its turn is recorded, or twice for one"
    for operation in operations:
        final = operation.SerializeToString(deterministic=True)
        assert final in committed[operation.operation_id], "an operation is stored that nobody committed"
