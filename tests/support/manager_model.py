"""What an operation manager has promised, told in a few dictionaries: the model beside which a real one is run."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.operations.engine import shrink
from harness.operations.operations import is_terminal
from unreal_agent.operation.v1 import operation_pb2

COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
FAILED = operation_pb2.OPERATION_STATUS_FAILED
CANCELED = operation_pb2.OPERATION_STATUS_CANCELED
AWAITING = operation_pb2.OPERATION_STATUS_AWAITING

NATURAL_ENDS = {"value": COMPLETED, "due": COMPLETED, "far": COMPLETED, "skill": FAILED, "bash": COMPLETED}
"""How an operation of each kind of the tests ends where nobody cancels it."""


@dataclass(slots=True)
class ModelOperation:
    """An operation that was accepted: nothing may make the manager forget it."""

    added: operation_pb2.Operation
    kind: str
    seen: operation_pb2.Operation
    """Newest state that anybody was shown."""

    is_canceled: bool = False
    """A cancellation or discard was answered."""

    is_discarded: bool = False
    is_buried: bool = False
    """The end was acknowledged or discarded: a tombstone answers."""

    acknowledged_step: int | None = 0
    """None: a kill may have lost the newest acknowledgement."""

    is_lazy: bool = False
    """The acknowledgement may be lost in a kill."""

    position: int = 0
    """Latest position in which an update came; 0: none came."""

    @property
    def session_id(self) -> str:
        """Whose it is."""
        return self.added.session_id

    @property
    def waits_for_ever(self) -> bool:
        """Return whether it ends only by a cancellation or by the clock."""
        return self.kind == "far" and not self.is_canceled

    def show(self, state: operation_pb2.Operation) -> None:
        """Compare a state that the manager showed with all that was shown before."""
        before = self.seen
        if self.is_buried:
            if not is_terminal(before):
                # It was discarded, and its end is told by nothing but the tombstone.
                assert is_terminal(state), f"a tombstone that is not over: {state}"
                self.seen = before = shrink(state)
            assert state == shrink(before), f"another tombstone than {before}: {state}"
            return
        assert state.step >= before.step, f"a step back from {before.step} to {state.step}"
        if is_terminal(before) or state.step == before.step:
            assert state == before, f"{before} was changed to {state}"
        for name in ("operation_id", "session_id", "type", "type_version", "effect_class", "call_id"):
            assert getattr(state, name) == getattr(self.added, name)
        self.seen = state
        if is_terminal(state):
            self._check_end(state)

    def _check_end(self, state: operation_pb2.Operation) -> None:
        allowed = {NATURAL_ENDS[self.kind]}
        if self.is_canceled:
            allowed.add(CANCELED)
        assert state.status in allowed, state
        assert state.HasField("end_time")
        assert (state.error.reason != "") == (state.status != COMPLETED)

    def bury(self) -> None:
        """Note that only a tombstone is left."""
        self.is_buried = True


@dataclass(slots=True)
class ManagerModel:
    """What a manager knows."""

    instance_id: str = ""
    operations: dict[str, ModelOperation] = field(default_factory=dict)
    canceled_before: dict[str, str] = field(default_factory=dict)
    """Session by the ID of each operation that was cancelled before it was added."""

    epochs: dict[str, int] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    made: int = 0

    def new_id(self, kind: str) -> str:
        """Return an operation ID that was not used yet."""
        self.made += 1
        return f"{kind}-{self.made}"

    def fence(self, session_id: str, epoch: int, owner: str | None = None) -> None:
        """Note a fence that was taken."""
        assert epoch >= self.epochs.get(session_id, 0)
        self.epochs[session_id] = epoch
        if owner is not None:
            self.owners[session_id] = owner

    def accept(self, added: operation_pb2.Operation, kind: str, answered: operation_pb2.Operation) -> None:
        """Note an operation that was accepted."""
        held = ModelOperation(added=added, kind=kind, seen=added)
        if added.operation_id in self.canceled_before:
            del self.canceled_before[added.operation_id]
            held.is_canceled = True
            assert (answered.status, answered.step) == (CANCELED, added.step + 1), "it was cancelled before"
        self.operations[added.operation_id] = held
        held.show(answered)

    def made_durable(self) -> None:
        """Note that something was written and waited for: what was submitted before it is written too."""
        for held in self.operations.values():
            held.is_lazy = False

    def missed(self, owner: str, after_position: int) -> tuple[set[str], set[str]]:
        """Return whose states a new watch must tell of, and whose it may tell of besides."""
        must: set[str] = set()
        may: set[str] = set()
        for operation_id, held in self.operations.items():
            is_wanted = owner in ("", self.owners.get(held.session_id, ""))
            if held.is_buried or held.is_discarded or not is_wanted or 0 < held.position <= after_position:
                continue
            is_known = held.acknowledged_step is not None and (held.position or after_position == 0)
            if held.acknowledged_step is not None and held.seen.step <= held.acknowledged_step:
                continue
            (must if is_known else may).add(operation_id)
        return must, may
