"""The whole agent with a model server that others wrote, in every wire format: a call, its result, an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_mock_api import MockServer, MockServerOptions
from llm_mock_api.types.reply import ReplyObject, ToolCall

from tests.support.deployments import world_of_provider
from tests.support.invariants import check_history
from tests.support.world import result_text
from unreal_agent.session.v1 import session_pb2

PROVIDERS = {"openai-responses": "openai", "openai-chat": "openai-compatible", "anthropic-messages": "anthropic"}


@pytest.mark.parametrize("wire_format", sorted(PROVIDERS))
async def test_a_job_is_done(wire_format: str, tmp_path: Path) -> None:
    calls = [ToolCall(name="Bash", args={"command": f"echo {word}"}) for word in ("one", "two")]
    async with MockServer(MockServerOptions(default_latency=0, log_level="none")) as server:
        server.when("look around").reply(ReplyObject(text="Looking.", tools=calls)).times(1)
        server.fallback("All done.")
        base_url = f"{server.url}/v1"
        async with world_of_provider("embedded", tmp_path, provider=PROVIDERS[wire_format], base_url=base_url) as world:
            await world.create()
            rest = await world.run("look around")
            results = await world.results()
            items = await world.items()
            check_history(items, await world.operations())
    assert rest.session_state == session_pb2.SESSION_STATE_IDLE
    assert sorted(result_text(result).strip() for result in results.values()) == ["one", "two"]
    said = [item.model_response.output for item in items if item.HasField("model_response")]
    assert [[part.message.text for part in output.items if part.HasField("message")] for output in said] == [
        ["Looking."],
        ["All done."],
    ]
