"""One conversation with the same script gives the same history over every wire format, times and IDs aside."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from harness.llm.script_file import load_script
from tests.support.deployments import services_world, world_of_provider
from tests.support.provider import RecordedRequest, Reply, error_reply, scripted_provider
from tests.support.provider_replies import (
    MESSAGE_STOP,
    block_delta,
    block_start,
    message_end,
    message_start,
    stream_reply,
    text_piece,
    whole_stream,
)
from tests.support.request_rules import assert_legal
from tests.support.stack import COORDINATOR
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

PROVIDERS = {"openai-responses": "openai", "openai-chat": "openai-compatible", "anthropic-messages": "anthropic"}

LOOK = [("c1", "Bash", '{"command":"echo one"}'), ("c2", "Bash", '{"command":"echo two >&2; exit 3"}')]
WRONG = [("c3", "Nope", "{}"), ("c4", "Bash", '{"command":'), ("c1", "Bash", '{"command":"echo again"}')]

_NOT_COMPARED = frozenset(
    {
        "attempts",  # times, and the providers' own request IDs
        "content_digest",
        "created_time",
        "digest",
        "provider",
        "raw_json",
        "recorded_time",
        "response_id",
        "revision",
        "sequence",
        "cache_write_tokens",  # two formats do not tell of them
        "cached_input_tokens",
        "reasoning_tokens",
    }
)


def replies_of(wire_format: str) -> list[Reply]:
    return [
        stream_reply(whole_stream(wire_format, "Looking 世.", LOOK)),
        stream_reply(text_piece(wire_format, "Half an ans")),
        stream_reply(whole_stream(wire_format, "", WRONG)),
        stream_reply(whole_stream(wire_format, "Done.")),
        error_reply(400, {"error": {"type": "invalid_request_error", "message": "bad request"}}),
        stream_reply(whole_stream(wire_format, "Better.")),
    ]


async def history(wire_format: str, directory: Path) -> list[item_pb2.Item]:
    """Hold the conversation, and return its history."""
    replies = replies_of(wire_format)

    def answer(request: RecordedRequest) -> Reply:
        assert_legal(request.body)
        return replies.pop(0)

    async with (
        scripted_provider(answer) as server,
        world_of_provider("embedded", directory, provider=PROVIDERS[wire_format], base_url=server.base_url) as world,
    ):
        await world.create()
        for text in ("look", "go on", "and on"):
            await world.run(text)
        assert replies == []
        return await world.items()


class _Names:
    """Gives IDs the order in which they first appear."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def of(self, value: object) -> str:
        return self._names.setdefault(str(value), f"#{len(self._names)}")


def compared(items: Sequence[item_pb2.Item], directory: Path, provider: str) -> list[Any]:
    """Return a history without what may differ."""
    names = _Names()
    items = [
        item
        for _, group in groupby(items, key=lambda item: item.WhichOneof("item"))
        # Calls of one response end in any order.
        for item in sorted(
            group, key=lambda item: (item.tool_call_status.HasField("result"), item.tool_call_status.call_id)
        )
    ]
    dictionaries = [json_format.MessageToDict(item, preserving_proto_field_name=True) for item in items]
    text = (
        json.dumps([_without(item, names) for item in dictionaries])
        .replace(str(directory), "DIR")
        .replace(f'"{provider} ', '"PROVIDER ')
    )
    made: list[Any] = json.loads(text)
    return made


def _without(value: Any, names: _Names) -> Any:
    if isinstance(value, list):
        return [_without(element, names) for element in value]
    if not isinstance(value, Mapping):
        return value
    made = {}
    for name, member in value.items():
        if name in _NOT_COMPARED or name.endswith(("_time", "elapsed", "digest")):
            continue
        if name.endswith(("_id", "_ids", "_uid")):
            made[name] = [names.of(one) for one in member] if isinstance(member, list) else names.of(member)
        else:
            made[name] = _without(member, names)
    return made


async def test_every_wire_format_gives_the_same_history(tmp_path: Path) -> None:
    histories = {}
    for number, wire_format in enumerate(PROVIDERS):
        directory = tmp_path / f"{number}"  # of one length: the model is told where it works
        directory.mkdir()
        items = await history(wire_format, directory)
        texts = json.dumps([json_format.MessageToDict(item) for item in items])
        assert all(said in texts for said in ("Looking", "Done.", "Better.", "bad request"))
        histories[wire_format] = compared(items, directory, PROVIDERS[wire_format])
    assert histories["openai-chat"] == histories["openai-responses"]
    assert histories["anthropic-messages"] == histories["openai-responses"]


async def test_thoughts_go_back_as_they_came_until_the_model_changes(tmp_path: Path) -> None:
    """Also over a restart and in a fork; afterwards they are left out whole."""
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    thoughts = [
        '{"type":"thinking","thinking":"Let me see.","signature":"c2ln+/=="}',
        '{"type": "redacted_thinking", "data": "3nCr=="}',
    ]
    first = (
        message_start(),
        block_start(0, thinking),
        block_delta(0, "thinking_delta", "thinking", "Let me "),
        block_delta(0, "thinking_delta", "thinking", "see."),
        block_delta(0, "signature_delta", "signature", "c2ln+/=="),
        block_start(1, {"type": "redacted_thinking", "data": "3nCr=="}),
        block_start(2, {"type": "tool_use", "id": "c1", "name": "Bash", "input": {}}),
        block_delta(2, "input_json_delta", "partial_json", '{"command":"echo one"}'),
        message_end("tool_use"),
        MESSAGE_STOP,
    )
    ok = stream_reply(whole_stream("anthropic-messages", "ok"))
    replies = [stream_reply(*first), ok, ok, ok, ok]
    async with scripted_provider(replies) as server:
        async with world_of_provider("embedded", tmp_path, provider="anthropic", base_url=server.base_url) as world:
            await world.create()
            await world.run("one")
        async with world_of_provider("embedded", tmp_path, provider="anthropic", base_url=server.base_url) as world:
            await world.run("two")
            fork = coordinator_pb2.ForkSessionRequest(request_id="f", parent_session_id="s1", session_id="s2")
            await world.coordinator.fork_session(fork)
            world.session_id = "s2"
            await world.run("three")
            patch = session_pb2.SettingsPatch(model="other")
            await world.coordinator.update_settings(
                coordinator_pb2.UpdateSettingsRequest(session_id="s2", patch=patch, input_id="settings")
            )
            await world.run("four")
    for request in server.requests:
        assert_legal(request.body)
    inside = f'"content":[{",".join(thoughts)},{{"type":"tool_use"'.encode()
    assert [inside in request.body for request in server.requests] == [False, True, True, True, False]
    assert b"thinking" not in server.requests[4].body.replace(b'"thinking":{"type":"adaptive"', b"")


async def test_a_server_keeps_recordings_too(tmp_path: Path) -> None:
    async with scripted_provider([stream_reply(whole_stream("anthropic-messages", "Hello."))]) as server:
        environment = {
            "UNREAL_AGENT_LLM_PROVIDER": "anthropic",
            "UNREAL_AGENT_LLM_MODEL": "m1",
            "UNREAL_AGENT_LLM_BASE_URL": server.base_url,
            "ANTHROPIC_API_KEY": "test-key",
        }
        flags = {COORDINATOR: ("--record", str(tmp_path / "recording"))}
        async with services_world(tmp_path, None, environment=environment, flags=flags) as world:
            world.provider = "anthropic"
            await world.create()
            await world.run("hi")
    (entry,) = load_script(tmp_path / "recording").responses
    assert entry.output is not None
    assert [item.message.text for item in entry.output.items] == ["Hello."]
