"""A model that counts what it is sent, refuses what is too much for it, and holds each request against the rules."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path

from harness.llm import Completed, LLMError, LLMEvent, LLMRequest
from harness.llm.providers import WIRE_FORMATS, dialect_of
from harness.llm.request_parts import Quirks, joined_text, load_blobs
from tests.support.request_rules import assert_legal
from unreal_agent.llm.v1 import llm_pb2

BYTES_PER_TOKEN = 3
"""Of this model: denser than what is estimated before it has counted."""


class DemandingModel:
    """An `LLMAdapter`: calls a command that prints `output_chars` characters in each turn, then ends."""

    def __init__(self, *, turns: int, output_chars: int, window: int) -> None:
        """Make so many calls; take `window` tokens at most."""
        self.turns = turns
        self.output_chars = output_chars
        self.window = window
        self.sizes: list[int] = []
        """Tokens of each request, as this model counts them."""

        self.resident_mib: list[float] = []
        """What this process kept in memory at each request."""

        self.summaries = 0
        self.refused = 0
        self._dialects = [dialect_of(wire_format, Quirks()) for wire_format in WIRE_FORMATS]

    async def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        """Count, check, and answer."""
        blobs = await load_blobs(request.entries, request.load_blob)
        for dialect in self._dialects:
            assert_legal(dialect.body(request, blobs))
        tokens = self._count(request, blobs)
        self.sizes.append(tokens)
        self.resident_mib.append(_resident_mib())
        if tokens > self.window:
            self.refused += 1
            message = f"{tokens} tokens are more than {self.window}"
            raise LLMError(llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW, message=message))
        output = llm_pb2.ModelOutput(stop_reason=llm_pb2.STOP_REASON_COMPLETE, provider="demanding", model="m1")
        number = request.recorded_outcomes
        if request.is_compaction:
            self.summaries += 1
            output.items.add(message=llm_pb2.OutputMessage(text=f"Summary {self.summaries}: " + "s" * 2_000))
        elif number < self.turns:
            arguments = json.dumps({"command": f"printf 'turn {number} %0{self.output_chars}d' {number}"})
            output.items.add(message=llm_pb2.OutputMessage(text=f"Turn {number}."))
            output.items.add(tool_call=llm_pb2.ToolCall(call_id=f"c{number}", name="Bash", arguments_json=arguments))
        else:
            output.items.add(message=llm_pb2.OutputMessage(text="Done."))
        output.usage.input_tokens, output.usage.output_tokens = tokens, 100
        yield Completed(output=output)

    async def aclose(self) -> None:
        """Nothing is open."""

    def _count(self, request: LLMRequest, blobs: dict[str, bytes]) -> int:
        size = len(request.prompt.SerializeToString())
        for entry in request.entries:
            kind = entry.WhichOneof("entry")
            if kind == "assistant":
                size += sum(len(one.message.text) + len(one.tool_call.arguments_json) for one in entry.assistant.items)
            else:
                parts = entry.user.parts if kind == "user" else entry.tool_result.parts
                size += len(joined_text(parts, blobs).encode())
        return size // BYTES_PER_TOKEN


def _resident_mib() -> float:
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmRSS")]
    return int(line.split()[1]) / 1024
