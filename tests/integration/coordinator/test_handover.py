"""Sessions go from one coordinator to another: with a client that asks and without, at once or when a lease is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from clients.coordinator import CoordinatorClient
from harness.errors import FailedPreconditionError, UnavailableError
from harness.primitives.streams import closing
from tests.support.eventually import eventually
from tests.support.stack import COORDINATOR, MANAGER, STORE, Stack, three_services
from tests.support.world import Script, World, bash
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

SECOND = "second"
WAITS = "echo begun; while [ ! -e go ]; do sleep 0.05; done; echo went"
SHORT_LEASE = ("--lease-seconds", "2", "--idle-seconds", "60")
LONG_LEASE = ("--lease-seconds", "60", "--idle-seconds", "60")


async def session_of(world: World) -> session_pb2.Session:
    """Return the session as the store has it; that loads nothing."""
    request = coordinator_pb2.GetSessionRequest(session_id=world.session_id)
    return (await world.coordinator.get_session(request)).session


async def owner_of(world: World) -> str:
    """Return the name of the coordinator that owns the session; empty: none that lives."""
    return (await session_of(world)).owner.name


async def command_runs(world: World) -> bool:
    """Return whether a command of the session runs or ran."""
    return any(one.type == "bash" and one.HasField("start_time") for one in await world.operations())


async def is_idle(world: World) -> bool:
    """Return whether the session rests and has ended a turn."""
    return (await session_of(world)).rest.session_state == session_pb2.SESSION_STATE_IDLE


def crashes(items: list[item_pb2.Item]) -> int:
    """Count the takeovers of a session that was not released."""
    return sum(item.input.HasField("crash") for item in items)


@pytest.mark.timeout(60)
async def test_a_killed_coordinators_work_is_taken_up_when_its_lease_is_over_though_nobody_asks(tmp_path: Path) -> None:
    script: Script = [{"tool_calls": [bash(WAITS)]}, {"expect": "went", "text": "Done."}]
    async with three_services(tmp_path, script, flags={COORDINATOR: SHORT_LEASE}) as stack:
        await stack.add_coordinator(SECOND, *SHORT_LEASE)
        async with stack.world() as world, stack.world(SECOND) as elsewhere:
            await world.create()
            await world.say("go")
            await eventually(lambda: command_runs(world), within_s=15)
            assert await owner_of(elsewhere) == COORDINATOR
            (world.workspace / "go").touch()
            await stack.kill(COORDINATOR)
            begin_s = asyncio.get_running_loop().time()
            await eventually(lambda: is_idle(elsewhere), within_s=15)
            assert asyncio.get_running_loop().time() - begin_s < 2 + 3
            assert crashes(await elsewhere.items()) == 1


@pytest.mark.timeout(60)
async def test_a_new_process_of_the_same_name_goes_on_at_once_though_nobody_asks(tmp_path: Path) -> None:
    script: Script = [{"tool_calls": [bash(WAITS)]}, {"expect": "went", "text": "Done."}]
    async with three_services(tmp_path, script, flags={COORDINATOR: LONG_LEASE}) as stack, stack.world() as world:
        await world.create()
        await world.say("go")
        await eventually(lambda: command_runs(world), within_s=15)
        (world.workspace / "go").touch()
        await stack.kill(COORDINATOR)
        await stack.start(COORDINATOR)
        begin_s = asyncio.get_running_loop().time()
        await eventually(lambda: is_idle(world), within_s=20)
        assert asyncio.get_running_loop().time() - begin_s < 10  # of a lease of 60 s
        assert crashes(await world.items()) == 1


@pytest.mark.timeout(60)
async def test_a_coordinator_that_ends_in_order_leaves_its_work_to_another_at_once(tmp_path: Path) -> None:
    script: Script = [{"tool_calls": [bash(WAITS)]}, {"expect": "went", "text": "Done."}]
    async with three_services(tmp_path, script, flags={COORDINATOR: LONG_LEASE}) as stack:
        await stack.add_coordinator(SECOND, *LONG_LEASE)
        async with stack.world() as world, stack.world(SECOND) as elsewhere:
            await world.create()
            await world.say("go")
            await eventually(lambda: command_runs(world), within_s=15)
            (world.workspace / "go").touch()
            assert await stack.terminate(COORDINATOR) == 0
            await eventually(lambda: is_idle(elsewhere), within_s=20)
            assert crashes(await elsewhere.items()) == 0


@pytest.mark.timeout(60)
async def test_a_process_that_was_replaced_drops_everything_and_ends(tmp_path: Path) -> None:
    script: Script = [{"tool_calls": [bash(WAITS)]}, {"expect": "went", "text": "Done."}]
    async with three_services(tmp_path, script, flags={COORDINATOR: LONG_LEASE}) as stack, stack.world() as world:
        await world.create()
        await world.say("go")
        await eventually(lambda: command_runs(world), within_s=15)
        await stack.add_coordinator("newer", "--name", COORDINATOR, *LONG_LEASE)
        assert await stack.wait(COORDINATOR) == 0
        async with stack.world("newer") as newer:
            (world.workspace / "go").touch()
            await eventually(lambda: is_idle(newer), within_s=15)
            assert len(await newer.results()) == 1


@pytest.mark.timeout(90)
async def test_five_crashes_in_a_row_end_a_session_until_somebody_speaks(tmp_path: Path) -> None:
    script: Script = [{"text": "Never said to the end.", "delay_seconds": 60}]
    async with three_services(tmp_path, script, flags={COORDINATOR: LONG_LEASE}) as stack, stack.world() as world:
        await world.create()
        await world.say("go")
        for number in range(5):
            await eventually(partial(_has_asked, world, number + 1), within_s=15)
            await stack.restart(COORDINATOR)

        async def has_failed() -> bool:
            return (await session_of(world)).rest.session_state == session_pb2.SESSION_STATE_FAILED

        await eventually(has_failed, within_s=15)
        session = await session_of(world)
        assert session.rest.reason.startswith("RECOVERY_LIMIT")
        items = await world.items()
        assert (crashes(items), sum(item.HasField("turn") for item in items)) == (5, 5)
        await world.say("try again")
        await eventually(lambda: _has_asked(world, 6), within_s=15)
        assert (await session_of(world)).rest.session_state == session_pb2.SESSION_STATE_RUNNING


async def _has_asked(world: World, turns: int) -> bool:
    return sum(item.HasField("turn") for item in await world.items()) == turns


@pytest.mark.timeout(60)
async def test_a_watch_that_began_at_rest_gets_the_deltas_of_whoever_runs_the_session_later(tmp_path: Path) -> None:
    slow = " ".join(f"word{number}" for number in range(40))
    script: Script = [{"text": "One."}, {"text": slow, "delay_seconds": 0.5}, {"text": slow, "delay_seconds": 0.5}]
    idle = ("--idle-seconds", "0.2")
    async with three_services(tmp_path, script, flags={COORDINATOR: idle}) as stack:
        await stack.add_coordinator(SECOND, *idle)
        async with stack.world() as world, stack.world(SECOND) as elsewhere:
            await world.create()
            await world.run("hi")
            await eventually(lambda: _is_free(world))
            request = coordinator_pb2.WatchSessionRequest(session_id="s1", include_deltas=True)
            async with closing(elsewhere.coordinator.watch_session(request)) as events, asyncio.timeout(30):
                seen = [await anext(events)]
                # Here the owner is the other one; then, after a rest, the watched one.
                for speaker in (world, elsewhere):
                    await eventually(lambda: _is_free(world))
                    await speaker.say("go on")
                    begin = len(seen)
                    while not any(item.HasField("model_response") for one in seen[begin:] for item in one.change.items):
                        seen.append(await anext(events))
                    assert slow.endswith("".join(one.model_delta.text for one in seen[begin:]))
                    assert any(one.HasField("model_delta") for one in seen[begin:])
            items = [item for one in seen for item in one.change.items]
            revisions = [one.change.revision for one in seen if one.HasField("change")]
            assert items == (await world.items())[: len(items)]
            assert revisions == sorted(set(revisions))


async def _is_free(world: World) -> bool:
    session = await session_of(world)
    return session.rest.state == session_pb2.REST_STATE_AT_REST and not session.owner.incarnation_id


@pytest.mark.timeout(60)
async def test_every_call_is_answered_by_any_coordinator_with_its_callers_request_id(tmp_path: Path) -> None:
    script: Script = [{"tool_calls": [bash(WAITS)]}, {"text": "Done."}, {"text": "More."}]
    async with three_services(tmp_path, script, flags={COORDINATOR: LONG_LEASE}) as stack:
        await stack.add_coordinator(SECOND, *LONG_LEASE)
        async with stack.world() as world, stack.world(SECOND) as elsewhere:
            await world.create()
            await world.say("go")
            await eventually(lambda: command_runs(world), within_s=15)
            await _use_every_call(elsewhere)
            assert (await elsewhere.until_rest()).session_state == session_pb2.SESSION_STATE_STOPPED
            assert crashes(await world.items()) == 0
            await elsewhere.coordinator.delete_session(coordinator_pb2.DeleteSessionRequest(session_id="s1"))
        changing = ("SubmitInput", "StopSession", "CancelOperation", "UpdateSettings", "RetryTurn", "DeleteSession")
        passed_on, answered = _requests(stack, SECOND), _requests(stack, COORDINATOR)
        # A watch that begins at rest is answered where it comes.
        assert passed_on["WatchSession"] & answered["WatchSession"]
        for method in changing:
            assert passed_on[method], method
            assert passed_on[method] <= answered[method], f"{method} was not passed on with its request ID"


async def _use_every_call(world: World) -> None:
    client = world.coordinator
    patch = session_pb2.SettingsPatch(effort="high")
    await client.update_settings(
        coordinator_pb2.UpdateSettingsRequest(session_id="s1", input_id="settings-1", patch=patch)
    )
    (command,) = [one for one in await world.operations() if one.type == "bash"]
    wish = manager_pb2.ReadOutputRequest(
        operation_id=command.operation_id, stream=operation_pb2.OUTPUT_STREAM_STDOUT, follow=True
    )
    reading = client.read_output(coordinator_pb2.ReadOutputRequest(session_id="s1", request=wish))
    async with closing(reading) as pieces:
        assert (await anext(pieces)).piece.data == b"begun\n"
    await world.watch_until(lambda event: event.output_delta.data == b"begun\n")
    await client.cancel_operation(
        coordinator_pb2.CancelOperationRequest(
            session_id="s1", operation_id=command.operation_id, input_id="cancel-1", reason="test"
        )
    )
    await world.say("more")
    await world.until_rest()
    assert len((await world.context()).entries) > 3
    exported = [one async for one in client.export_session(coordinator_pb2.ExportSessionRequest(session_id="s1"))]

    async def records() -> AsyncIterator[coordinator_pb2.ImportSessionRequest]:
        for response in exported:
            yield coordinator_pb2.ImportSessionRequest(session_id="copy", records=response.records)

    assert (await client.import_session(records())).session.session_id == "copy"
    forked = await client.fork_session(coordinator_pb2.ForkSessionRequest(parent_session_id="s1", request_id="f1"))
    assert forked.session.session_id
    assert [one async for one in client.upload_workspace(_directory())]
    download = coordinator_pb2.DownloadWorkspaceRequest(session_id="s1")
    assert [one async for one in client.download_workspace(download)]
    with pytest.raises(FailedPreconditionError):
        await client.retry_turn(coordinator_pb2.RetryTurnRequest(session_id="s1", input_id="retry-1"))
    await world.stop()


async def _directory() -> AsyncIterator[coordinator_pb2.UploadWorkspaceRequest]:
    entry = manager_pb2.WorkspaceEntry(path="made", mode=0o755, directory=manager_pb2.Directory())
    yield coordinator_pb2.UploadWorkspaceRequest(
        session_id="s1", request=manager_pb2.UploadWorkspaceRequest(entries=[entry])
    )


def _requests(stack: Stack, name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in stack.log(name).splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            method = str(entry.get("method", "")).rpartition("/")[2]
            if method and entry.get("request_id"):
                found.setdefault(method, set()).add(entry["request_id"])
    return found


@pytest.mark.timeout(60)
async def test_a_heartbeat_comes_after_a_restart_of_everything_though_nobody_asks(tmp_path: Path) -> None:
    script: Script = [{"tool_calls": [bash(WAITS)]}, {"expect": "", "text": "I wait."}, {"text": "Done."}]
    flags = {COORDINATOR: ("--heartbeat-seconds", "2", "--idle-seconds", "0.2")}
    async with three_services(tmp_path, script, flags=flags) as stack, stack.world() as world:
        await world.create()
        await world.say("go")
        await eventually(lambda: command_runs(world), within_s=15)
        for name in (COORDINATOR, STORE, MANAGER):
            await stack.kill(name)
        for name in (STORE, MANAGER, COORDINATOR):
            await stack.start(name)

        async def has_beaten() -> bool:
            return any(item.input.control.HasField("heartbeat") for item in await world.items())

        await eventually(has_beaten, within_s=10)
        (world.workspace / "go").touch()
        await eventually(lambda: is_idle(world), within_s=15)


@pytest.mark.timeout(60)
async def test_a_call_for_a_dead_owners_session_says_when_to_try_again(tmp_path: Path) -> None:
    async with three_services(tmp_path, [{"text": "One."}], flags={COORDINATOR: LONG_LEASE}) as stack:
        await stack.add_coordinator(SECOND, *LONG_LEASE)
        async with stack.world() as world:
            await world.create()
            await world.run("hi")
        await stack.kill(COORDINATOR)
        client = CoordinatorClient(stack.addresses[SECOND], patience_s=0.1)
        async with client:
            for call in (
                World(coordinator=client, workspace=tmp_path).say("more"),
                World(coordinator=client, workspace=tmp_path).stop(),
            ):
                with pytest.raises(UnavailableError) as error:
                    await call
                assert error.value.reason == "NOT_OWNER"
                assert 0 < (error.value.retry_after_s or 0) <= 60
