"""What goes into `decide` and what comes out: stimuli, volatile facts, effects, decisions. Values only.

Volatile facts stand beside the durable state, are never replayed and start empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from pyrsistent import PMap, PSet, pmap, pset

from harness.coordinator.coordinator import CoordinatorConfig
from harness.coordinator.state import SessionState
from harness.errors import HarnessError
from harness.llm import models
from harness.tools.registry import ToolRegistry
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What decisions depend on beside the session; fixed for the coordinator's life."""

    config: CoordinatorConfig
    tools: ToolRegistry
    window_tokens: Callable[[str], int]
    """Tokens that a model can take, by model; 0 where not known. Pure."""

    max_output_tokens: Callable[[str], int] = models.max_output_tokens
    """Tokens of its longest answer, by model; 0 where not known. Pure."""

    price: Callable[[str], models.Price | None] = models.price
    """What a model costs; None where not known. Pure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The moment of a decision."""

    wall_time: datetime
    monotonic_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The session was read; nothing of it runs here yet."""

    was_taken_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class InputArrived:
    """Somebody submits an input: valid, normalised, its blobs apart."""

    ticket: int
    """Names the submission in the decision's answers."""

    message: item_pb2.Input
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    """Content by digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationReported:
    """A manager reports an operation's newest state."""

    operation: operation_pb2.Operation
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    """Content by digest; what is missing is fetched before the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRefused:
    """A manager did not accept an operation; it never started."""

    operation_id: str
    error: operation_pb2.OperationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerConnected:
    """A manager answers, as this instance."""

    manager_name: str
    instance_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerLost:
    """A manager cannot be reached. Says nothing about its operations."""

    manager_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswered:
    """A request ended with a response."""

    turn_id: str
    output: llm_pb2.ModelOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFailed:
    """A request ended without response."""

    turn_id: str
    failure: llm_pb2.Failure
    attempts: tuple[llm_pb2.Attempt, ...] = ()


Stimulus = (
    Loaded
    | InputArrived
    | OperationReported
    | OperationRefused
    | ManagerConnected
    | ManagerLost
    | ModelAnswered
    | ModelFailed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Volatile:
    """Facts about this process, not about the session."""

    request_turn_id: str = ""
    """Turn whose request is in flight; empty if none."""

    grace_until_s: float | None = None
    """Results of the latest response are gathered until then; None where no grace runs."""

    heartbeat_since_s: float | None = None
    """Since when nothing but calls has been running."""

    instances: PMap[str, str] = field(default_factory=pmap)
    """Instance by name, of managers that answer."""

    lost_since_s: PMap[str, float] = field(default_factory=pmap)
    """Since when by name, of managers that don't."""

    reported: PMap[str, operation_pb2.Operation] = field(default_factory=pmap)
    """Intermediate states that wait for a commit to ride on."""

    reported_since_s: float | None = None
    cancels_sent: PSet[str] = field(default_factory=pset)
    """Operations whose cancellation was sent over the present connection."""

    rest: session_pb2.Rest | None = None
    """As the latest commit left it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRequest:
    """Ask the model for the latest turn's response."""

    turn_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Close the request in flight."""

    turn_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Hand operations to their manager."""

    manager_name: str
    instance_id: str
    operations: tuple[operation_pb2.Operation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCancel:
    """Tell a manager to cancel an operation."""

    manager_name: str
    operation_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge:
    """Tell a manager that a terminal state is recorded, or that the operation ended otherwise."""

    manager_name: str
    operation_id: str
    step: int
    is_discarded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveReport:
    """A report of an operation that the state no longer holds: look it up in the store and acknowledge it."""

    operation: operation_pb2.Operation


Effect = SendRequest | CancelRequest | Dispatch | SendCancel | Acknowledge | ResolveReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a submission is told once the commit is durable."""

    ticket: int
    sequence: int
    is_duplicate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a submission is told at once; nothing of it is recorded."""

    ticket: int
    error: HarnessError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSource:
    """Where the content of a blob is that a commit names for the first time."""

    blob: llm_pb2.BlobRef
    data: bytes | None = None
    """The content; None where it must be fetched from the operation's manager."""

    operation: operation_pb2.Operation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A commit, and what is to be done once it is durable. Nothing is done before; nothing at all where it fails."""

    items: tuple[item_pb2.Item, ...]
    operations: tuple[operation_pb2.Operation, ...]
    blobs: tuple[BlobSource, ...]
    rest: session_pb2.Rest
    next_state: SessionState
    next_volatile: Volatile
    effects: tuple[Effect, ...]
    answers: tuple[Answer | Refusal, ...]
    wake_s: float | None
    """Monotonic time at which to decide again if nothing happens; None: never."""

    @property
    def has_commit(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.items or self.operations)
