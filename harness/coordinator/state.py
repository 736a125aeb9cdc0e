"""Durable state of a session as the coordinator sees it: a value that `apply` makes from committed changes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from pyrsistent import PMap, PSet, pmap, pset

from harness.clock import instant
from harness.context_builder import ContextState
from harness.coordinator.stalls import Stall
from harness.operations import is_terminal
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

RECOVERY_LIMIT = 5
"""Crashes in a row, with nothing answered or settled between, after which a session fails."""

WAITED_FOR = frozenset({llm_pb2.ERROR_CLASS_RATE_LIMIT, llm_pb2.ERROR_CLASS_OVERLOAD})
"""Failures that pass: the session waits for the provider's time."""

PROVIDER_FAILURES = WAITED_FOR | {
    llm_pb2.ERROR_CLASS_AUTHENTICATION,
    llm_pb2.ERROR_CLASS_PERMISSION,
    llm_pb2.ERROR_CLASS_QUOTA,
    llm_pb2.ERROR_CLASS_TIMEOUT,
    llm_pb2.ERROR_CLASS_CONNECTION,
    llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE,
}
"""Failures that another provider would not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenInput:
    """An input that was accepted."""

    sequence: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A call without final status."""

    call: llm_pb2.ToolCall
    turn_id: str
    siblings: int
    """Calls of the same response, itself included."""

    order: int
    """Place among all calls of the session."""

    operation_ids: tuple[str, ...] = ()
    """In the order of dispatch; empty until the first status is applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """A stop that is under way or complete."""

    mode: item_pb2.StopMode.ValueType
    reason: str
    sequence: int
    abandon_after_s: float
    has_input_after: bool = False
    """An input came while it was under way: the session starts again once it is complete."""

    is_limit: bool = False
    """A bound of the session stopped it: other limits start it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """Everything durable that decisions depend on."""

    session_id: str
    session_uid: str
    settings: session_pb2.SessionSettings
    """As the next turn uses them."""

    create_time: datetime
    """Of the session; what its wall time is counted from."""

    last_sequence: int = 0
    context: ContextState = field(default_factory=ContextState)
    inputs: PMap[str, SeenInput] = field(default_factory=pmap)
    call_ids: PSet[str] = field(default_factory=pset)
    calls: PMap[str, OpenCall] = field(default_factory=pmap)
    operations: PMap[str, operation_pb2.Operation] = field(default_factory=pmap)
    """Newest states of operations whose call is open, and of the harness's own."""

    cancellations: PMap[str, item_pb2.CancelOperation] = field(default_factory=pmap)
    """Requested cancellations by operation ID, until the call is final."""

    latest_turn: item_pb2.Turn | None = None
    latest_response_calls: tuple[str, ...] = ()
    """Calls of the latest response."""

    turn_settings: session_pb2.SessionSettings = field(default_factory=session_pb2.SessionSettings)
    """As the latest regular turn used them: what its model was offered."""

    is_turn_open: bool = False
    """The latest turn has neither response nor failure."""

    prompt: llm_pb2.BlobRef | None = None
    """Prompt of the latest turn; None where the next turn must write one."""

    turns: int = 0
    usage: llm_pb2.Usage = field(default_factory=llm_pb2.Usage)
    """Of all attempts, failed ones included where the provider counted them."""

    usage_by_model: PMap[str, llm_pb2.Usage] = field(default_factory=pmap)
    """The same by the model that was asked: what costs are made from."""

    recorded_outcomes: int = 0
    """Responses and failures of regular turns."""

    recorded_compactions: int = 0
    """Responses and failures of compaction turns."""

    is_compaction_asked: bool = False
    """The next turn is a compaction: a request did not fit, or somebody asked."""

    compaction_failures: int = 0
    """Failed requests for a summary in a row."""

    is_compacted: bool = False
    """No regular turn was answered since the latest compaction."""

    fallback_from: llm_pb2.Failure | None = None
    """Why the fallback provider is asked; None while the first one is."""

    cut_off_answers: int = 0
    """Answers in a row that ended at the output limit without a call."""

    stall: Stall = field(default_factory=Stall)

    available: int = 0
    """External inputs, heartbeats and final results so far."""

    snapshot: int = 0
    """`available` when the latest regular turn was recorded."""

    delivered: int = 0
    """`snapshot` of the latest regular turn that was answered."""

    stop: StopRequest | None = None
    failure: item_pb2.TurnFailure | None = None
    provider_waits: int = 0
    """Failures in a row that the session goes on from by itself."""

    crashes: int = 0
    """Crash inputs in a row."""

    is_held: bool = False
    """A fork that nobody has spoken to yet: starts nothing by itself."""

    wants_turn: bool = False
    """A retry asked for a turn whatever is pending."""

    revival_sequence: int = 0
    """Latest item that asks for work by a person: an external input, a retry or a change of settings."""

    @property
    def pending(self) -> int:
        """How much the model has not been shown in an answered turn."""
        return self.available - self.delivered

    @property
    def has_work(self) -> bool:
        """Whether a turn is wanted: something is to be delivered, or the latest turn has no end."""
        is_regular_open = self.is_turn_open and not self.is_compacting
        return self.pending > 0 or self.wants_turn or self.is_compaction_asked or is_regular_open

    @property
    def is_compacting(self) -> bool:
        """Whether the latest turn is a compaction."""
        return self.latest_turn is not None and self.latest_turn.kind == item_pb2.TURN_KIND_COMPACTION

    def falls_back(self, failure: llm_pb2.Failure) -> bool:
        """Return whether a failure of the latest turn lets the fallback provider be asked."""
        is_possible = bool(self.settings.fallback_provider) and self.fallback_from is None
        return is_possible and failure.error_class in PROVIDER_FAILURES

    @property
    def is_stop_complete(self) -> bool:
        """Whether nothing is left of what the stop has to end or to wait for."""
        if self.stop is None or self.calls:
            return False
        if self.stop.mode == item_pb2.STOP_MODE_HARD:
            return True
        has_failed_for_good = self.failure is not None and not self.failure.HasField("resume_time")
        return has_failed_for_good or not self.has_work

    @property
    def is_hard_stopping(self) -> bool:
        """Whether a HARD stop is under way or complete: nothing is started."""
        return self.stop is not None and self.stop.mode == item_pb2.STOP_MODE_HARD

    @property
    def is_over_recovery_limit(self) -> bool:
        """Whether the session fails for having crashed again and again."""
        return self.crashes >= RECOVERY_LIMIT

    def unsettled(self) -> Iterator[operation_pb2.Operation]:
        """Yield operations that are not terminal: the harness's own, then those of calls in the model's order."""
        return iter(sorted((one for one in self.operations.values() if not is_terminal(one)), key=self._place))

    @property
    def inspection_id(self) -> str:
        """ID of the workspace inspection that the latest revival would ask for."""
        return f"{self.session_uid}-i{self.revival_sequence}"

    @property
    def inspection(self) -> operation_pb2.InspectWorkspaceState | None:
        """What the newest completed inspection found; None before there is one."""
        done = [
            one
            for one in self.operations.values()
            if one.type == "inspect_workspace" and one.status == operation_pb2.OPERATION_STATUS_COMPLETED
        ]
        if not done:
            return None
        return max(done, key=_time_and_number).inspect_workspace

    def _place(self, operation: operation_pb2.Operation) -> tuple[int, int]:
        opened = self.calls.get(operation.call_id)
        if opened is None or operation.operation_id not in opened.operation_ids:
            return -1, 0
        return opened.order, opened.operation_ids.index(operation.operation_id)


def _time_and_number(operation: operation_pb2.Operation) -> tuple[int, int, str]:
    """Order operations of one kind; IDs end in a number without leading zeros, so that a longer one is a later one."""
    return operation.create_time.ToNanoseconds(), len(operation.operation_id), operation.operation_id


def initial_state(session: session_pb2.Session) -> SessionState:
    """Return the state of a session before its first item."""
    return SessionState(
        session_id=session.session_id,
        session_uid=session.session_uid,
        settings=session.initial_settings,
        create_time=instant(session.create_time),
    )
