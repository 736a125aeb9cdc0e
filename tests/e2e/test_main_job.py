"""The main job from end to end: what a person's program sees of an agent that works."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from harness.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from tests.support.deployments import DEPLOYMENTS, Open
from tests.support.invariants import call_ids
from tests.support.world import Script, bash, result_text
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2


@pytest.fixture(params=sorted(DEPLOYMENTS))
def open_world(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Open an agent in one directory, embedded and as three processes; opening it again is a restart."""
    deploy = DEPLOYMENTS[request.param]
    return lambda responses: deploy(tmp_path, responses)


def is_bash_running(event: coordinator_pb2.WatchSessionResponse) -> bool:
    """Return whether an event tells that a command has started."""
    return any(one.type == "bash" and one.HasField("start_time") for one in event.change.operations)


async def test_a_task_is_done_with_two_commands_at_once(open_world: Open) -> None:
    script: Script = [
        {"text": "Looking.", "tool_calls": [bash("echo one"), bash("echo two >&2; exit 3")]},
        {"expect": "one", "text": "Done."},
    ]
    async with open_world(script) as world:
        await world.create()
        rest = await world.run("do it")
        assert rest.session_state == session_pb2.SESSION_STATE_IDLE
        kinds = [str(item.WhichOneof("item")) for item in await world.items()]
        assert kinds == [
            "input",
            "turn",
            "model_response",
            "tool_call_status",
            "tool_call_status",
            "tool_call_status",
            "tool_call_status",
            "turn",
            "model_response",
        ]
        results = await world.results()
        texts = [result_text(results[call_id]) for call_id in call_ids(await world.items())]
        assert texts[0].strip() == "one"
        assert "two" in texts[1]
        assert "3" in texts[1]


async def test_watching_from_a_revision_shows_what_came_after(open_world: Open) -> None:
    async with open_world([{"text": "first"}, {"text": "second"}]) as world:
        await world.create()
        await world.run("one")
        accepted = await world.say("two")
        await world.until_rest()
        items = await world.items()
        after = [item.sequence for item in items if item.revision > accepted.revision]
        assert [item.sequence for item in items] == list(range(1, len(items) + 1))
        assert after == [items[-1].sequence]


async def test_a_redelivered_input_is_a_duplicate_also_after_a_restart(open_world: Open) -> None:
    async with open_world([{"text": "answer"}]) as world:
        await world.create()
        first = await world.say("hello", input_id="I1")
        again = await asyncio.gather(*(world.say("hello", input_id="I1") for _ in range(5)))
        await world.until_rest()
        assert [(one.sequence, one.duplicate) for one in again] == [(first.sequence, True)] * 5
    async with open_world([{"text": "answer"}]) as world:
        again_later = await world.say("hello", input_id="I1")
        assert (again_later.sequence, again_later.duplicate) == (first.sequence, True)
        with pytest.raises(AlreadyExistsError) as conflict:
            await world.say("delete it", input_id="I1")
        assert conflict.value.reason == "INPUT_ID_CONFLICT"
        await world.until_rest()
        turns = [item for item in await world.items() if item.HasField("turn")]
        assert len(turns) == 1


async def test_a_command_that_runs_on_is_delivered_late(open_world: Open) -> None:
    script: Script = [
        {"tool_calls": [bash("sleep 1.2; echo late"), bash("echo quick")]},
        {"text": "It still runs."},
        {"expect": "late", "text": "Now it is done."},
    ]
    async with open_world(script) as world:
        await world.create()
        rest = await world.run("do it")
        assert rest.session_state == session_pb2.SESSION_STATE_IDLE
        context = await world.context()
        assert [one.kind for one in context.report] == [
            "prompt",
            "input",
            "response",
            "tool_result",
            "tool_result",
            "response",
            "late_result",
            "response",
        ]


async def test_a_hard_stop_ends_a_command_and_the_next_input_goes_on(open_world: Open) -> None:
    script: Script = [
        {"tool_calls": [bash("(sleep 3; touch should-not-exist) & sleep 60")]},
        {"expect": "(?s)canceled|cancelled", "text": "I was stopped."},
    ]
    async with open_world(script) as world:
        await world.create()
        await world.say("do it")
        await world.watch_until(is_bash_running)
        await world.stop()
        rest = await world.until_rest()
        assert rest.session_state == session_pb2.SESSION_STATE_STOPPED
        assert [one.outcome for one in (await world.results()).values()] == [item_pb2.CALL_OUTCOME_CANCELED]
        rest = await world.run("what happened?")
        assert rest.session_state == session_pb2.SESSION_STATE_IDLE
        assert not (world.workspace / "should-not-exist").exists()


async def test_an_unknown_session_is_named(open_world: Open) -> None:
    async with open_world([]) as world:
        world.session_id = "nobody"
        with pytest.raises(NotFoundError) as error:
            await world.say("hello")
        assert error.value.reason == "SESSION_NOT_FOUND"
        assert "'nobody'" in error.value.message


async def test_a_missing_workspace_fails_the_session_until_it_is_there(open_world: Open) -> None:
    async with open_world([{"text": "hello"}]) as world:
        missing = world.workspace.parent / "not-there"
        settings = session_pb2.SessionSettings(workspace=str(missing))
        await world.create(settings=settings)
        rest = await world.run("hello")
        assert rest.session_state == session_pb2.SESSION_STATE_FAILED
        assert str(missing) in rest.reason
        missing.mkdir()
        rest = await world.run("again")
        assert rest.session_state == session_pb2.SESSION_STATE_IDLE


async def test_a_session_at_rest_is_deleted_and_its_id_is_never_used_again(open_world: Open) -> None:
    async with open_world([{"text": "hello"}]) as world:
        await world.create()
        await world.run("hello")
    async with open_world([{"text": "hello"}]) as world:
        request = coordinator_pb2.DeleteSessionRequest(session_id="s1")
        await world.coordinator.delete_session(request)
        await world.coordinator.delete_session(request)
        with pytest.raises(FailedPreconditionError) as error:
            await world.create()
        assert error.value.reason == "SESSION_DELETED"


async def test_a_session_at_work_is_deleted_only_with_force_after_a_stop(open_world: Open) -> None:
    async with open_world([{"tool_calls": [bash("sleep 60")]}]) as world:
        await world.create()
        await world.say("do it")
        await world.watch_until(is_bash_running)
        with pytest.raises(FailedPreconditionError) as error:
            await world.coordinator.delete_session(coordinator_pb2.DeleteSessionRequest(session_id="s1"))
        assert error.value.reason == "SESSION_NOT_AT_REST"
        await world.coordinator.delete_session(coordinator_pb2.DeleteSessionRequest(session_id="s1", force=True))
        with pytest.raises(FailedPreconditionError) as gone:
            await world.items()
        assert gone.value.reason == "SESSION_DELETED"
