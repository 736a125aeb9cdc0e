"""The whole agent against a provider at the socket, in each wire format: every request is legal, whatever happened."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.deployments import PATIENT_GRACE_S, world_of_provider
from tests.support.eventually import eventually
from tests.support.invariants import check_history
from tests.support.provider import Hang, RecordedRequest, Reply, ScriptedProvider, scripted_provider
from tests.support.provider_replies import stream_reply, whole_stream
from tests.support.request_rules import assert_legal, is_messages_body
from tests.support.world import World, result_text
from unreal_agent.session.v1 import item_pb2, session_pb2

WIRE_FORMATS = {
    "openai-responses": "openai",
    "openai-chat": "openai-compatible",
    "anthropic-messages": "anthropic",
}
Call = tuple[str, str, str]


def bash_call(call_id: str, command: str) -> Call:
    """Return a call of the model."""
    return (call_id, "Bash", json.dumps({"command": command}))


class Conversation:
    """An agent whose model is the test."""

    def __init__(self, wire_format: str, deployment: str, directory: Path) -> None:
        self.deployment = deployment
        self.wire_format = wire_format
        self.replies: list[Reply] = []
        self.directory = directory
        self.provider: ScriptedProvider | None = None
        self.grace_s = PATIENT_GRACE_S

    def will_say(self, text: str = "", *calls: Call) -> None:
        """Queue an answer."""
        self.replies.append(stream_reply(whole_stream(self.wire_format, text, calls)))

    def reply(self, request: RecordedRequest) -> Reply:
        """Answer a request with the next reply, after holding it against the provider's rules."""
        assert_legal(request.body)
        return self.replies.pop(0)

    def world(self, provider: ScriptedProvider) -> AbstractAsyncContextManager[World]:
        """Open the agent; again: a restart."""
        self.provider = provider
        return world_of_provider(
            self.deployment,
            self.directory,
            provider=WIRE_FORMATS[self.wire_format],
            base_url=provider.base_url,
            grace_s=self.grace_s,
        )

    def requests(self) -> list[list[str]]:
        """Return, for each request, its conversation as short lines: who and what."""
        assert self.provider is not None
        return [_lines(request.json) for request in self.provider.requests]


@pytest.fixture(params=("embedded", "services"))
def deployment(request: pytest.FixtureRequest) -> str:
    """Return each way to run the agent."""
    return str(request.param)


@pytest.fixture(params=sorted(WIRE_FORMATS))
def conversation(request: pytest.FixtureRequest, deployment: str, tmp_path: Path) -> Conversation:
    """Return a conversation in each wire format."""
    return Conversation(request.param, deployment, tmp_path)


async def test_messages_during_a_tool_run_stand_behind_its_results(conversation: Conversation) -> None:
    conversation.grace_s = 0.3
    conversation.will_say(
        "", bash_call("c1", "echo one"), bash_call("c2", "until [ -e go ]; do sleep 0.05; done; echo two")
    )
    conversation.will_say("noted")
    conversation.will_say("done")
    async with scripted_provider(conversation.reply) as provider, conversation.world(provider) as world:
        await world.create()
        await world.say("start")
        await eventually_final(world, 1)
        await world.say("stop, use X", after_turn=True)
        await world.say("and Y", after_turn=True)
        await eventually(lambda: len(provider.requests) == 2, within_s=10)
        (world.workspace / "go").touch()
        await world.until_rest()
        requests = conversation.requests()
        assert requests[1][:5] == [
            "user: start",
            "call c1",
            "call c2",
            "result c1: one",
            "result c2: [still running; the result will follow in a later message]",
        ]
        assert requests[1][-2:] == ["user: stop, use X", "user: and Y"]
        assert "two" in requests[2][-1]
        assert [line for line in requests[2] if line.startswith("user: ")][:3] == [
            "user: start",
            "user: stop, use X",
            "user: and Y",
        ]
        check_history(await world.items(), await world.operations())


async def test_an_interrupting_message_closes_the_request_and_is_in_the_next_one(conversation: Conversation) -> None:
    conversation.replies.append(Reply(steps=[Hang()]))
    conversation.will_say("I see")
    async with scripted_provider(conversation.reply) as provider, conversation.world(provider) as world:
        await world.create()
        await world.say("start")
        await asyncio.wait_for(provider.request_arrived.wait(), 10)
        await world.say("no, other way")
        await world.until_rest()
        await asyncio.wait_for(provider.client_left.wait(), 10)
        assert conversation.requests()[1] == ["user: start", "user: no, other way"]


async def test_a_crash_between_results_leaves_no_call_without_one(conversation: Conversation) -> None:
    calls = [bash_call("c1", "echo one"), bash_call("c2", "sleep 0.8; echo two"), bash_call("c3", "sleep 0.8; exit 3")]
    conversation.will_say("", *calls)
    # Results may come one by one, and a request that a restart or the input cut off is made again.
    for _ in range(6):
        conversation.will_say("go on")
    async with scripted_provider(conversation.reply) as provider:
        async with conversation.world(provider) as world:
            await world.create()
            await world.say("start")
            await eventually_final(world, 1)
        async with conversation.world(provider) as world:
            await world.run("are you there?")
            results = await world.results()
            assert [result_text(results[one]).strip() for one in ("c1", "c2")] == ["one", "two"]
            assert "3" in result_text(results["c3"])
            check_history(await world.items(), await world.operations())


async def test_garbage_arguments_are_told_to_the_model_and_history_stays_legal(conversation: Conversation) -> None:
    broken = ["", "  ", "null", "[]", '"x"', '{"command":', '{"command":"a"}{"b":2}', '{"command":"a","command":"b"}']
    conversation.will_say("", *[(f"c{index}", "Bash", text) for index, text in enumerate(broken)], ("n", "Nope", "{}"))
    conversation.will_say("sorry")
    async with scripted_provider(conversation.reply) as provider, conversation.world(provider) as world:
        await world.create()
        await world.run("start")
        results = await world.results()
        assert len(results) == len(broken) + 1
        assert {one.outcome for one in results.values()} == {item_pb2.CALL_OUTCOME_REJECTED}
        assert await world.operations() == []


async def test_repeated_and_missing_call_ids_are_made_unique(conversation: Conversation) -> None:
    conversation.will_say("", bash_call("same", "echo one"), bash_call("same", "echo two"))
    conversation.will_say("", bash_call("same", "echo three"))
    conversation.will_say("done")
    async with scripted_provider(conversation.reply) as provider, conversation.world(provider) as world:
        await world.create()
        await world.run("start")
        texts = [result_text(one).strip() for one in (await world.results()).values()]
        assert sorted(texts) == ["one", "three", "two"]
        check_history(await world.items(), await world.operations())


async def test_an_image_is_shown_and_a_bad_one_is_told_in_words(conversation: Conversation) -> None:
    calls = [
        ("good", "ViewImage", '{"path": "good.dat"}'),
        ("bad", "ViewImage", '{"path": "bad.png"}'),
    ]
    conversation.will_say("", *calls)
    conversation.will_say("I see it")
    conversation.will_say("still fine")
    async with scripted_provider(conversation.reply) as provider, conversation.world(provider) as world:
        await world.create()
        Image.new("RGB", (30, 20), "red").save(world.workspace / "good.dat", format="PNG")
        (world.workspace / "bad.png").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
        await world.run("look")
        await world.run("and now?")
        results = await world.results()
        assert [part.WhichOneof("part") for part in results["good"].parts][0] == "image"
        assert results["bad"].outcome == item_pb2.CALL_OUTCOME_FAILED
        assert all(part.WhichOneof("part") == "text" for part in results["bad"].parts)
        body = json.dumps(provider.requests[-1].json)
        assert body.count('"type": "image"' if "max_tokens" in body else "data:image/png;base64,") == 1


async def test_a_refused_request_fails_the_session_and_the_next_input_revives_it(conversation: Conversation) -> None:
    body = json.dumps({"error": {"message": "bad request", "type": "invalid_request_error"}}).encode()
    refusal = Reply(status=400, headers={"content-type": "application/json"}, steps=[body])
    conversation.replies.append(refusal)
    conversation.will_say("better")
    async with scripted_provider(conversation.reply) as provider, conversation.world(provider) as world:
        await world.create()
        rest = await world.run("start")
        assert rest.session_state == session_pb2.SESSION_STATE_FAILED
        assert "INVALID_REQUEST" in rest.reason
        assert "bad request" in rest.reason
        rest = await world.run("again")
        assert rest.session_state == session_pb2.SESSION_STATE_IDLE
        assert conversation.requests()[1] == ["user: start", "user: again"]


async def test_a_stop_closes_the_provider_connection(conversation: Conversation) -> None:
    conversation.replies.append(Reply(steps=[Hang()]))
    async with scripted_provider(conversation.reply) as provider, conversation.world(provider) as world:
        await world.create()
        await world.say("start")
        await asyncio.wait_for(provider.request_arrived.wait(), 10)
        await world.stop()
        rest = await world.until_rest()
        assert rest.session_state == session_pb2.SESSION_STATE_STOPPED
        await asyncio.wait_for(provider.client_left.wait(), 10)


async def test_what_was_sent_begins_what_is_sent_next_also_after_a_restart(conversation: Conversation) -> None:
    for number in range(3):
        conversation.will_say(f"call {number}", bash_call(f"c{number}", f"echo {number}"))
        conversation.will_say(f"answer {number}")
    async with scripted_provider(conversation.reply) as provider:
        async with conversation.world(provider) as world:
            await world.create()
            await world.run("one")
            await world.run("two")
        async with conversation.world(provider) as world:
            await world.run("three")
        blocks = [_blocks(request.json) for request in provider.requests]
        assert len(blocks) == 6
        for earlier, later in zip(blocks, blocks[1:], strict=False):
            assert later[: len(earlier)] == earlier


async def eventually_final(world: World, count: int) -> None:
    """Wait until some calls have their final result."""

    async def has_finals() -> bool:
        return len(await world.results()) >= count

    await eventually(has_finals, within_s=10)


def _blocks(body: dict[str, Any]) -> list[str]:
    if is_messages_body(body):
        flat = [(message["role"], block) for message in body["messages"] for block in message["content"]]
        parts = [body["system"], body["tools"], *flat]
        return [json.dumps(part).replace(', "cache_control": {"type": "ephemeral"}', "") for part in parts]
    conversation = body["messages"] if "messages" in body else [body.get("instructions"), *body["input"]]
    return [json.dumps(body["tools"]), *(json.dumps(one) for one in conversation)]


def _lines(body: dict[str, Any]) -> list[str]:
    if is_messages_body(body):
        return [line for message in body["messages"] for line in _messages_lines(message)]
    if "messages" in body:
        return [line for message in body["messages"] for line in _chat_lines(message)]
    return [line for item in body["input"] for line in _responses_lines(item)]


def _chat_lines(message: dict[str, Any]) -> list[str]:
    match message["role"]:
        case "system" | "developer":
            return []
        case "tool":
            return [f"result {message['tool_call_id']}: {message['content'].strip()}"]
        case "assistant":
            text = message.get("content")
            said = [f"assistant: {text}"] if text else []
            return said + [f"call {call['id']}" for call in message.get("tool_calls", [])]
        case _:
            return [f"user: {_text(message['content'])}"]


def _messages_lines(message: dict[str, Any]) -> list[str]:
    lines = []
    for block in message["content"]:
        match block["type"]:
            case "tool_use":
                lines.append(f"call {block['id']}")
            case "tool_result":
                lines.append(f"result {block['tool_use_id']}: {_text(block.get('content', [])).strip()}")
            case "text":
                lines.append(f"{message['role']}: {block['text']}")
            case _:
                continue
    return lines


def _responses_lines(item: dict[str, Any]) -> list[str]:
    match item.get("type", "message"):
        case "function_call":
            return [f"call {item['call_id']}"]
        case "function_call_output":
            return [f"result {item['call_id']}: {_text(item['output']).strip()}"]
        case "message" if item["role"] in {"system", "developer"}:
            return []
        case "message":
            return [f"{item['role']}: {_text(item['content'])}"]
        case _:
            return []


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    assert isinstance(content, list)
    return "".join(part.get("text", "") for part in content)
