"""What was sent once is sent the same for ever, so that providers' caches hold: over real HTTP, in each wire format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from harness.coordinator import CoordinatorConfig
from harness.llm.providers import ProviderConfig, open_adapter
from harness.llm.retry import RetryPolicy
from tests.support.prompt_blocks import assert_begins, blocks_of
from tests.support.provider import RecordedRequest, Reply, scripted_provider
from tests.support.provider_replies import stream_reply, whole_stream
from tests.support.request_rules import assert_legal
from tests.support.stack import COORDINATOR, three_services
from tests.support.world import World, embedded_world
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

WIRE_FORMATS = {
    "openai-responses": "openai",
    "openai-chat": "openai-compatible",
    "anthropic-messages": "anthropic",
}
BREAKS = {item_pb2.CONTEXT_CHANGE_KIND_PREFIX_BREAK, item_pb2.CONTEXT_CHANGE_KIND_COMPACTED}


class Model:
    """A provider that makes a call in every other answer, and keeps every request."""

    def __init__(self, wire_format: str) -> None:
        self.wire_format = wire_format
        self.provider = WIRE_FORMATS[wire_format]
        self.bodies: list[dict[str, Any]] = []
        self.base_url = ""

    def reply(self, request: RecordedRequest) -> Reply:
        assert_legal(request.body)
        self.bodies.append(request.json)
        number = len(self.bodies)
        if number % 2 == 0:
            return stream_reply(whole_stream(self.wire_format, f"Answer {number}."))
        looks = (f"v{number}", "ViewImage", json.dumps({"path": "dot.png"}))
        prints = (f"b{number}", "Bash", json.dumps({"command": f"echo {number}"}))
        return stream_reply(whole_stream(self.wire_format, f"I look, {number}.", [looks, prints]))

    @asynccontextmanager
    async def world(self, directory: Path, name: str = "coordinator") -> AsyncIterator[World]:
        """Open an agent of this name that asks this model; again: a restart."""
        config = ProviderConfig(
            provider=self.provider, model="m1", base_url=self.base_url, api_key="k", retries=RetryPolicy(attempts=1)
        )
        coordinator = CoordinatorConfig(name=name, grace_s=30.0, lease_s=1.0)
        async with embedded_world(directory, open_adapter(config), config=coordinator) as world:
            world.provider = self.provider
            Image.new("RGB", (4, 4), "red").save(world.workspace / "dot.png")
            yield world

    def check(self, *, since: int = 0) -> None:
        """Fail where a request does not begin as the one before it did."""
        for earlier, later in zip(self.bodies[since:], self.bodies[since + 1 :], strict=False):
            assert_begins(earlier, later)


@pytest.fixture(params=sorted(WIRE_FORMATS))
async def model(request: pytest.FixtureRequest) -> AsyncIterator[Model]:
    """Return a provider of each wire format, served over HTTP."""
    made = Model(request.param)
    async with scripted_provider(made.reply) as served:
        made.base_url = served.base_url
        yield made


async def assert_no_break(world: World) -> None:
    """Fail where the history records a break of the prefix."""
    turns = [item.turn for item in await world.items() if item.HasField("turn")]
    assert not [change for turn in turns for change in turn.changes if change.kind in BREAKS]


async def test_turn_by_turn(model: Model, tmp_path: Path) -> None:
    async with model.world(tmp_path) as world:
        await world.create()
        for number in range(3):
            await world.run(f"question {number}")
        await assert_no_break(world)
    assert len(model.bodies) == 6
    model.check()
    assert len(blocks_of(model.bodies[-1])) > len(blocks_of(model.bodies[0])) + 10


async def test_over_a_restart_and_in_another_coordinator(model: Model, tmp_path: Path) -> None:
    for name in ("coordinator", "coordinator", "another"):
        async with model.world(tmp_path, name) as world:
            if not model.bodies:
                await world.create()
            await world.run("go on")
            await assert_no_break(world)
    assert len(model.bodies) == 6
    model.check()


async def test_in_a_fork(model: Model, tmp_path: Path) -> None:
    async with model.world(tmp_path) as world:
        await world.create()
        await world.run("question")
        await world.run("another")
        before = len(model.bodies)
        await world.coordinator.fork_session(
            coordinator_pb2.ForkSessionRequest(request_id="f1", parent_session_id="s1", session_id="child")
        )
        world.session_id = "child"
        await world.run("elsewhere")
        await assert_no_break(world)
    assert_begins(model.bodies[before - 1], model.bodies[before])
    model.check()


async def test_after_a_process_was_killed(model: Model, tmp_path: Path) -> None:
    environment = {
        "UNREAL_AGENT_LLM_PROVIDER": model.provider,
        "UNREAL_AGENT_LLM_MODEL": "m1",
        "UNREAL_AGENT_LLM_BASE_URL": model.base_url,
        "UNREAL_AGENT_LLM_API_KEY": "k",
    }
    async with AsyncExitStack() as opened:
        stack = await opened.enter_async_context(three_services(tmp_path, None, environment=environment))
        world = await opened.enter_async_context(stack.world())
        world.provider = model.provider
        await world.create()
        Image.new("RGB", (4, 4), "red").save(world.workspace / "dot.png")
        await world.run("question")
        await stack.restart(COORDINATOR)
        await world.run("and now?")
        await assert_no_break(world)
    model.check()


async def test_a_change_of_settings_breaks_it_once_and_says_why(model: Model, tmp_path: Path) -> None:
    async with model.world(tmp_path) as world:
        await world.create()
        await world.run("question")
        before = len(model.bodies)
        patch = session_pb2.SettingsPatch(system_prompt="Be brief.")
        await world.coordinator.update_settings(
            coordinator_pb2.UpdateSettingsRequest(session_id="s1", input_id="u1", patch=patch)
        )
        await world.run("another")
        turns = [item.turn for item in await world.items() if item.HasField("turn")]
        assert [[change.reason for change in turn.changes] for turn in turns[before:]] == [
            ["the prompt changed with the settings"],
            [],
        ]
    earlier, later = blocks_of(model.bodies[before - 1]), blocks_of(model.bodies[before])
    head = 2 if model.wire_format == "openai-chat" else 1  # its instructions are a message
    assert earlier[:head] != later[:head]
    assert earlier[head:] == later[head : len(earlier)], "the conversation itself is as it was"
    model.check(since=before)
