"""The n-th call of each dependency fails: nothing that depends on it happens, and nothing is lost or done twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, TypeVar

import pytest

from clients.operation_manager import DialledLink, ProxyOperationManager
from harness.app import open_coordinator
from harness.coordinator import CoordinatorConfig
from harness.errors import HarnessError, UnavailableError
from harness.primitives.streams import closing
from harness.tools.registry import default_registry
from tests.support.eventually import eventually
from tests.support.faults import Fault, FaultyCalls, check_trace
from tests.support.invariants import WatchedHistory, call_ids, check_history
from tests.support.manager_service import manager_process
from tests.support.store_service import connected, store_process
from tests.support.world import Script, World, bash, embedded_world, scripted
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

T = TypeVar("T")

COUNTED = "echo $UNREAL_AGENT_OPERATION >> effects"
SCRIPT: Script = [
    {"text": "two at once", "tool_calls": [bash(f"{COUNTED}; echo one"), bash(f"{COUNTED}; sleep 0.2; echo two")]},
    {"text": "an unknown one", "tool_calls": [{"name": "Nope", "arguments": {}}, bash(f"{COUNTED}; echo three")]},
    {"text": "a slow one", "tool_calls": [bash(f"{COUNTED}; sleep 0.6; echo four")]},
    {"text": "it still runs"},
    {"text": "finished"},
]
STOPPED_SCRIPT: Script = [
    {"text": "long", "tool_calls": [bash(f"{COUNTED}; sleep 60"), bash(f"{COUNTED}; sleep 60")]},
    {"text": "finished"},
    {"text": "finished"},
]
CONFIG: Final = CoordinatorConfig(grace_s=0.3, lease_s=3.0, intermediate_state_delay_s=0.1)
AT_ONCE: Final = 8
"""Worlds at a time: they mostly wait."""


def commit_faults() -> list[Fault]:
    """Return failed writes: lost before, lost after, refused, for one call or several on end."""
    found: list[Fault] = []
    for number in range(1, 11):
        found += [Fault(call="store.commit", number=number, is_after=after) for after in (False, True)]
        found += [Fault(call="store.commit", number=number, is_full_disk=True)]
    for number in range(1, 9):
        found += [Fault(call="store.commit", number=number, is_denied=True)]
        # The answer is lost, and what is asked again is refused: written, whatever the caller was told.
        found += [Fault(call="store.commit", number=number, is_after=True, is_full_disk=True, times=2)]
        found += [Fault(call="store.commit", number=number, is_after=True, times=3)]
        found += [Fault(call="store.commit", number=number, is_after=True, is_refused_then=True, times=2)]
    return found


def store_faults() -> list[Fault]:
    """Return failed reads, blobs, leases and broken watches."""
    calls = ("put_blob", "list_items", "list_operations", "get_session", "acquire_lease", "renew_lease", "get_blob")
    found = [Fault(call=f"store.{call}", number=n, is_after=a) for call in calls for n in (1, 2) for a in (False, True)]
    found += [Fault(call="store.put_blob", number=1, is_full_disk=True)]
    found += [Fault(call="store.watch_session", number=1)]
    found += [Fault(call="store.watch_session", number=1, is_after=True, messages=m) for m in range(1, 9)]
    found += [Fault(call="store.watch_runnable", number=1, is_after=after) for after in (False, True)]
    return found


def manager_faults() -> list[Fault]:
    """Return failed dispatches, acknowledgements and broken update streams."""
    found: list[Fault] = []
    for call in ("manager.add_operations", "manager.acknowledge_updates"):
        for number in range(1, 5):
            found += [Fault(call=call, number=number, is_after=after) for after in (False, True)]
            found += [Fault(call=call, number=number, is_full_disk=True)]
        found += [Fault(call=call, number=1, is_after=True, times=3)]
    found += [Fault(call="manager.watch_operations", number=1, times=times) for times in (1, 3)]
    found += [Fault(call="manager.watch_operations", number=1, is_after=True, messages=m) for m in range(1, 8)]
    return found


def model_faults() -> list[Fault]:
    """Return requests that fail before the first byte, and in the middle of the answer."""
    found = [Fault(call="model.respond", number=n) for n in range(1, 5)]
    return found + [Fault(call="model.respond", number=n, is_after=True, messages=m) for n in (1, 2, 3) for m in (1, 2)]


def stop_faults() -> list[Fault]:
    """Return what fails while a session with running commands is stopped."""
    found = [Fault(call="manager.cancel_operation", number=n, is_after=a) for n in (1, 2) for a in (False, True)]
    found += [Fault(call="manager.cancel_operation", number=1, is_full_disk=True, times=2)]
    found += [Fault(call="store.commit", number=n, is_after=a) for n in range(4, 9) for a in (False, True)]
    found += [Fault(call="store.commit", number=n, is_full_disk=True) for n in range(4, 9)]
    found += [Fault(call="manager.watch_operations", number=1, is_after=True, messages=m) for m in range(3, 8)]
    return found


GROUPS: Final = {
    "store.commit": commit_faults,
    "store": store_faults,
    "manager": manager_faults,
    "model": model_faults,
}


def sample(faults: Sequence[Fault], count: int) -> list[Fault]:
    """Return some faults, the same each time."""
    return random.Random(4).sample(faults, min(count, len(faults)))


async def test_a_commit_that_was_written_is_never_taken_for_refused(tmp_path: Path) -> None:
    lost = [Fault(call="store.commit", number=n, is_after=True, is_refused_then=True, times=3) for n in (2, 4, 6)]
    refused = [Fault(call="store.commit", number=n, is_after=True, is_full_disk=True) for n in (2, 5)]
    await _each(tmp_path, [*lost, *refused], _survive)


async def test_a_session_whose_commits_conflict_each_time_is_loaded_again_ever_later(tmp_path: Path) -> None:
    calls = FaultyCalls(fault=Fault(call="store.commit", number=3, is_conflict=True, times=6))
    began_s = asyncio.get_running_loop().time()
    async with embedded_world(
        tmp_path, calls.adapter(scripted(SCRIPT)), config=CONFIG, wrap_store=calls.store, wrap_manager=calls.manager
    ) as world:
        await _do_the_job(world, calls)
    # 0, 0.05, 0.1, 0.2, 0.4 and 0.8 s.
    assert asyncio.get_running_loop().time() - began_s > 1.5
    assert calls.counts["store.acquire_lease"] <= 8


async def test_a_turn_whose_prompt_can_not_be_read_waits_for_the_store(tmp_path: Path) -> None:
    await _each(tmp_path, [Fault(call="store.get_blob", number=1, times=times) for times in (1, 3)], _survive)


@pytest.mark.parametrize("group", GROUPS)
async def test_one_failed_call_loses_and_repeats_nothing(tmp_path: Path, group: str) -> None:
    await _each(tmp_path, sample(GROUPS[group](), 8), _survive)


async def test_a_failed_call_holds_up_no_stop(tmp_path: Path) -> None:
    await _each(tmp_path, sample(stop_faults(), 6), _stop)


async def test_a_failed_call_to_a_service_loses_and_repeats_nothing(tmp_path: Path) -> None:
    await _each(tmp_path, [*sample(commit_faults(), 1), *sample(manager_faults(), 1)], _survive_remotely)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", [*GROUPS, "stop", "services"])
async def test_every_failed_call_loses_and_repeats_nothing(tmp_path: Path, group: str) -> None:
    if group == "services":
        every = [fault for faults in GROUPS.values() for fault in faults()]
        await _each(tmp_path, sample(every, 24), _survive_remotely)
    elif group == "stop":
        await _each(tmp_path, stop_faults(), _stop)
    else:
        await _each(tmp_path, GROUPS[group](), _survive)


async def _each(directory: Path, faults: Iterable[Fault], run: Callable[[Path, Fault], Awaitable[None]]) -> None:
    """Run a scenario with each fault, several at a time; a failure names its fault."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def run_one(number: int, fault: Fault) -> None:
        async with slots:
            place = directory / str(number)
            place.mkdir()
            try:
                await run(place, fault)
            except Exception as error:
                error.add_note(f"fault: {fault}")
                raise

    async with asyncio.TaskGroup() as tasks:
        for number, fault in enumerate(faults):
            tasks.create_task(run_one(number, fault))


async def _survive(directory: Path, fault: Fault) -> None:
    """Do a job to its end, whatever fails."""
    calls = FaultyCalls(fault=fault)
    async with embedded_world(
        directory, calls.adapter(scripted(SCRIPT)), config=CONFIG, wrap_store=calls.store, wrap_manager=calls.manager
    ) as world:
        await _do_the_job(world, calls)


async def _survive_remotely(directory: Path, fault: Fault) -> None:
    """Do the job with store and manager in processes of their own."""
    calls = FaultyCalls(fault=fault)
    (directory / "workspace").mkdir()
    async with AsyncExitStack() as stack:
        store_service = await stack.enter_async_context(store_process(directory / "state"))
        manager_service = await stack.enter_async_context(manager_process(directory / "manager"))
        store = await stack.enter_async_context(connected(store_service))
        manager = await stack.enter_async_context(ProxyOperationManager(DialledLink(manager_service.address)))
        adapter = calls.adapter(scripted(SCRIPT))
        coordinator = await stack.enter_async_context(
            open_coordinator(
                store=calls.store(store),
                managers={"local": calls.manager(manager)},
                open_adapter=lambda _: adapter,
                tools=default_registry(),
                config=CONFIG,
            )
        )
        await _do_the_job(World(coordinator=coordinator, workspace=directory / "workspace"), calls)


async def _do_the_job(world: World, calls: FaultyCalls) -> None:
    seen = WatchedHistory()
    await _again(world.create)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch(world, seen))
        await _again(lambda: world.say("do it", input_id="task"))
        await _again(world.until_rest)
        await _finish(world)
        items, operations = await _again(world.items), await _again(world.operations)
        await eventually(lambda: len(seen.items) == len(items))
        watching.cancel()
    check_history(items, operations)
    seen.check(items, operations)
    if calls.fault is None or not calls.fault.call.startswith("model"):
        # A recorded failure consumes an entry of the script.
        assert len(call_ids(items)) == 5
    _check_effects(world, operations)
    check_trace(calls, operations)


async def _stop(directory: Path, fault: Fault) -> None:
    """Stop a session while its commands run, whatever fails, and let it go on."""
    calls = FaultyCalls(fault=fault)
    async with embedded_world(
        directory,
        calls.adapter(scripted(STOPPED_SCRIPT)),
        config=CONFIG,
        wrap_store=calls.store,
        wrap_manager=calls.manager,
    ) as world:
        await world.create()
        await _again(lambda: world.say("do it", input_id="task"))
        effects = world.workspace / "effects"
        await eventually(lambda: effects.exists() and len(effects.read_text().split()) == 2)
        await _again(lambda: world.stop(item_pb2.STOP_MODE_HARD))
        rest = await _again(world.until_rest)
        operations = await _again(world.operations)
        assert rest.session_state == session_pb2.SESSION_STATE_STOPPED
        assert {one.status for one in operations} == {operation_pb2.OPERATION_STATUS_CANCELED}
        check_trace(calls, operations)
        await _again(lambda: world.say("go on", input_id="more"))
        await _again(world.until_rest)
        items, operations = await _again(world.items), await _again(world.operations)
        check_history(items, operations)
        assert "finished" in str(items[-1].model_response)
        _check_effects(world, operations)


async def _again(call: Callable[[], Awaitable[T]]) -> T:
    """Call as a client does: again, with the same IDs, until it is answered."""
    for _ in range(6):
        try:
            return await call()
        except HarnessError as error:
            last = error
            await asyncio.sleep(error.retry_after_s or 0.02)
    raise last


async def _watch(world: World, seen: WatchedHistory) -> None:
    """Follow a session as a client does: a watch that breaks goes on where it was."""
    while True:
        request = coordinator_pb2.WatchSessionRequest(session_id=world.session_id, after_revision=seen.revision)
        try:
            async with closing(world.coordinator.watch_session(request)) as events:
                async for event in events:
                    if event.HasField("change"):
                        seen.take(event.change)
        except UnavailableError:
            await asyncio.sleep(0.01)


async def _finish(world: World) -> None:
    """Go on after a recorded failure, as a person would."""
    for number in range(3):
        items = await _again(world.items)
        if "finished" in str(items[-1].model_response):
            return
        await _again(lambda: world.say(f"go on {number}", input_id=f"more-{number}"))  # noqa: B023 - awaited at once
        await _again(world.until_rest)


def _check_effects(world: World, operations: Sequence[operation_pb2.Operation]) -> None:
    effects = Counter((world.workspace / "effects").read_text().split())
    started = [one.operation_id for one in operations if one.type == "bash"]
    assert effects == Counter(started), "a command ran twice or never"


def test_the_checker_sees_a_call_without_result() -> None:
    turn = item_pb2.Item(sequence=1, revision=1, turn=item_pb2.Turn(turn_id="t"))
    response = item_pb2.Item(sequence=2, revision=2, model_response=item_pb2.ModelResponse(turn_id="t"))
    response.model_response.output.items.add().tool_call.call_id = "c"
    with pytest.raises(AssertionError):
        check_history([turn, response], [])
