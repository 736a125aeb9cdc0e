"""Makes the n-th call of a dependency fail, and keeps a trace of what was called."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from harness.clock import SystemClock, timestamp
from harness.errors import HarnessError, ResourceExhaustedError, UnavailableError
from harness.llm import LLMAdapter, LLMError, LLMEvent, LLMRequest
from harness.operations import OperationManager
from harness.session_store import SessionStore
from unreal_agent.llm.v1 import llm_pb2

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

    def error(self) -> HarnessError:
        """Return what the caller sees."""
        if self.is_full_disk:
            return ResourceExhaustedError("the disk is full", reason="STORAGE_FULL")
        return UnavailableError("injected", reason="INJECTED", retry_after_s=0.01)


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
        hit = self.fault is not None and self.fault.call == call and self.fault.number == self.counts[call]
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
            if hit and fault is not None and not fault.is_after:
                raise fault.error()
            answer = await method(*arguments)
            if hit and fault is not None:
                raise fault.error()
            return answer

        return wrapped

    def _stream(self, call: str, method: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def wrapped(*arguments: object) -> AsyncIterator[object]:
            hit = self._calls.is_hit(call, arguments[0] if arguments else None)
            fault = self._calls.fault
            if hit and fault is not None and not fault.is_after:
                raise fault.error()
            stream = method(*arguments)
            try:
                async for message in stream:
                    yield message
                    if hit and fault is not None:
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
        async for event in self._adapter.respond(request):
            yield event
            if hit:
                raise LLMError(failure)

    async def aclose(self) -> None:
        """Close the real adapter."""
        await self._adapter.aclose()
