"""The `scripted` provider: plays a script, with no network and no state of its own, for demos, tests and benchmarks.

Its place in the script is a function of the history (`recorded_outcomes`), so a restart, a takeover and a fork go on
where the history is; an attempt that leaves no record uses nothing up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from harness.clock import Clock, timestamp
from harness.llm import json_text
from harness.llm.llm import (
    Completed,
    LLMError,
    LLMEvent,
    LLMRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from harness.llm.request_parts import joined_text, load_blobs
from harness.llm.script import Script, ScriptEntry
from unreal_agent.llm.v1 import llm_pb2

WIRE_FORMAT = "scripted"
END_TEXT = "The script has no further response."
SUMMARY_TEXT = "Summary by the scripted provider: the conversation so far was compacted."

_DELTA_CHARS = 24
_MAX_SHOWN_CHARS = 300


class ScriptedAdapter:
    """An `LLMAdapter` that plays one script to any number of sessions."""

    def __init__(
        self,
        script: Script,
        *,
        clock: Clock,
        provider: str = "scripted",
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Keep the script.

        Args:
            script: What is played.
            clock: Start times and retry times.
            provider: Name that responses carry.
            sleep: Waits for `delay_seconds`.
        """
        self._script = script
        self._clock = clock
        self._provider = provider
        self._sleep = sleep

    async def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        """Play the entry at the request's place; see `LLMAdapter.respond`."""
        entry = self._entry(request)
        attempt = llm_pb2.Attempt(number=1, start_time=timestamp(self._clock.now()), provider=self._provider)
        start_s = self._clock.monotonic_s()
        failure = await self._mismatch(entry, request)
        if failure is None:
            await self._sleep(entry.delay_s)
            failure = self._scripted_failure(entry)
        elapsed = Duration()
        elapsed.FromTimedelta(timedelta(seconds=self._clock.monotonic_s() - start_s))
        attempt.elapsed.CopyFrom(elapsed)
        if failure is not None:
            attempt.failure.CopyFrom(failure)
            raise LLMError(failure, [attempt])
        output = self._output(entry, request, attempt)
        async for delta in _deltas(output.items):
            yield delta
        yield Completed(output=output)

    async def aclose(self) -> None:
        """Nothing is open."""

    def _entry(self, request: LLMRequest) -> ScriptEntry:
        if request.is_compaction:
            entries, place = self._script.compactions, request.recorded_compactions
            end = ScriptEntry(place="the fixed summary", text=SUMMARY_TEXT)
        else:
            entries, place = self._script.responses, request.recorded_outcomes
            end = ScriptEntry(place="the end of the script", text=END_TEXT)
        return entries[place] if place < len(entries) else end

    async def _mismatch(self, entry: ScriptEntry, request: LLMRequest) -> llm_pb2.Failure | None:
        """Return the failure of an entry that expects something else than what was said last."""
        if entry.expect is None:
            return None
        said = await _said_last(request)
        if any(entry.expect.search(text) for text in (*said, "\n".join(said))):
            return None
        shown = _one_line(" | ".join(said)) or "(nothing)"
        message = (
            f"scripted: {entry.place} expects {_one_line(entry.expect.pattern)!r}, but what was said last is: {shown}"
        )
        return llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_SCRIPT, message=message)

    def _scripted_failure(self, entry: ScriptEntry) -> llm_pb2.Failure | None:
        if entry.failure is not None:
            return self._recorded_failure(entry.failure)
        if entry.error is None:
            return None
        name = llm_pb2.ErrorClass.Name(entry.error.error_class).removeprefix("ERROR_CLASS_").lower()
        failure = llm_pb2.Failure(
            error_class=entry.error.error_class, message=f"scripted: {entry.place} plays the error {name}"
        )
        if entry.error.retry_after_s is not None:
            wait = timedelta(seconds=min(entry.error.retry_after_s, timedelta(days=365).total_seconds()))
            failure.retry_time.CopyFrom(timestamp(self._clock.now() + wait))
        return failure

    def _recorded_failure(self, recorded: llm_pb2.Failure) -> llm_pb2.Failure:
        failure = llm_pb2.Failure()
        failure.CopyFrom(recorded)
        if failure.HasField("retry_time"):
            # The time is over; what was waited for then is not waited for again.
            failure.retry_time.CopyFrom(timestamp(self._clock.now()))
        return failure

    def _output(self, entry: ScriptEntry, request: LLMRequest, attempt: llm_pb2.Attempt) -> llm_pb2.ModelOutput:
        if entry.output is not None:
            recorded = llm_pb2.ModelOutput()
            recorded.CopyFrom(entry.output)
            recorded.provider = self._provider
            del recorded.attempts[:]
            attempt.usage.CopyFrom(recorded.usage)
            recorded.attempts.append(attempt)
            return recorded
        output = llm_pb2.ModelOutput(
            stop_reason=entry.stop_reason,
            usage=entry.usage,
            model=request.model or "scripted",
            provider=self._provider,
        )
        if entry.reasoning:
            raw_json = json_text.write({"reasoning": entry.reasoning})
            output.items.add(
                reasoning=llm_pb2.Reasoning(summary=entry.reasoning, raw_json=raw_json, wire_format=WIRE_FORMAT)
            )
        if entry.text:
            output.items.add(message=llm_pb2.OutputMessage(text=entry.text))
        for call in entry.tool_calls:
            output.items.add(tool_call=call)
        if entry.usage is not None:
            attempt.usage.CopyFrom(entry.usage)
        output.attempts.append(attempt)
        return output


async def _deltas(items: Sequence[llm_pb2.OutputItem]) -> AsyncGenerator[LLMEvent, None]:
    """Yield what a response says, a few characters at a time."""
    calls = 0
    for item in items:
        text = item.reasoning.summary or item.message.text
        for start in range(0, len(text), _DELTA_CHARS):
            piece = text[start : start + _DELTA_CHARS]
            is_reasoning = item.HasField("reasoning")
            yield ReasoningDelta(attempt=1, text=piece) if is_reasoning else TextDelta(attempt=1, text=piece)
            await asyncio.sleep(0)
        if item.HasField("tool_call"):
            call = item.tool_call
            yield ToolCallDelta(attempt=1, index=calls, name=call.name, arguments=call.arguments_json)
            calls += 1


async def _said_last(request: LLMRequest) -> list[str]:
    """Return what each message and tool result behind the last response says."""
    last: list[llm_pb2.ContextEntry] = []
    for entry in reversed(request.entries):
        if entry.WhichOneof("entry") == "assistant":
            break
        last.insert(0, entry)
    blobs = await load_blobs(last, request.load_blob)
    return [
        joined_text(entry.user.parts if entry.WhichOneof("entry") == "user" else entry.tool_result.parts, blobs)
        for entry in last
    ]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_SHOWN_CHARS else line[:_MAX_SHOWN_CHARS] + "…"
