"""What must hold of a session after every step, whatever happened: checked beside the code that decides, not by it."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from google.protobuf.message import Message

from harness.context_builder import next_request, rebased
from harness.context_builder.compaction import request_entries
from harness.context_builder.entries import Placed, chain
from harness.coordinator.apply import apply, apply_all
from harness.coordinator.protocol import Decision
from harness.coordinator.state import SessionState, initial_state
from harness.operations import is_terminal
from harness.session_store.invariants import (
    CallFacts,
    CommitPlan,
    Facts,
    Head,
    OperationFacts,
    SeenInput,
    TurnFacts,
    plan_commit,
)
from harness.session_store.validation import check_commit
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

Change = item_pb2.Item | operation_pb2.Operation

_BREAKS = frozenset(
    {
        item_pb2.CONTEXT_CHANGE_KIND_PREFIX_BREAK,
        item_pb2.CONTEXT_CHANGE_KIND_COMPACTED,
        item_pb2.CONTEXT_CHANGE_KIND_OMITTED,
    }
)


def frozen(value: object) -> object:
    """Return an image of a value that no later mutation of it changes; equal for equal values."""
    if isinstance(value, Message):
        return type(value).__name__, value.SerializeToString(deterministic=True)
    if dataclasses.is_dataclass(value):
        return tuple((field.name, frozen(getattr(value, field.name))) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return tuple(sorted((key, frozen(one)) for key, one in value.items()))
    if isinstance(value, AbstractSet):
        return tuple(sorted(value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(frozen(one) for one in value)
    return value


class StoreRules:
    """Checks each commit by the store's own rules, and knows what a store would know."""

    def __init__(self, session_id: str) -> None:
        """Begin with an empty session."""
        self._session_id = session_id
        self._head = Head(last_sequence=0, latest_turn_id="", is_turn_open=False)
        self._turns: dict[str, TurnFacts] = {}
        self._calls: dict[str, CallFacts] = {}
        self._operations: dict[str, OperationFacts] = {}
        self._inputs: dict[str, SeenInput] = {}
        self._blob_sizes: dict[str, int] = {}
        self._commits = 0

    def commit(self, decision: Decision) -> None:
        """Fail with the rule that a decision's commit breaks."""
        self._commits += 1
        for source in decision.blobs:
            self._blob_sizes[source.blob.digest] = source.blob.size_bytes
        request = store_pb2.CommitRequest(
            session_id=self._session_id,
            commit_id=f"1-{self._commits}",
            epoch=1,
            expected_sequence=self._head.last_sequence,
            items=decision.items,
            operations=decision.operations,
            blobs=[source.blob for source in decision.blobs],
            rest=decision.rest,
        )
        check_commit(request)
        facts = Facts(
            turns=self._turns,
            calls=self._calls,
            operations=self._operations,
            inputs=self._inputs,
            blob_sizes=self._blob_sizes,
        )
        self._adopt(plan_commit(self._head, facts, request), request)

    def _adopt(self, plan: CommitPlan, request: store_pb2.CommitRequest) -> None:
        before = self._head.last_sequence
        self._head = plan.head
        for turn_id, (_, kind) in plan.new_turns.items():
            self._turns[turn_id] = TurnFacts(kind=kind, is_answered=False)
        for turn_id in plan.answered_turns:
            self._turns[turn_id] = dataclasses.replace(self._turns[turn_id], is_answered=True)
        for call_id, change in plan.calls.items():
            self._calls[call_id] = CallFacts(
                turn_id=change.turn_id,
                operation_ids=tuple(change.operation_ids),
                is_final=change.final_sequence > 0,
            )
        for input_id, sequence in plan.inputs.items():
            message = request.items[sequence - before - 1].input
            self._inputs[input_id] = SeenInput(sequence=sequence, message=message)
        for one in plan.operations:
            operation = one.operation
            self._operations[operation.operation_id] = OperationFacts(
                type=operation.type,
                type_version=operation.type_version,
                status=operation.status,
                step=operation.step,
                call_id=operation.call_id,
            )


def loaded_state(record: session_pb2.Session, changes: Sequence[Change]) -> SessionState:
    """Return the state as a fresh process reads it: all items, then the newest states of what is unsettled."""
    state = initial_state(record)
    newest: dict[str, operation_pb2.Operation] = {}
    final: set[str] = set()
    for change in changes:
        if isinstance(change, operation_pb2.Operation):
            newest[change.operation_id] = change
            continue
        state = apply(state, change)
        if change.tool_call_status.HasField("result"):
            final.add(change.tool_call_status.call_id)
    unsettled = (one for one in newest.values() if not (is_terminal(one) and one.call_id in final))
    return apply_all(state, unsettled)


def scrambled(changes: Sequence[Change], rng: random.Random) -> list[Change]:
    """Return changes with operations dropped where a later state follows, and moved anywhere among the items."""
    items: list[Change] = [one for one in changes if isinstance(one, item_pb2.Item)]
    operations = [one for one in changes if isinstance(one, operation_pb2.Operation)]
    last = {one.operation_id: index for index, one in enumerate(operations)}
    kept = [one for index, one in enumerate(operations) if last[one.operation_id] == index or rng.random() < 0.5]
    rng.shuffle(kept)
    result = list(items)
    for operation in kept:
        result.insert(rng.randint(0, len(result)), operation)
    return result


def assert_conversation_is_legal(entries: Sequence[llm_pb2.ContextEntry]) -> None:
    """Fail where a call lacks its one result directly behind the response that made it, in the order of the calls."""
    expected: list[str] = []
    seen: set[str] = set()
    for entry in entries:
        if entry.WhichOneof("entry") == "tool_result":
            assert expected, f"result of {entry.tool_result.call_id!r} behind no call"
            assert entry.tool_result.call_id == expected.pop(0), "results are not in the order of the calls"
            assert entry.tool_result.parts, "a result shows nothing"
            continue
        assert not expected, f"no results of {expected} directly behind their response"
        if entry.WhichOneof("entry") == "assistant":
            assert entry.assistant.items, "an assistant entry is empty"
            expected = [one.tool_call.call_id for one in entry.assistant.items if one.HasField("tool_call")]
            assert not seen & set(expected), "a call ID is used twice"
            seen.update(expected)
        else:
            assert entry.user.parts, "a user entry is empty"
    assert not expected, f"no results of {expected}"


class TurnsSent:
    """Follows what the model is sent, turn by turn."""

    def __init__(self) -> None:
        """Begin with nothing sent."""
        self._sent: list[bytes] = []
        self.answered: list[Placed] = []
        """What the latest answered turn was sent."""

        self.covered: set[int] = set()
        """Items that were shown in an answered turn and then replaced by a summary."""

        self._latest: list[Placed] = []
        self._is_regular = True

    def follow(self, state: SessionState, decision: Decision) -> None:
        """Check every turn of a decision, and note which was answered."""
        for item in decision.items:
            if item.HasField("model_response") and self._is_regular:
                self.answered = self._latest
            if item.HasField("compaction"):
                self._check_compaction(state, item)
            if item.HasField("turn"):
                # A decision holds one turn at most, and nothing but operations behind it.
                self._is_regular = item.turn.kind == item_pb2.TURN_KIND_REGULAR
                if self._is_regular:
                    self._check_turn(state, item.turn)
                else:
                    self._check_compaction_turn(state, item.turn)

    def _check_turn(self, state: SessionState, turn: item_pb2.Turn) -> None:
        placed = list(state.context.submitted.entries)
        assert_conversation_is_legal([one.entry for one in placed])
        assert chain(bytes.fromhex(turn.prompt.digest), placed).hex() == turn.context_digest
        sent = [one.entry.SerializeToString(deterministic=True) for one in placed]
        if not any(change.kind in _BREAKS for change in turn.changes):
            assert sent[: len(self._sent)] == self._sent, "the sent prefix changed and no break is recorded"
        self._sent = sent
        self._latest = placed

    def _check_compaction_turn(self, state: SessionState, turn: item_pb2.Turn) -> None:
        base = rebased(state.context, provider=turn.provider, model=turn.model, prompt_digest=turn.prompt.digest)
        entries = request_entries(base.entries, turn.changes)
        assert_conversation_is_legal([one.entry for one in entries])
        assert chain(bytes.fromhex(turn.prompt.digest), entries).hex() == turn.context_digest

    def _check_compaction(self, state: SessionState, item: item_pb2.Item) -> None:
        left = {one.entry.source_sequence for one in state.context.submitted.entries}
        self.covered |= {one.entry.source_sequence for one in self.answered} - left
        assert item.sequence in left, "the summary is not shown"


def assert_shown_exactly_once(
    placed: Sequence[Placed], items: Sequence[item_pb2.Item], covered: AbstractSet[int] = frozenset()
) -> None:
    """Fail where an input or a result is missing from a conversation, or in it twice; summaries cover some."""
    wanted: set[int] = set()
    omitted: set[int] = set(covered)
    for item in items:
        message = item.input
        is_heartbeat = message.control.WhichOneof("control") == "heartbeat"
        if message.HasField("content") or is_heartbeat or item.tool_call_status.HasField("result"):
            wanted.add(item.sequence)
        omitted.update(
            change.source_sequence
            for change in item.turn.changes
            if change.kind == item_pb2.CONTEXT_CHANGE_KIND_OMITTED
        )
    shown = Counter(
        one.entry.source_sequence
        for one in placed
        if one.kind not in {"response", "summary"} and not one.entry.tool_result.is_placeholder
    )
    assert set(shown) - omitted == wanted - omitted
    assert max(shown.values(), default=1) == 1


def assert_counters_agree(state: SessionState) -> None:
    """Fail where more is delivered than there is."""
    assert 0 <= state.delivered <= state.snapshot <= state.available


def assert_same_request(live: SessionState, replayed: SessionState) -> None:
    """Fail where two states would send different bytes."""
    digest = live.prompt.digest if live.prompt is not None else ""
    settings = live.settings
    first, second = (
        next_request(one.context, provider=settings.provider, model=settings.model, prompt_digest=digest)
        for one in (live, replayed)
    )
    assert frozen(first) == frozen(second)
