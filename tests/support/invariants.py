"""What must hold of every history, whatever happened while it was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.operations import is_terminal
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


def check_history(
    items: Sequence[item_pb2.Item], operations: Sequence[operation_pb2.Operation], *, is_settled: bool = True
) -> None:
    """Fail with the rule that a history breaks. `is_settled`: the session rests, so that nothing may be open."""
    assert [item.sequence for item in items] == list(range(1, len(items) + 1)), "sequences have a gap"
    revisions = [item.revision for item in items]
    assert revisions == sorted(revisions), "revisions go back"
    _check_turns(items)
    _check_inputs(items)
    _check_calls(items, {one.operation_id: one for one in operations}, is_settled=is_settled)


def call_ids(items: Sequence[item_pb2.Item]) -> list[str]:
    """Return the calls that the model made, in order."""
    return [
        output.tool_call.call_id
        for item in items
        for output in item.model_response.output.items
        if output.HasField("tool_call")
    ]


def _check_turns(items: Sequence[item_pb2.Item]) -> None:
    latest = ""
    ended: set[str] = set()
    for item in items:
        if item.HasField("turn"):
            assert item.turn.previous_turn_id == latest, "turns form no chain"
            latest = item.turn.turn_id
        for turn_id in (item.model_response.turn_id, item.turn_failure.turn_id):
            if turn_id:
                assert turn_id == latest, "a response or failure belongs to another turn than the latest"
                assert turn_id not in ended, "a turn ended twice"
                ended.add(turn_id)


def _check_inputs(items: Sequence[item_pb2.Item]) -> None:
    counts = Counter(item.input.input_id for item in items if item.HasField("input"))
    assert not [key for key, count in counts.items() if count > 1], "an input is recorded twice"


def _check_calls(
    items: Sequence[item_pb2.Item], operations: dict[str, operation_pb2.Operation], *, is_settled: bool
) -> None:
    made = call_ids(items)
    assert len(made) == len(set(made)), "a call ID is used twice"
    responses = {
        output.tool_call.call_id: item.revision
        for item in items
        for output in item.model_response.output.items
        if output.HasField("tool_call")
    }
    first: dict[str, int] = {}
    finals: Counter[str] = Counter()
    for item in items:
        if not item.HasField("tool_call_status"):
            continue
        status = item.tool_call_status
        assert status.call_id in responses, "a status belongs to no call"
        first.setdefault(status.call_id, item.revision)
        if status.HasField("result"):
            finals[status.call_id] += 1
            for operation_id in status.operation_ids:
                assert is_terminal(operations[operation_id]), "a call is final, its operation is not"
        else:
            assert set(status.operation_ids) <= set(operations), "a status names unknown operations"
    assert first == responses, "a call's first status was not written with its response"
    assert all(count == 1 for count in finals.values()), "a call has two final results"
    if is_settled:
        assert set(finals) == set(made), "a call has no final result"


@dataclass(slots=True)
class WatchedHistory:
    """What one watcher was shown, over all its watches."""

    revision: int = 0
    """Where the next watch goes on."""

    items: list[item_pb2.Item] = field(default_factory=list)
    operations: dict[str, operation_pb2.Operation] = field(default_factory=dict)

    def take(self, change: store_pb2.WatchSessionResponse) -> None:
        """Add a message; fails where it repeats, goes back or leaves something out."""
        if change.items or change.operations:
            assert change.revision > self.revision, "a revision is repeated, or goes back"
        for item in change.items:
            assert item.sequence == len(self.items) + 1, "an item is missing, or shown twice"
            self.items.append(item)
        for operation in change.operations:
            before = self.operations.get(operation.operation_id)
            assert before is None or operation.step > before.step, "an operation goes back"
            self.operations[operation.operation_id] = operation
        self.revision = max(self.revision, change.revision)

    def check(self, items: Sequence[item_pb2.Item], operations: Sequence[operation_pb2.Operation]) -> None:
        """Fail where the watcher was shown anything else than what is stored."""
        assert self.items == list(items), "a watcher saw another history"
        shown = {one.operation_id: one for one in self.operations.values() if one.call_id}
        assert shown == {one.operation_id: one for one in operations}, "a watcher saw other operations"
