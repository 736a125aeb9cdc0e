"""The coordinator as a service: three real processes, killed and drained one by one, and what its clients see."""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from clients.coordinator import CoordinatorClient
from harness.coordinator import Coordinator
from harness.errors import (
    AlreadyExistsError,
    HarnessError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from harness.primitives.streams import closing
from tests.support.eventually import eventually
from tests.support.stack import COORDINATOR, MANAGER, STORE, Stack, three_services
from tests.support.world import Script, World, bash, result_text, text_message
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

IDLE = session_pb2.SESSION_STATE_IDLE

WAITS = "while [ ! -e go ]; do sleep 0.05; done; echo went"


async def test_a_job_is_done_by_three_processes_which_end_without_a_word(tmp_path: Path) -> None:
    script: Script = [{"text": "I look.", "tool_calls": [bash("echo one")]}, {"expect": "one", "text": "Done."}]
    async with three_services(tmp_path, script) as stack, stack.world() as world:
        await world.create()
        assert (await world.run("Look around.")).session_state == IDLE
        (result,) = (await world.results()).values()
        assert result_text(result).startswith("one")
        info = await world.coordinator.get_server_info(coordinator_pb2.GetServerInfoRequest())
        assert (info.info.component, info.info.name) == ("coordinator", "coordinator")
        assert (list(info.managers), "scripted" in info.providers) == (["local"], True)
        assert [await stack.terminate(name) for name in (COORDINATOR, MANAGER, STORE)] == [0, 0, 0]
        for name in (COORDINATOR, MANAGER, STORE):
            assert "Traceback" not in stack.log(name)
            assert "destroyed" not in stack.log(name)


@pytest.mark.parametrize("victim", [COORDINATOR, STORE, MANAGER])
async def test_a_watch_loses_and_repeats_nothing_whoever_is_killed(tmp_path: Path, victim: str) -> None:
    script: Script = [
        {"tool_calls": [bash(WAITS)]},
        {"expect": "went", "tool_calls": [bash("echo more")]},
        {"text": "Done."},
    ]
    async with three_services(tmp_path, script) as stack, stack.world() as world:
        await world.create()
        async with asyncio.TaskGroup() as tasks:
            await world.say("go")
            watching = tasks.create_task(watched(world.coordinator))
            await command_runs(world)
            for _ in range(2):
                await stack.restart(victim)
            (world.workspace / "go").touch()
        responses = watching.result()
        items = [item for response in responses for item in response.change.items]
        assert items == await world.items()
        revisions = [response.change.revision for response in responses if response.HasField("change")]
        assert revisions == sorted(set(revisions))
        assert [response.HasField("rest_reached") for response in responses].count(True) == 1
        commands = [one for one in await world.operations() if one.type == "bash"]
        assert [one.status for one in commands] == [operation_pb2.OPERATION_STATUS_COMPLETED] * 2


async def test_an_input_that_is_sent_again_is_accepted_once(tmp_path: Path) -> None:
    async with three_services(tmp_path, [{"text": "One."}, {"text": "Two."}]) as stack, stack.world() as world:
        await world.create()
        first = await world.say("hi", input_id="i1")
        async with asyncio.TaskGroup() as tasks:
            again = [tasks.create_task(world.say("hi", input_id="i1")) for _ in range(5)]
        await world.until_rest()
        await stack.restart(COORDINATOR)
        again_after = [await world.say("hi", input_id="i1") for _ in range(2)]
        await stack.add_coordinator("second")
        async with stack.world("second") as elsewhere:
            again_after += [await elsewhere.say("hi", input_id="i1") for _ in range(2)]
        for response in (*(task.result() for task in again), *again_after):
            assert (response.sequence, response.duplicate) == (first.sequence, True)
        with pytest.raises(AlreadyExistsError) as error:
            await world.say("other", input_id="i1")
        assert error.value.reason == "INPUT_ID_CONFLICT"
        assert sum(item.HasField("turn") for item in await world.items()) == 1


async def test_a_submission_waits_for_a_store_that_is_away(tmp_path: Path) -> None:
    async with three_services(tmp_path, [{"text": "One."}]) as stack, stack.world() as world:
        await world.create()
        await stack.kill(STORE)
        async with asyncio.TaskGroup() as tasks:
            saying = tasks.create_task(world.say("hi"))
            await stack.start(STORE)
        assert not saying.result().duplicate
        assert (await world.until_rest()).session_state == IDLE


async def test_the_coordinator_waits_for_its_store_and_says_so(tmp_path: Path) -> None:
    async with three_services(tmp_path, [{"text": "One."}], starts=False) as stack, asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(stack.start(COORDINATOR))
        await eventually(lambda: COORDINATOR in stack.pids)
        await eventually(lambda: "session store is not there" in stack.log(COORDINATOR), within_s=10)
        assert not starting.done()
        await stack.start(STORE)
        await starting
        await stack.start(MANAGER)
        async with stack.world() as world:
            await world.create()
            assert (await world.run("hi")).session_state == IDLE


async def test_a_coordinator_that_waits_for_its_store_can_be_ended(tmp_path: Path) -> None:
    async with three_services(tmp_path, starts=False) as stack, asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(_start_in_vain(stack))
        await eventually(lambda: COORDINATOR in stack.pids)
        await eventually(lambda: "session store is not there" in stack.log(COORDINATOR), within_s=10)
        assert await stack.terminate(COORDINATOR) == 1
        await starting


async def _start_in_vain(stack: Stack) -> None:
    with pytest.raises(AssertionError, match="ended instead of listening"):
        await stack.start(COORDINATOR)


async def test_a_drain_ends_watches_at_once_and_their_clients_go_on(tmp_path: Path) -> None:
    async with three_services(tmp_path, [{"text": "One."}]) as stack, stack.world() as world:
        await world.create()
        async with stack.client(patience_s=0.2) as impatient, asyncio.TaskGroup() as tasks:
            has_begun = asyncio.Event()
            refused = tasks.create_task(_watch_in_vain(impatient, has_begun))
            patient = tasks.create_task(world.watch_until(lambda response: bool(response.change.items)))
            await has_begun.wait()
            begin_s = asyncio.get_running_loop().time()
            assert await stack.terminate(COORDINATOR) == 0
            assert asyncio.get_running_loop().time() - begin_s < 4
            assert (await refused).reason in ("DRAINING", "CONNECTION_LOST")
            await stack.start(COORDINATOR)
            await world.say("hi")
            await patient


async def _watch_in_vain(client: CoordinatorClient, has_begun: asyncio.Event) -> HarnessError:
    request = coordinator_pb2.WatchSessionRequest(session_id="s1")
    with pytest.raises(UnavailableError) as error:
        async with closing(client.watch_session(request)) as responses:
            async for _ in responses:
                has_begun.set()
    return error.value


async def test_a_newer_process_of_the_same_name_takes_over_and_the_older_one_ends(tmp_path: Path) -> None:
    script: Script = [{"tool_calls": [bash(WAITS)]}, {"expect": "went", "text": "Done."}]
    async with three_services(tmp_path, script) as stack, stack.world() as world:
        await world.create()
        await world.say("go")
        await command_runs(world)
        await stack.add_coordinator("newer", "--name", COORDINATOR)
        (world.workspace / "go").touch()
        async with stack.world("newer") as newer:
            assert (await newer.until_rest()).session_state == IDLE
        await stack.wait(COORDINATOR)


async def test_calls_for_a_session_of_another_coordinator_reach_it(tmp_path: Path) -> None:
    script: Script = [
        {"tool_calls": [bash("touch begun; sleep 60")]},
        {"text": "You are back."},
    ]
    async with three_services(tmp_path, script) as stack:
        await stack.add_coordinator("second")
        async with stack.world() as world, stack.world("second") as elsewhere:
            await world.create()
            await world.say("go")
            await command_runs(world)
            has_begun, deltas = asyncio.Event(), asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watched(elsewhere.coordinator, has_begun, deltas))
                await has_begun.wait()
                await elsewhere.say("I am here.")
                await deltas.wait()
                await elsewhere.stop()
            assert watching.result()[-1].rest_reached.rest.session_state == session_pb2.SESSION_STATE_STOPPED
            assert "another" not in stack.log("second")
            assert await elsewhere.items() == await world.items()
            # No lease changed hands: nothing crashed, and the owner did it all.
            assert not [item for item in await world.items() if item.input.HasField("crash")]


async def test_a_dead_owner_is_waited_for_until_its_lease_is_over(tmp_path: Path) -> None:
    script: Script = [{"tool_calls": [bash(WAITS)]}, {"expect": "went", "text": "Done."}]
    flags = {COORDINATOR: ("--lease-seconds", "2")}
    async with three_services(tmp_path, script, flags=flags) as stack:
        async with stack.world() as world:
            await world.create()
            await world.say("go")
            await command_runs(world)
        await stack.kill(COORDINATOR)
        await stack.add_coordinator("second")
        async with stack.world("second") as world, stack.client("second", patience_s=0.1) as impatient:
            with pytest.raises(UnavailableError) as error:
                await World(coordinator=impatient, workspace=world.workspace).stop()
            assert error.value.reason == "NOT_OWNER"
            assert error.value.retry_after_s is not None
            (world.workspace / "go").touch()
            assert (await world.until_rest()).session_state == IDLE
            assert len([item for item in await world.items() if item.input.HasField("crash")]) == 1


async def test_output_is_followed_through_a_restart(tmp_path: Path) -> None:
    command = "for i in $(seq 200); do echo line $i; [ $i = 50 ] && touch half; [ $i -gt 50 ] && sleep 0.01; done"
    async with three_services(tmp_path, [{"tool_calls": [bash(command)]}, {"text": "Done."}]) as stack:
        async with stack.world() as world, asyncio.TaskGroup() as tasks:
            await world.create()
            await world.say("go")
            operation = await command_runs(world)
            wish = manager_pb2.ReadOutputRequest(
                operation_id=operation, stream=operation_pb2.OUTPUT_STREAM_STDOUT, follow=True
            )
            request = coordinator_pb2.ReadOutputRequest(session_id="s1", request=wish)
            reading = tasks.create_task(_joined(world.coordinator.read_output(request)))
            await eventually(lambda: (world.workspace / "half").exists())
            await stack.restart(COORDINATOR)
        assert reading.result().decode().splitlines() == [f"line {number}" for number in range(1, 201)]


async def _joined(pieces: AsyncIterator[coordinator_pb2.ReadOutputResponse]) -> bytes:
    return b"".join([response.piece.data async for response in pieces])


async def test_blobs_exports_and_workspaces_go_through_the_coordinator(tmp_path: Path) -> None:
    async with three_services(tmp_path, [{"text": "One."}]) as stack, stack.world() as world:
        await world.create()
        await world.run("hi")
        client = world.coordinator
        data = bytes(range(256)) * 8192
        blob = llm_pb2.BlobRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data), media_type="text/plain")

        async def frames() -> AsyncIterator[coordinator_pb2.PutBlobRequest]:
            for start in range(0, len(data), 500_000):
                frame = store_pb2.PutBlobRequest(data=data[start : start + 500_000])
                if start == 0:
                    frame.session_id = "s1"
                    frame.blob.CopyFrom(blob)
                yield coordinator_pb2.PutBlobRequest(request=frame)

        assert (await client.put_blob(frames())).blob == blob
        wanted = coordinator_pb2.GetBlobRequest(request=store_pb2.GetBlobRequest(session_id="s1", digest=blob.digest))
        assert b"".join([response.piece.data async for response in client.get_blob(wanted)]) == data

        exported = [one async for one in client.export_session(coordinator_pb2.ExportSessionRequest(session_id="s1"))]

        async def records() -> AsyncIterator[coordinator_pb2.ImportSessionRequest]:
            for response in exported:
                yield coordinator_pb2.ImportSessionRequest(session_id="s2", records=response.records)

        assert (await client.import_session(records())).session.session_id == "s2"

        (world.workspace / "a.txt").write_text("hello")
        download = coordinator_pb2.DownloadWorkspaceRequest(session_id="s1")
        parts = [response.part async for response in client.download_workspace(download)]
        assert "a.txt" in str(parts)


async def test_what_a_caller_sends_may_fail_and_says_so_itself(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[coordinator_pb2.ImportSessionRequest]:
        yield coordinator_pb2.ImportSessionRequest(session_id="s9")
        raise LookupError("line 2 is damaged")

    async with three_services(tmp_path) as stack, stack.client() as client:
        with pytest.raises(LookupError, match="line 2"):
            await client.import_session(broken())
        with pytest.raises(NotFoundError):
            await client.get_session(coordinator_pb2.GetSessionRequest(session_id="s9"))


async def test_a_proxy_in_the_environment_is_not_for_services(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    environment = {"http_proxy": nowhere, "https_proxy": nowhere, "HTTP_PROXY": nowhere}
    script: Script = [{"text": "One."}]
    async with three_services(tmp_path, script, environment=environment) as stack, stack.world() as world:
        await world.create()
        assert (await world.run("hi")).session_state == IDLE


async def test_a_session_may_name_a_script_only_where_the_server_allows_it(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"responses": [{"text": "From my own script."}]}')
    settings = session_pb2.SessionSettings(labels={"script": str(own)})
    async with three_services(tmp_path) as stack, stack.world() as world:
        await world.create(settings=settings)
        await world.run("hi")
        (said,) = [item.model_response.output for item in await world.items() if item.HasField("model_response")]
        assert said.items[0].message.text == "From my own script."
        await world.create("s2")
        assert (await world.run("hi")).session_state == session_pb2.SESSION_STATE_FAILED
        await stack.add_coordinator("strict", "--session-scripts", "false")
        async with stack.world("strict") as strict:
            with pytest.raises(HarnessError) as error:
                await strict.create("s3", settings)
            assert error.value.reason == "LLM_SCRIPT_MISSING"


async def test_what_is_wrong_with_a_request_reaches_its_caller_as_our_own_error(tmp_path: Path) -> None:
    async with three_services(tmp_path) as stack, stack.world() as world:
        await world.create()
        nobody = coordinator_pb2.SubmitInputRequest(session_id="nobody", input=text_message("i1", "hi"))
        with pytest.raises(NotFoundError) as missing:
            await world.coordinator.submit_input(nobody)
        assert missing.value.reason == "SESSION_NOT_FOUND"
        with pytest.raises(InvalidArgumentError):
            await world.say("hi", input_id="a\0b")
        with pytest.raises(InvalidArgumentError, match="unknown operation manager"):
            await world.create("s2", session_pb2.SessionSettings(manager_name="other"))


async def test_a_frozen_coordinator_is_noticed_and_another_reaches_what_it_left(tmp_path: Path) -> None:
    flags = {COORDINATOR: ("--lease-seconds", "2")}
    script: Script = [{"tool_calls": [bash(WAITS)]}, {"expect": "went", "text": "Done."}]
    async with three_services(tmp_path, script, flags=flags) as stack, stack.world() as world:
        await world.create()
        await world.say("go")
        await command_runs(world)
        stack.signal(COORDINATOR, signal.SIGSTOP)
        await stack.add_coordinator("second")
        async with stack.world("second") as other:
            (world.workspace / "go").touch()
            assert (await other.until_rest()).session_state == IDLE
            before = await other.items()
            stack.signal(COORDINATOR, signal.SIGCONT)
            assert (await world.until_rest()).session_state == IDLE
            assert await world.items() == before


async def watched(
    coordinator: Coordinator, has_begun: asyncio.Event | None = None, deltas: asyncio.Event | None = None
) -> list[coordinator_pb2.WatchSessionResponse]:
    """Return the durable part of a watch from the beginning until the session rests; it must have something to do."""
    found: list[coordinator_pb2.WatchSessionResponse] = []
    request = coordinator_pb2.WatchSessionRequest(session_id="s1", include_deltas=deltas is not None, until_idle=True)
    async with closing(coordinator.watch_session(request)) as responses:
        async for response in responses:
            if has_begun is not None:
                has_begun.set()
            if response.HasField("model_delta") and deltas is not None:
                deltas.set()
            else:
                found.append(response)
    return found


async def command_runs(world: World) -> str:
    """Return the ID of the session's command once it runs."""

    async def begun() -> str | None:
        for operation in await world.operations():
            if operation.type == "bash" and operation.HasField("start_time"):
                return operation.operation_id
        return None

    return await eventually(begun, within_s=15)


async def test_a_client_that_is_closed_ends_its_watches_at_once(tmp_path: Path) -> None:
    async with three_services(tmp_path) as stack, stack.world() as world, asyncio.TaskGroup() as tasks:
        await world.create()
        client = CoordinatorClient(stack.address)
        has_begun = asyncio.Event()
        watching = tasks.create_task(_watch_in_vain(client, has_begun))
        await has_begun.wait()
        await client.aclose()
        async with asyncio.timeout(2):
            assert (await watching).reason == "CLIENT_CLOSED"


async def test_a_model_by_default_is_the_providers_own(tmp_path: Path) -> None:
    variables = {"UNREAL_AGENT_LLM_PROVIDER": "openai", "UNREAL_AGENT_LLM_MODEL": "m9", "OPENAI_API_KEY": "none"}
    async with three_services(tmp_path, environment=variables) as stack, stack.client() as client:

        async def model(provider: str = "", model: str = "") -> str:
            settings = session_pb2.SessionSettings(workspace=str(tmp_path), provider=provider, model=model)
            made = await client.create_session(coordinator_pb2.CreateSessionRequest(settings=settings))
            return made.session.initial_settings.model

        assert await model() == "m9"
        assert await model("scripted") == "scripted"
        assert await model("ollama", "m1") == "m1"
        with pytest.raises(InvalidArgumentError) as error:
            await model("ollama")
        assert error.value.reason == "MODEL_REQUIRED"
