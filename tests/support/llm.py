"""Requests, conversations and adapters for tests of what talks to a model."""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from harness.clock import Clock
from harness.llm import Completed, LLMAdapter, LLMEvent, LLMRequest
from harness.llm.http_stream import Endpoint, HttpAdapter
from harness.llm.providers import WIRE_FORMATS, dialect_of
from harness.llm.recording import Recorder
from harness.llm.request_parts import Quirks
from harness.llm.retry import RetryPolicy, Timeouts
from unreal_agent.llm.v1 import llm_pb2

__all__ = ["WIRE_FORMATS"]  # for tests that run over all of them

API_KEY = "key-f00dfeedbeef"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
START_TIME = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@dataclass(slots=True)
class ManualClock:
    """A clock that a test moves."""

    wall: datetime = START_TIME
    elapsed_s: float = 0.0

    def now(self) -> datetime:
        return self.wall + timedelta(seconds=self.elapsed_s)

    def monotonic_s(self) -> float:
        return self.elapsed_s


@dataclass(slots=True)
class RecordedSleep:
    """A sleep that takes no time, moves the clock, and keeps what was asked for."""

    clock: ManualClock
    slept_s: list[float] = field(default_factory=list)

    async def __call__(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.clock.elapsed_s += seconds


def blob_ref(content: bytes, media_type: str) -> llm_pb2.BlobRef:
    digest = hashlib.sha256(content).hexdigest()
    return llm_pb2.BlobRef(digest=digest, size_bytes=len(content), media_type=media_type)


def text_part(text: str) -> llm_pb2.ContentPart:
    return llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))


def image_part(content: bytes = PNG, media_type: str = "image/png") -> llm_pb2.ContentPart:
    image = llm_pb2.ImagePart(blob=blob_ref(content, media_type), media_type=media_type, width=1, height=1)
    return llm_pb2.ContentPart(image=image)


def user(*parts: str | llm_pb2.ContentPart) -> llm_pb2.ContextEntry:
    content = [text_part(part) if isinstance(part, str) else part for part in parts]
    return llm_pb2.ContextEntry(user=llm_pb2.UserMessage(parts=content))


def assistant(*items: llm_pb2.OutputItem) -> llm_pb2.ContextEntry:
    return llm_pb2.ContextEntry(assistant=llm_pb2.AssistantMessage(items=items))


def said(text: str, phase: str = "") -> llm_pb2.OutputItem:
    return llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text=text, phase=phase))


def called(call_id: str, name: str = "Bash", arguments: str = '{"command":"ls"}') -> llm_pb2.OutputItem:
    return llm_pb2.OutputItem(tool_call=llm_pb2.ToolCall(call_id=call_id, name=name, arguments_json=arguments))


def thought(raw_json: str, wire_format: str) -> llm_pb2.OutputItem:
    return llm_pb2.OutputItem(reasoning=llm_pb2.Reasoning(raw_json=raw_json, wire_format=wire_format))


def result(call_id: str, *parts: str | llm_pb2.ContentPart, name: str = "Bash") -> llm_pb2.ContextEntry:
    content = [text_part(part) if isinstance(part, str) else part for part in parts]
    return llm_pb2.ContextEntry(tool_result=llm_pb2.ToolResult(call_id=call_id, tool_name=name, parts=content))


BASH_TOOL = llm_pb2.ToolDefinition(
    name="Bash",
    description="Runs a command.",
    parameters_json='{"type":"object","properties":{"command":{"type":"string"}},"required":["command"]}',
)


def request(*entries: llm_pb2.ContextEntry, blobs: Sequence[bytes] = (PNG,), **members: Any) -> LLMRequest:
    """Return a request; `members` replace its fields."""
    by_digest = {hashlib.sha256(content).hexdigest(): content for content in blobs}

    async def load_blob(digest: str) -> bytes:
        return by_digest[digest]

    made = LLMRequest(
        session_id="session-1",
        turn_id="turn-1",
        model="m-1",
        effort="high",
        max_output_tokens=0,
        prompt=llm_pb2.Prompt(system_text="You are careful.", tools=[BASH_TOOL]),
        entries=entries or (user("hello"),),
        cache_key="cache-1",
        recorded_outcomes=0,
        recorded_compactions=0,
        is_compaction=False,
        load_blob=load_blob,
    )
    return replace(made, **members)


def http_adapter(
    wire_format: str,
    base_url: str,
    *,
    clock: Clock | None = None,
    sleep: Any = None,
    timeouts: Timeouts | None = None,
    retries: RetryPolicy | None = None,
    quirks: Quirks | None = None,
    recorder: Recorder | None = None,
) -> HttpAdapter:
    """Return an adapter whose back-off takes no time unless a sleep is given."""
    clock = clock or ManualClock()
    if sleep is None:
        assert isinstance(clock, ManualClock)
        sleep = RecordedSleep(clock)
    quirks = quirks or Quirks()
    endpoint = Endpoint(
        provider="acme",
        base_url=base_url,
        api_key=API_KEY,
        key_variable="ACME_API_KEY",
        key_header=quirks.key_header,
        streams=quirks.streams,
        headers=quirks.headers,
    )
    return HttpAdapter(
        dialect=dialect_of(wire_format, quirks),
        endpoint=endpoint,
        recorder=recorder,
        clock=clock,
        timeouts=timeouts,
        retries=retries,
        random=random.Random(1),
        sleep=sleep,
    )


async def collect(adapter: LLMAdapter, asked: LLMRequest) -> tuple[list[LLMEvent], llm_pb2.ModelOutput]:
    """Return every event of a request that succeeds, and its response."""
    async with aclosing(adapter.respond(asked)) as stream:
        events: list[LLMEvent] = [event async for event in stream]
    last = events[-1]
    assert isinstance(last, Completed)
    return events, last.output


def text_of(output: llm_pb2.ModelOutput) -> str:
    return "".join(item.message.text for item in output.items if item.HasField("message"))


def calls_of(output: llm_pb2.ModelOutput) -> list[tuple[str, str, str]]:
    """Return (ID, name, arguments text) of each call."""
    calls = [item.tool_call for item in output.items if item.HasField("tool_call")]
    return [(call.call_id, call.name, call.arguments_json) for call in calls]
