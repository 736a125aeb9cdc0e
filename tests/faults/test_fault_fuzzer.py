"""The n-th call of each dependency fails: nothing that depends on it happens, and nothing is lost or done twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from harness.coordinator import CoordinatorConfig
from tests.support.faults import Fault, FaultyCalls
from tests.support.invariants import call_ids, check_history
from tests.support.world import Script, World, bash, embedded_world, scripted
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

COUNTED = "echo $UNREAL_AGENT_OPERATION >> effects"
SCRIPT: Script = [
    {"text": "two at once", "tool_calls": [bash(f"{COUNTED}; echo one"), bash(f"{COUNTED}; sleep 0.2; echo two")]},
    {"text": "an unknown one", "tool_calls": [{"name": "Nope", "arguments": {}}, bash(f"{COUNTED}; echo three")]},
    {"text": "a slow one", "tool_calls": [bash(f"{COUNTED}; sleep 0.6; echo four")]},
    {"text": "it still runs"},
    {"text": "finished"},
]
CONFIG = CoordinatorConfig(grace_s=0.3, lease_s=3.0, intermediate_state_delay_s=0.1)
REST = frozenset({session_pb2.SESSION_STATE_IDLE, session_pb2.SESSION_STATE_FAILED, session_pb2.SESSION_STATE_STOPPED})


def faults() -> list[Fault]:
    """Return every fault of the short run."""
    found: list[Fault] = []
    for number in range(1, 9):
        found += [
            Fault(call="store.commit", number=number, is_full_disk=True),
            Fault(call="store.commit", number=number),
            Fault(call="store.commit", number=number, is_after=True),
        ]
    for number in range(1, 4):
        found += [Fault(call="manager.add_operations", number=number, is_after=after) for after in (False, True)]
        found += [Fault(call="manager.acknowledge_updates", number=number, is_after=after) for after in (False, True)]
        found += [Fault(call="model.respond", number=number, is_after=after) for after in (False, True)]
    found += [Fault(call="manager.watch_operations", number=1, is_after=after) for after in (False, True)]
    found += [Fault(call="store.put_blob", number=1, is_after=after) for after in (False, True)]
    found += [Fault(call="store.list_items", number=1), Fault(call="store.list_operations", number=1)]
    found += [Fault(call="store.acquire_lease", number=1), Fault(call="store.renew_lease", number=1)]
    return found


@pytest.mark.parametrize("fault", faults(), ids=lambda one: f"{one.call}-{one.number}-{_kind(one)}")
async def test_one_failed_call_loses_and_repeats_nothing(tmp_path: Path, fault: Fault) -> None:
    calls = FaultyCalls(fault=fault)
    async with embedded_world(
        tmp_path,
        calls.adapter(scripted(SCRIPT)),
        config=CONFIG,
        wrap_store=calls.store,
        wrap_manager=calls.manager,
    ) as world:
        await world.create()
        await _persist(world)
        await world.until_rest()
        await _finish(world)
        items, operations = await world.items(), await world.operations()
        assert calls.was_hit or fault.call == "store.renew_lease"
        check_history(items, operations)
        if not fault.call.startswith("model"):  # a recorded failure consumes an entry of the script
            assert len(call_ids(items)) == 5
        effects = Counter((world.workspace / "effects").read_text().split())
        started = [one.operation_id for one in operations if one.type == "bash"]
        assert effects == Counter(started), "a command ran twice or never"
        _check_trace(calls)


async def _persist(world: World) -> None:
    """Submit the task as a client does: again, under the same ID, until it is accepted."""
    for _ in range(5):
        try:
            await world.say("do it", input_id="task")
        except Exception as error:
            last = error
        else:
            return
    raise last


async def _finish(world: World) -> None:
    """Go on after a recorded failure, as a person would."""
    for number in range(3):
        items = await world.items()
        if "finished" in str(items[-1].model_response):
            return
        await world.run(f"go on {number}")


def _check_trace(calls: FaultyCalls) -> None:
    """Every dispatched operation was committed before, in just that state."""
    committed: dict[str, set[bytes]] = {}
    for call, request in calls.trace:
        if call == "store.commit":
            for operation in cast(store_pb2.CommitRequest, request).operations:
                committed.setdefault(operation.operation_id, set()).add(operation.SerializeToString(deterministic=True))
        elif call == "manager.add_operations":
            for assignment in cast(manager_pb2.AddOperationsRequest, request).assignments:
                operation = assignment.operation
                assert operation.SerializeToString(deterministic=True) in committed[operation.operation_id]
    turns = sum(
        item.HasField("turn")
        for call, request in calls.trace
        if call == "store.commit"
        for item in cast(store_pb2.CommitRequest, request).items
    )
    assert calls.counts["model.respond"] <= turns


def _kind(fault: Fault) -> str:
    if fault.is_full_disk:
        return "full-disk"
    return "after" if fault.is_after else "before"


def test_the_checker_sees_a_call_without_result() -> None:
    turn = item_pb2.Item(sequence=1, revision=1, turn=item_pb2.Turn(turn_id="t"))
    response = item_pb2.Item(sequence=2, revision=2, model_response=item_pb2.ModelResponse(turn_id="t"))
    response.model_response.output.items.add().tool_call.call_id = "c"
    with pytest.raises(AssertionError):
        check_history([turn, response], [])
