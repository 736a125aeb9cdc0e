"""What a history must always satisfy, whoever writes to it. Pure: every engine of the store calls these functions.

A commit is checked in three steps, so that an engine of any kind (blocking or not) can reuse them: `needs_of` says
which facts the check needs, the engine reads them inside the writing transaction, and `plan_commit` either refuses or
says what to write. Nothing here reads a history: a commit costs the same at any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn, cast

from harness.errors import AlreadyExistsError, FailedPreconditionError
from harness.inbox import fingerprint
from harness.primitives.messages import find_messages
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

TERMINAL_STATUSES: Final = frozenset(
    {
        operation_pb2.OPERATION_STATUS_COMPLETED,
        operation_pb2.OPERATION_STATUS_FAILED,
        operation_pb2.OPERATION_STATUS_CANCELED,
        operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Where a session stands before a commit."""

    last_sequence: int
    latest_turn_id: str
    """Empty where there is no turn; may be inherited."""

    is_turn_open: bool
    """Whether the latest turn is the session's own and has neither response nor failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """A turn of the session, own or inherited."""

    kind: item_pb2.TurnKind.ValueType
    is_answered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """A call of the session, own or inherited."""

    turn_id: str
    operation_ids: tuple[str, ...]
    """Operations that its statuses named, in order."""

    is_final: bool
    """True for every inherited call: what was open at the cut was closed by the fork."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFacts:
    """An operation of the session."""

    type: str
    type_version: int
    status: operation_pb2.OperationStatus.ValueType
    step: int
    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenInput:
    """An input whose ID a commit uses again."""

    sequence: int
    message: item_pb2.Input


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Keys of the facts that a commit's check needs."""

    turn_ids: frozenset[str]
    call_ids: frozenset[str]
    operation_ids: frozenset[str]
    """Beside these: the operations of every call found."""

    input_ids: frozenset[str]
    digests: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the store holds under the keys asked for; what it does not hold is left out."""

    turns: Mapping[str, TurnFacts] = field(default_factory=dict)
    calls: Mapping[str, CallFacts] = field(default_factory=dict)
    operations: Mapping[str, OperationFacts] = field(default_factory=dict)
    inputs: Mapping[str, SeenInput] = field(default_factory=dict)
    blob_sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of blobs that the session can read, by digest."""


@dataclass(slots=True, kw_only=True)
class CallChange:
    """A call that a commit makes or changes."""

    call_id: str
    turn_id: str
    response_sequence: int
    """0 where the call was there before."""

    first_status_sequence: int = 0
    final_sequence: int = 0
    """0 while the call is open."""

    operation_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationChange:
    """An operation that a commit makes or changes."""

    operation: operation_pb2.Operation
    is_new: bool
    is_settled: bool
    """Terminal, and its call is final. An operation without call stays: a coordinator needs its outcome."""


@dataclass(slots=True, kw_only=True)
class CommitPlan:
    """What a commit that passed its check writes beside its items."""

    head: Head
    new_turns: dict[str, tuple[int, item_pb2.TurnKind.ValueType]] = field(default_factory=dict)
    """Sequence and kind by turn ID."""

    answered_turns: dict[str, int] = field(default_factory=dict)
    """Sequence of the response by turn ID."""

    calls: dict[str, CallChange] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    """Sequence by input ID."""

    operations: list[OperationChange] = field(default_factory=list)
    settled_operation_ids: list[str] = field(default_factory=list)
    """Stored operations that become settled without a change of their own."""

    blob_references: dict[str, int] = field(default_factory=dict)
    """By digest: sequence of the first item of this commit that names it, or the last before it for an operation."""


def needs_of(request: store_pb2.CommitRequest) -> Needs:
    """Return the keys of the facts that `plan_commit` needs."""
    turn_ids, call_ids, input_ids = set[str](), set[str](), set[str]()
    operation_ids = {operation.operation_id for operation in request.operations}
    call_ids.update(operation.call_id for operation in request.operations if operation.call_id)
    for item in request.items:
        match item.WhichOneof("item"):
            case "input":
                input_ids.add(item.input.input_id)
            case "turn":
                turn_ids.add(item.turn.turn_id)
            case "compaction":
                turn_ids.add(item.compaction.turn_id)
            case "model_response":
                call_ids.update(call.call_id for call in calls_of(item.model_response))
            case "tool_call_status":
                call_ids.add(item.tool_call_status.call_id)
                operation_ids.update(item.tool_call_status.operation_ids)
            case _:
                pass  # needs the head only
    digests = {blob.digest for message in _records(request) for blob in blobs_in(message)}
    digests.update(blob.digest for blob in request.blobs)
    return Needs(
        turn_ids=frozenset(turn_ids),
        call_ids=frozenset(call_ids),
        operation_ids=frozenset(operation_ids),
        input_ids=frozenset(input_ids),
        digests=frozenset(digests),
    )


def plan_commit(head: Head, facts: Facts, request: store_pb2.CommitRequest) -> CommitPlan:
    """Check a commit against its session and say what it writes.

    Args:
        head: Where the session stands; the caller has checked that `expected_sequence` is its last.
        facts: What `needs_of(request)` asked for, read in the writing transaction.
        request: A commit that passed `validation.check_commit`.

    Raises:
        AlreadyExistsError: INPUT_ID_CONFLICT, DUPLICATE_INPUT; `metadata["sequence"]` says where the first one is.
        FailedPreconditionError: INVARIANT_VIOLATED; `metadata["rule"]` names the rule.
    """
    check = _CommitCheck(head, facts, request)
    for item in request.items:
        check.add_item(item)
    return check.finish()


def plan_import(head: Head, facts: Facts, items: Iterable[item_pb2.Item]) -> CommitPlan:
    """Check the items of one commit of an exported history and say what importing them writes.

    The rules are those of `plan_commit`, except what needs other records: an export's operations and blobs come behind
    its items, an inherited call's operations not at all, and fork items are part of the history.
    """
    request = store_pb2.CommitRequest(expected_sequence=head.last_sequence, items=items)
    check = _ImportCheck(head, facts, request)
    for item in request.items:
        check.add_item(item)
    return check.finish()


def calls_of(response: item_pb2.ModelResponse) -> list[llm_pb2.ToolCall]:
    """Return a response's calls in the model's order."""
    return [output.tool_call for output in response.output.items if output.WhichOneof("item") == "tool_call"]


def blobs_in(message: item_pb2.Item | operation_pb2.Operation) -> Iterable[llm_pb2.BlobRef]:
    """Return every reference to a blob inside an item or an operation."""
    # find_messages yields messages of the type asked for.
    return cast("Iterable[llm_pb2.BlobRef]", find_messages(message, llm_pb2.BlobRef.DESCRIPTOR))


def _records(request: store_pb2.CommitRequest) -> Iterable[item_pb2.Item | operation_pb2.Operation]:
    yield from request.items
    yield from request.operations


def violate(rule: str, problem: str) -> NoReturn:
    """Refuse a write that breaks a rule of the history."""
    raise FailedPreconditionError(
        f"the commit breaks the rule {rule!r}: {problem}", reason="INVARIANT_VIOLATED", metadata={"rule": rule}
    )


def _require(holds: bool, rule: str, problem: str) -> None:
    if not holds:
        violate(rule, problem)


class _CommitCheck:
    """One commit's check: walks its items in order, then its operations."""

    def __init__(self, head: Head, facts: Facts, request: store_pb2.CommitRequest) -> None:
        self._head = head
        self._facts = facts
        self._request = request
        self._plan = CommitPlan(head=head)
        self._sent = {operation.operation_id: operation for operation in request.operations}
        self._named: set[str] = set()
        """Operations named by statuses of this commit."""
        _require(len(self._sent) == len(request.operations), "operation_once", "an operation occurs twice")

    def add_item(self, item: item_pb2.Item) -> None:
        sequence = self._head.last_sequence + 1
        if item.sequence not in (0, sequence):
            violate("gapless_sequence", f"an item has sequence {item.sequence}, the next is {sequence}")
        self._head = replace(self._head, last_sequence=sequence)
        match item.WhichOneof("item"):
            case "input":
                self._add_input(item.input, sequence)
            case "turn":
                self._add_turn(item.turn, sequence)
            case "model_response":
                self._add_response(item.model_response, sequence)
            case "tool_call_status":
                self._add_status(item.tool_call_status, sequence)
            case "turn_failure":
                self._end_turn(item.turn_failure.turn_id, "a failure")
            case "compaction":
                self._add_compaction(item.compaction, sequence)
            case _:
                self._add_fork()
        for blob in blobs_in(item):
            self._reference(blob, sequence)

    def finish(self) -> CommitPlan:
        self._require_first_statuses()
        for operation in self._request.operations:
            self._add_operation(operation)
        for change in self._plan.calls.values():
            if change.final_sequence:
                self._settle_stored_operations(change)
        for blob in self._request.blobs:
            self._reference(blob, self._request.expected_sequence)
        self._plan.head = self._head
        return self._plan

    def _add_fork(self) -> None:
        violate("fork_by_store", "only ForkSession writes a fork item")

    def _add_input(self, message: item_pb2.Input, sequence: int) -> None:
        input_id = message.input_id
        seen = self._facts.inputs.get(input_id)
        if seen is None and input_id in self._plan.inputs:
            first = self._plan.inputs[input_id]
            earlier = self._request.items[first - self._request.expected_sequence - 1]
            seen = SeenInput(sequence=first, message=earlier.input)
        if seen is not None:
            self._refuse_seen_input(message, seen)
        self._plan.inputs[input_id] = sequence

    def _refuse_seen_input(self, message: item_pb2.Input, seen: SeenInput) -> NoReturn:
        is_same = fingerprint(message) == fingerprint(seen.message)
        raise AlreadyExistsError(
            f"input {message.input_id!r} is in the session at sequence {seen.sequence}, with "
            + ("the same content" if is_same else "other content"),
            reason="DUPLICATE_INPUT" if is_same else "INPUT_ID_CONFLICT",
            metadata={"sequence": str(seen.sequence), "input_id": message.input_id},
        )

    def _add_turn(self, turn: item_pb2.Turn, sequence: int) -> None:
        _require(
            turn.previous_turn_id == self._head.latest_turn_id,
            "turn_chain",
            f"turn {turn.turn_id!r} follows {turn.previous_turn_id!r}, the latest is {self._head.latest_turn_id!r}",
        )
        is_known = turn.turn_id in self._facts.turns or turn.turn_id in self._plan.new_turns
        _require(not is_known, "turn_once", f"turn {turn.turn_id!r} exists")
        # Statuses stand behind their response, so that a cut can move behind them all.
        self._require_first_statuses()
        self._plan.new_turns[turn.turn_id] = (sequence, turn.kind)
        self._head = replace(self._head, latest_turn_id=turn.turn_id, is_turn_open=True)

    def _end_turn(self, turn_id: str, ending: str) -> None:
        is_latest = self._head.is_turn_open and turn_id == self._head.latest_turn_id
        if not is_latest:
            state = "open" if self._head.is_turn_open else "ended or inherited"
            latest = f"the latest turn is {self._head.latest_turn_id!r} ({state})"
            violate("response_to_latest_turn", f"{ending} belongs to turn {turn_id!r}; {latest}")
        self._head = replace(self._head, is_turn_open=False)

    def _add_response(self, response: item_pb2.ModelResponse, sequence: int) -> None:
        self._end_turn(response.turn_id, "a response")
        self._plan.answered_turns[response.turn_id] = sequence
        for call in calls_of(response):
            is_known = call.call_id in self._facts.calls or call.call_id in self._plan.calls
            _require(not is_known, "call_once", f"call {call.call_id!r} exists")
            self._plan.calls[call.call_id] = CallChange(
                call_id=call.call_id, turn_id=response.turn_id, response_sequence=sequence
            )

    def _add_status(self, status: item_pb2.ToolCallStatus, sequence: int) -> None:
        change = self._change_of_call(status)
        is_first = change.response_sequence > 0 and not change.first_status_sequence
        if is_first:
            change.first_status_sequence = sequence
        change.operation_ids.extend(one for one in status.operation_ids if one not in change.operation_ids)
        self._check_operations_of_status(status, change, is_first=is_first)
        if status.HasField("result"):
            change.final_sequence = sequence

    def _check_operations_of_status(
        self, status: item_pb2.ToolCallStatus, change: CallChange, *, is_first: bool
    ) -> None:
        if is_first:
            introduced = {one.operation_id for one in self._request.operations if one.call_id == status.call_id}
            introduced -= self._facts.operations.keys()
            _require(
                set(status.operation_ids) == introduced,
                "first_status_introduces_operations",
                f"the first status of call {status.call_id!r} names {sorted(status.operation_ids)}, "
                f"the commit makes {sorted(introduced)} for it",
            )
        for operation_id in status.operation_ids:
            _require(
                self._call_of_operation(operation_id) == status.call_id,
                "status_names_own_operations",
                f"call {status.call_id!r} names operation {operation_id!r}, which is not its own",
            )
        self._named.update(status.operation_ids)
        if status.HasField("result"):
            for operation_id in change.operation_ids:
                _require(
                    self._is_terminal(operation_id),
                    "final_status_needs_terminal_operations",
                    f"call {status.call_id!r} is final while operation {operation_id!r} is not terminal",
                )

    def _change_of_call(self, status: item_pb2.ToolCallStatus) -> CallChange:
        """Return a call as far as this commit has come, or refuse the status."""
        change = self._plan.calls.get(status.call_id)
        if change is None:
            known = self._facts.calls.get(status.call_id)
            if known is None:
                violate("status_of_known_call", f"call {status.call_id!r} is unknown")
            _require(not known.is_final, "one_final_status", f"call {status.call_id!r} is final")
            change = CallChange(
                call_id=status.call_id,
                turn_id=known.turn_id,
                response_sequence=0,
                operation_ids=list(known.operation_ids),
            )
            self._plan.calls[status.call_id] = change
        _require(not change.final_sequence, "one_final_status", f"call {status.call_id!r} is final")
        _require(
            status.turn_id == change.turn_id,
            "status_of_known_call",
            f"call {status.call_id!r} belongs to turn {change.turn_id!r}, not {status.turn_id!r}",
        )
        return change

    def _add_compaction(self, compaction: item_pb2.Compaction, sequence: int) -> None:
        turn = self._facts.turns.get(compaction.turn_id)
        if turn is not None:
            kind, is_answered = turn.kind, turn.is_answered
        elif compaction.turn_id in self._plan.new_turns:
            kind, is_answered = self._plan.new_turns[compaction.turn_id][1], False
        else:
            violate("compaction_of_answered_turn", f"turn {compaction.turn_id!r} is unknown")
        is_answered = is_answered or compaction.turn_id in self._plan.answered_turns
        _require(
            kind == item_pb2.TURN_KIND_COMPACTION and is_answered,
            "compaction_of_answered_turn",
            f"turn {compaction.turn_id!r} is no answered compaction turn",
        )
        _require(
            compaction.through_sequence < sequence,
            "compaction_of_past",
            f"item {sequence} compacts up to {compaction.through_sequence}",
        )

    def _require_first_statuses(self) -> None:
        for change in self._plan.calls.values():
            is_missing = change.response_sequence and not change.first_status_sequence
            _require(
                not is_missing,
                "first_status_with_response",
                f"call {change.call_id!r} has no status behind its response",
            )

    def _add_operation(self, operation: operation_pb2.Operation) -> None:
        known = self._facts.operations.get(operation.operation_id)
        if known is None:
            is_introduced = not operation.call_id or operation.operation_id in self._named
            _require(
                is_introduced,
                "operation_named_by_status",
                f"operation {operation.operation_id!r} is new and no status of this commit names it",
            )
        else:
            _require_successor(operation, known)
        is_terminal = operation.status in TERMINAL_STATUSES
        self._plan.operations.append(
            OperationChange(
                operation=operation,
                is_new=known is None,
                is_settled=is_terminal and bool(operation.call_id) and self._is_call_final(operation.call_id),
            )
        )
        for blob in blobs_in(operation):
            self._reference(blob, self._request.expected_sequence)

    def _settle_stored_operations(self, change: CallChange) -> None:
        self._plan.settled_operation_ids.extend(one for one in change.operation_ids if one not in self._sent)

    def _reference(self, blob: llm_pb2.BlobRef, sequence: int) -> None:
        size_bytes = self._facts.blob_sizes.get(blob.digest)
        _require(size_bytes is not None, "blob_is_put", f"blob {blob.digest} was not put")
        _require(
            size_bytes == blob.size_bytes,
            "blob_size",
            f"blob {blob.digest} has {size_bytes} bytes, the commit says {blob.size_bytes}",
        )
        self._plan.blob_references.setdefault(blob.digest, sequence)

    def _is_call_final(self, call_id: str) -> bool:
        change = self._plan.calls.get(call_id)
        if change is not None:
            return change.final_sequence > 0
        known = self._facts.calls.get(call_id)
        return known is not None and known.is_final

    def _is_terminal(self, operation_id: str) -> bool:
        sent = self._sent.get(operation_id)
        if sent is not None:
            return sent.status in TERMINAL_STATUSES
        return self._facts.operations[operation_id].status in TERMINAL_STATUSES

    def _call_of_operation(self, operation_id: str) -> str | None:
        sent, known = self._sent.get(operation_id), self._facts.operations.get(operation_id)
        if sent is not None:
            return sent.call_id
        return None if known is None else known.call_id


class _ImportCheck(_CommitCheck):
    """The check of an imported commit."""

    def _add_fork(self) -> None:
        self._head = replace(self._head, is_turn_open=False)

    def _check_operations_of_status(
        self, status: item_pb2.ToolCallStatus, change: CallChange, *, is_first: bool
    ) -> None:
        pass  # they come behind the items

    def _reference(self, blob: llm_pb2.BlobRef, sequence: int) -> None:
        self._plan.blob_references.setdefault(blob.digest, sequence)


def _require_successor(operation: operation_pb2.Operation, known: OperationFacts) -> None:
    name = f"operation {operation.operation_id!r}"
    _require(
        (operation.type, operation.type_version) == (known.type, known.type_version),
        "operation_type_never_changes",
        f"{name} has type {known.type!r} version {known.type_version}",
    )
    _require(operation.call_id == known.call_id, "operation_call_never_changes", f"{name} is of {known.call_id!r}")
    _require(
        known.status not in TERMINAL_STATUSES,
        "nothing_follows_terminal_state",
        f"{name} is {operation_pb2.OperationStatus.Name(known.status)}",
    )
    _require(operation.step > known.step, "steps_only_grow", f"{name} is at step {known.step}, got {operation.step}")
