"""A rate limit pauses a session until the provider's time; it goes on by itself, whatever happens meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.clock import instant
from harness.coordinator import CoordinatorConfig
from harness.errors import InvalidArgumentError
from harness.llm import LLMAdapter
from tests.support.world import Script, World, embedded_world, scripted
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

WAITING = session_pb2.SESSION_STATE_WAITING_FOR_PROVIDER
IDLE = session_pb2.SESSION_STATE_IDLE


def limited(error: str = "rate_limit", seconds: float = 2.0) -> Script:
    return [{"error": {"class": error, "retry_after_seconds": seconds}}, {"text": "Done."}]


async def until_waiting(world: World) -> None:
    await world.watch_until(lambda event: event.change.rest.session_state == WAITING)


async def assert_waited(world: World) -> None:
    items = await world.items()
    (failure,) = [item.turn_failure for item in items if item.HasField("turn_failure")]
    second = [item for item in items if item.HasField("turn")][1]
    waited_s = (instant(second.record_time) - instant(failure.resume_time)).total_seconds()
    assert 0 <= waited_s < 5
    assert [item.WhichOneof("item") for item in items] == ["input", "turn", "turn_failure", "turn", "model_response"]


@pytest.mark.parametrize("error", ["rate_limit", "overload"])
async def test_it_goes_on_by_itself(tmp_path: Path, error: str) -> None:
    async with embedded_world(tmp_path, limited(error, 0.5)) as world:
        await world.create()
        assert (await world.run("go")).session_state == IDLE
        await assert_waited(world)


@pytest.mark.parametrize("name", ["coordinator", "another"])
async def test_it_goes_on_in_another_process_that_nobody_asks(tmp_path: Path, name: str) -> None:
    async with embedded_world(tmp_path, limited()) as world:
        await world.create()
        await world.say("go")
        await until_waiting(world)
    config = CoordinatorConfig(name=name, takes_runnable_sessions=True)
    async with embedded_world(tmp_path, limited(), config=config) as world:
        request = coordinator_pb2.GetSessionRequest(session_id="s1")
        assert (await world.coordinator.get_session(request)).session.rest.session_state in {WAITING, IDLE}
        assert (await world.until_rest()).session_state == IDLE
        await assert_waited(world)


async def test_a_named_fallback_answers_instead_and_the_history_says_so(tmp_path: Path) -> None:
    adapters: dict[str, LLMAdapter] = {
        "first": scripted([{"error": {"class": "quota"}}]),
        "second": scripted([{"text": "unused"}, {"text": "I answer."}]),
    }

    def open_adapter(name: str) -> LLMAdapter:
        if name not in adapters:
            raise InvalidArgumentError(f"unknown provider {name!r}", reason="LLM_PROVIDER_UNKNOWN")
        return adapters[name]

    async with embedded_world(tmp_path, [], open_adapter=open_adapter) as world:
        world.provider = "first"
        with pytest.raises(InvalidArgumentError, match="unknown provider 'third'"):
            await world.create("none", session_pb2.SessionSettings(fallback_provider="third/m2"))
        with pytest.raises(InvalidArgumentError) as error:
            await world.create("none", session_pb2.SessionSettings(fallback_provider="first"))
        assert error.value.reason == "FALLBACK_IS_PROVIDER"
        await world.create(settings=session_pb2.SessionSettings(fallback_provider="second/m2"))
        assert (await world.run("go")).session_state == IDLE
        items = await world.items()
        asked = [(item.turn.provider, item.turn.model) for item in items if item.HasField("turn")]
        assert asked == [("first", "m1"), ("second", "m2")]
        assert items[-1].model_response.output.items[0].message.text == "I answer."
        with pytest.raises(InvalidArgumentError, match="unknown provider 'third'"):
            await world.coordinator.update_settings(
                coordinator_pb2.UpdateSettingsRequest(
                    session_id="s1",
                    input_id="u1",
                    patch=session_pb2.SettingsPatch(fallback_provider="third"),
                )
            )


async def test_a_bound_on_the_cost_needs_a_price(tmp_path: Path) -> None:
    limits = session_pb2.SessionLimits(max_cost_micros=1)
    async with embedded_world(tmp_path, [{"text": "One.", "usage": {"input_tokens": 10}}, {"text": "Two."}]) as world:
        with pytest.raises(InvalidArgumentError) as error:
            await world.create(settings=session_pb2.SessionSettings(limits=limits))
        assert (error.value.reason, error.value.metadata["model"]) == ("PRICE_UNKNOWN", "m1")
        await world.create(settings=session_pb2.SessionSettings(model="gpt-4o", limits=limits))
        await world.run("go")
        rest = await world.run("and more")
        assert (rest.session_state, rest.reason.split(":")[0]) == (session_pb2.SESSION_STATE_STOPPED, "LIMIT_COST")


async def test_a_raised_limit_goes_on_without_another_input(tmp_path: Path) -> None:
    settings = session_pb2.SessionSettings(limits=session_pb2.SessionLimits(max_turns=1))
    async with embedded_world(tmp_path, [{"text": "One."}, {"text": "Two."}]) as world:
        await world.create(settings=settings)
        await world.run("go")
        assert (await world.run("go on")).reason.startswith("LIMIT_TURNS")
        patch = session_pb2.SettingsPatch(limits=session_pb2.SessionLimits(max_turns=5))
        await world.coordinator.update_settings(
            coordinator_pb2.UpdateSettingsRequest(session_id="s1", input_id="u1", patch=patch)
        )
        assert (await world.until_rest()).session_state == IDLE
        items = await world.items()
        assert items[-1].model_response.output.items[0].message.text == "Two."
        assert [item.input.control.stop.is_limit for item in items if item.input.control.HasField("stop")] == [True]
        assert items[-1].WhichOneof("item") == "model_response"
        assert items[-2].turn.kind == item_pb2.TURN_KIND_REGULAR
