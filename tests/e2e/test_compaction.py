"""A conversation that does not fit is summarised, in every deployment and wire format; whatever dies, it goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from harness.coordinator import CoordinatorConfig
from harness.llm.providers import ProviderConfig, open_adapter
from harness.llm.retry import RetryPolicy
from tests.support.deployments import DEPLOYMENTS
from tests.support.invariants import check_history
from tests.support.provider import RecordedRequest, Reply, error_reply, scripted_provider
from tests.support.provider_replies import stream_reply, whole_stream
from tests.support.request_rules import assert_legal
from tests.support.stack import COORDINATOR, three_services
from tests.support.world import Script, World, bash, embedded_world
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

IDLE = session_pb2.SESSION_STATE_IDLE
OVERFLOW: Mapping[str, object] = {"error": {"class": "context_overflow"}}
WIRE_FORMATS = {
    "openai-responses": "openai",
    "openai-chat": "openai-compatible",
    "anthropic-messages": "anthropic",
}


def script(*, summary_delay_s: float = 0) -> Script:
    """Return two answers, an overflow, a summary, and an answer to the summary."""
    return [
        {"text": "I look.", "tool_calls": [bash("echo one")]},
        {"expect": "one", "text": "It says one."},
        OVERFLOW,
        {"for": "compaction", "text": "The file says one.", "delay_seconds": summary_delay_s},
        {"expect": "^and now", "text": "All done."},
    ]


async def summaries(world: World) -> list[str]:
    return [item.compaction.summary for item in await world.items() if item.HasField("compaction")]


@pytest.mark.parametrize("deployment", sorted(DEPLOYMENTS))
async def test_an_overflow_is_summarised_and_gone_on_from(tmp_path: Path, deployment: str) -> None:
    async with DEPLOYMENTS[deployment](tmp_path, script()) as world:
        await world.create()
        await world.run("look")
        assert (await world.run("and now?")).session_state == IDLE
        items = await world.items()
        check_history(items, await world.operations())
        kinds = [item.WhichOneof("item") for item in items]
        assert kinds[-7:] == [
            "turn",
            "turn_failure",
            "turn",
            "model_response",
            "compaction",
            "turn",
            "model_response",
        ]
        assert items[-1].model_response.output.items[0].message.text == "All done."
        (summary,) = await summaries(world)
        assert "The file says one." in summary
        context = await world.context()
        assert [entry.kind for entry in context.report] == ["prompt", "summary", "input", "response"]
        assert [change.kind for change in context.changes] == [item_pb2.CONTEXT_CHANGE_KIND_COMPACTED]


@pytest.mark.parametrize("deployment", sorted(DEPLOYMENTS))
async def test_a_process_that_ends_while_it_summarises_loses_nothing(tmp_path: Path, deployment: str) -> None:
    def is_compaction(event: coordinator_pb2.WatchSessionResponse) -> bool:
        return any(item.turn.kind == item_pb2.TURN_KIND_COMPACTION for item in event.change.items)

    async with DEPLOYMENTS[deployment](tmp_path, script(summary_delay_s=60)) as world:
        await world.create()
        await world.run("look")
        await world.say("and now?")
        await world.watch_until(is_compaction)
        await world.say("and now this", after_turn=True)
    async with DEPLOYMENTS[deployment](tmp_path, script()) as world:
        assert (await world.until_rest()).session_state == IDLE
        items = await world.items()
        check_history(items, await world.operations())
        turns = [item.turn for item in items if item.turn.kind == item_pb2.TURN_KIND_COMPACTION]
        assert len(turns) == 2
        assert turns[0].context_digest == turns[1].context_digest, "the same summary is asked for again"
        assert len(await summaries(world)) == 1
        words = [entry.user.parts[-1].text.text for entry in (await world.context()).entries if entry.HasField("user")]
        assert words[1:] == ["and now?", "and now this"]


async def test_the_scripted_provider_summarises_by_itself_and_uses_nothing_up(tmp_path: Path) -> None:
    responses: Script = [{"text": "One."}, OVERFLOW, {"expect": "^again", "text": "Two."}]
    async with embedded_world(tmp_path, responses) as world:
        await world.create()
        await world.run("go")
        assert (await world.run("again")).session_state == IDLE
        (summary,) = await summaries(world)
        assert "the conversation so far was compacted" in summary


class Full:
    """A provider whose window holds so many user messages; it keeps what it was asked."""

    def __init__(self, wire_format: str, *, refuses_all_behind: int = 10**6) -> None:
        self.wire_format = wire_format
        self.bodies: list[bytes] = []
        self._refuses_all_behind = refuses_all_behind

    def reply(self, request: RecordedRequest) -> Reply:
        assert_legal(request.body)
        self.bodies.append(request.body)
        is_full = request.body.count(b"fill ") > 3 and b"[Summary" not in request.body
        if len(self.bodies) > self._refuses_all_behind or (
            is_full and b"will be replaced by a summary" not in request.body
        ):
            message = "This model's maximum context length is 8192 tokens. Please reduce the length of the messages."
            return error_reply(400, {"error": {"type": "invalid_request_error", "message": message}})
        return stream_reply(whole_stream(self.wire_format, f"Answer {len(self.bodies)}."))

    @asynccontextmanager
    async def world(self, directory: Path) -> AsyncIterator[World]:
        async with scripted_provider(self.reply) as served:
            provider = WIRE_FORMATS[self.wire_format]
            config = ProviderConfig(
                provider=provider, model="m1", base_url=served.base_url, api_key="k", retries=RetryPolicy(attempts=3)
            )
            coordinator = CoordinatorConfig(grace_s=30.0)
            async with embedded_world(directory, open_adapter(config), config=coordinator) as world:
                world.provider = provider
                await world.create()
                yield world


@pytest.mark.parametrize("wire_format", sorted(WIRE_FORMATS))
async def test_a_real_providers_refusal_is_summarised_once(tmp_path: Path, wire_format: str) -> None:
    full = Full(wire_format)
    async with full.world(tmp_path) as world:
        for number in range(5):
            assert (await world.run(f"fill {number}")).session_state == IDLE
        assert len(await summaries(world)) == 1
    assert len(full.bodies) == 5 + 1 + 1, "one refusal, one summary"
    assert len(set(full.bodies)) == len(full.bodies), "the same bytes were sent twice"


@pytest.mark.parametrize("wire_format", sorted(WIRE_FORMATS))
async def test_where_no_summary_helps_the_session_fails_clearly(tmp_path: Path, wire_format: str) -> None:
    full = Full(wire_format, refuses_all_behind=3)
    async with full.world(tmp_path) as world:
        for number in range(3):
            await world.run(f"fill {number}")
        rest = await world.run("fill 3")
        assert rest.session_state == session_pb2.SESSION_STATE_FAILED
        assert rest.reason.startswith("CONTEXT_OVERFLOW: the conversation does not fit the model's window")
    assert len(full.bodies) == 3 + 1 + 2
    assert len(set(full.bodies)) == len(full.bodies), "the same bytes were sent twice"


@pytest.mark.parametrize(("percent", "made"), [("10", 1), ("90", 0)])
async def test_where_room_is_made_is_a_flag_of_the_service(tmp_path: Path, percent: str, made: int) -> None:
    flags = {COORDINATOR: ("--compaction-percent", percent)}
    responses: Script = [{"text": "word " * 400}, {"text": "Done."}]
    async with three_services(tmp_path, responses, flags=flags) as stack, stack.world() as world:
        await world.create(settings=session_pb2.SessionSettings(model="gpt-4"))
        await world.run("go")
        assert (await world.run("and on")).session_state == IDLE
        assert len(await summaries(world)) == made
