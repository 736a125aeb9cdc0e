"""Recordings in every format: what is kept, what is not, and that the scripted provider plays it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import FailedPreconditionError, HarnessError, InvalidArgumentError
from harness.llm import LLMError, LLMRequest
from harness.llm.recording import Recorder
from harness.llm.script_file import load_script
from harness.llm.scripted import ScriptedAdapter
from tests.support.llm import (
    API_KEY,
    WIRE_FORMATS,
    ManualClock,
    assistant,
    collect,
    http_adapter,
    request,
    result,
    text_of,
    user,
)
from tests.support.provider import Reply, error_reply, scripted_provider
from tests.support.provider_replies import stream_reply, whole_stream
from unreal_agent.llm.v1 import llm_pb2

all_formats = pytest.mark.parametrize("wire_format", WIRE_FORMATS)
CALL = ("c1", "Bash", '{"command":"ls"}')


async def recorded(directory: Path, wire_format: str, *replies: Reply) -> list[llm_pb2.ModelOutput | llm_pb2.Failure]:
    """Ask for one outcome after the other, and return them as the history would have them."""
    outcomes: list[llm_pb2.ModelOutput | llm_pb2.Failure] = []
    async with scripted_provider(replies) as provider:
        adapter = http_adapter(wire_format, provider.base_url, recorder=Recorder(directory))
        while len(provider.requests) < len(replies):
            try:
                outcomes.append((await collect(adapter, asked(len(outcomes))))[1])
            except LLMError as error:
                outcomes.append(error.failure)
        await adapter.aclose()
    return outcomes


def asked(place: int) -> LLMRequest:
    return request(user("go"), recorded_outcomes=place)


def content(outcome: llm_pb2.ModelOutput) -> tuple[object, ...]:
    return list(outcome.items), outcome.stop_reason, outcome.usage, outcome.model


@all_formats
async def test_a_recording_is_played_as_it_was(wire_format: str, tmp_path: Path) -> None:
    first, second, third = await recorded(
        tmp_path,
        wire_format,
        error_reply(503, {"error": {"message": "later"}}),
        stream_reply(whole_stream(wire_format, "Looking.", [CALL])),
        error_reply(400, {"error": {"message": "no such model"}}),
        stream_reply(whole_stream(wire_format, "Done.")),
    )
    assert isinstance(first, llm_pb2.ModelOutput)
    assert isinstance(second, llm_pb2.Failure)
    assert isinstance(third, llm_pb2.ModelOutput)
    player = ScriptedAdapter(load_script(tmp_path), clock=ManualClock())
    assert content((await collect(player, asked(0)))[1]) == content(first)
    with pytest.raises(LLMError) as caught:
        await collect(player, asked(1))
    assert caught.value.failure == second
    assert text_of((await collect(player, asked(2)))[1]) == "Done."


@all_formats
async def test_every_exchange_is_kept_without_the_key(wire_format: str, tmp_path: Path) -> None:
    leaking = json.dumps({"error": {"message": f"Incorrect key {API_KEY}, or sk-abcd****wxyz"}}).encode()
    headers = {"content-type": "application/json", "set-cookie": "session=1", "x-request-id": "req-1"}
    await recorded(
        tmp_path,
        wire_format,
        Reply(status=500, headers=headers, steps=[leaking]),
        stream_reply(whole_stream(wire_format, f"Your key is {API_KEY}.")),
    )
    (path,) = (tmp_path / "session-1").iterdir()
    text = path.read_text()
    assert (path.name, path.stat().st_mode & 0o777) == ("000000.json", 0o600)
    for secret in (API_KEY, "authorization", "set-cookie", "wxyz"):
        assert secret not in text
    failed, answered = json.loads(text)["exchanges"]
    assert json.loads(failed["request"]["body"])["model"] == "m-1"
    assert failed["response"]["status"] == 500
    assert failed["response"]["headers"] == {"content-type": "application/json", "x-request-id": "req-1"}
    assert (answered["response"]["status"], answered["response"]["body"]) == (200, "***")


@all_formats
async def test_an_answer_is_kept_as_it_came(wire_format: str, tmp_path: Path) -> None:
    stream = whole_stream(wire_format, "Done 世.")
    await recorded(tmp_path, wire_format, stream_reply(stream[:50], stream[50:]))
    (path,) = (tmp_path / "session-1").iterdir()
    assert json.loads(path.read_text())["exchanges"][0]["response"]["body"] == stream.decode()


@all_formats
async def test_a_key_in_the_conversation_is_not_kept(wire_format: str, tmp_path: Path) -> None:
    """Also where JSON inside JSON escapes it."""
    async with scripted_provider([stream_reply(whole_stream(wire_format, "ok"))]) as provider:
        adapter = http_adapter(wire_format, provider.base_url, recorder=Recorder(tmp_path))
        leak = f'{{"command":"echo \\"{API_KEY}\\""}}'
        call = llm_pb2.OutputItem(tool_call=llm_pb2.ToolCall(call_id="c1", name="Bash", arguments_json=leak))
        await collect(adapter, request(user("go"), assistant(call), result("c1", API_KEY)))
        await adapter.aclose()
    assert API_KEY.encode() in provider.requests[0].body
    assert API_KEY not in "".join(path.read_text() for path in tmp_path.rglob("*.json"))


async def test_asking_again_takes_the_place_of_the_first_answer(tmp_path: Path) -> None:
    for text in ("first", "second"):
        await recorded(tmp_path, "openai-chat", stream_reply(whole_stream("openai-chat", text)))
    script = load_script(tmp_path)
    assert [text_of(entry.output) for entry in script.responses if entry.output is not None] == ["second"]


async def test_compactions_are_told_apart(tmp_path: Path) -> None:
    async with scripted_provider([stream_reply(whole_stream("openai-chat", "In short."))]) as provider:
        adapter = http_adapter("openai-chat", provider.base_url, recorder=Recorder(tmp_path))
        compaction = request(is_compaction=True, recorded_outcomes=7)
        await collect(adapter, compaction)
        await adapter.aclose()
    player = ScriptedAdapter(load_script(tmp_path), clock=ManualClock())
    assert text_of((await collect(player, compaction))[1]) == "In short."


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({}, FailedPreconditionError, "holds none"),
        ({"a/000000.json": "{}", "b/000000.json": "{}"}, FailedPreconditionError, "of 2 sessions: name one"),
        ({"000000.json": "{}"}, InvalidArgumentError, "is no recording of version 1"),
        ({"000000.json": '{"version": 1}'}, InvalidArgumentError, "cannot be played"),
        ({"000000.json": '{"version": 1, "output": {"x": 1}}'}, InvalidArgumentError, "cannot be played"),
        ({"000000.json": "{broken"}, InvalidArgumentError, "is no recording"),
        ({"000001.json": '{"version": 1, "output": {}}'}, FailedPreconditionError, "lacks number 0"),
    ],
)
def test_what_cannot_be_played_is_told(
    tmp_path: Path, files: dict[str, str], error: type[HarnessError], words: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=words):
        load_script(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPreconditionError, match="cannot be kept in .*file/below"):
        Recorder(tmp_path / "file" / "below")
