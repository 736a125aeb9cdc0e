"""The Anthropic Messages wire format: request bodies. Pure; answers are folded in `anthropic_fold`.

Two roles alternate: the results of a response come first in the user message behind it, then late results, then
inputs. What a model thought goes back byte for byte. Cache markers are a block's last member and are the only thing in
which a block may differ from the same block of an earlier request.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.llm import json_text
from harness.llm.anthropic_fold import WIRE_FORMAT, MessagesFold
from harness.llm.llm import LLMRequest
from harness.llm.models import Thinking
from harness.llm.request_parts import Quirks, replayable_arguments, replayable_name, text_of, tool_schema
from unreal_agent.llm.v1 import llm_pb2

DEFAULT_MAX_TOKENS = 8192
"""Bound of an answer, which the format demands, for a model whose own bound is not known."""

CACHE_MARK = ',"cache_control":{"type":"ephemeral"}}'
_MARKED_MESSAGES = 2
"""The newest messages of the user that end with a marker. The provider looks back 20 blocks from one for what it has
cached, and a response with its results may be longer: so the place that the last request marked is marked again."""

_MIN_BUDGET = 1024
_BUDGETS = {"low": 4096, "medium": 10_000, "high": 24_000, "xhigh": 32_000, "max": 32_000}
"""Tokens for thinking of models that take a budget in the place of an effort."""

_CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ILLEGAL_IN_ID = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(slots=True, kw_only=True)
class _Message:
    """A message under construction; its blocks are JSON texts."""

    role: str
    blocks: list[str]


class MessagesDialect:
    """Translates to and from the Messages format."""

    headers: Mapping[str, str] = {"anthropic-version": "2023-06-01"}

    def __init__(
        self, quirks: Quirks, *, thinking: Callable[[str], Thinking], max_output_tokens: Callable[[str], int]
    ) -> None:
        """Keep the provider's quirks.

        Args:
            quirks: The provider's departures.
            thinking: Tells how a model is asked to think.
            max_output_tokens: Tells the bound of a model's answer; 0: not known.
        """
        self._quirks = quirks
        self._thinking = thinking
        self._max_output_tokens = max_output_tokens

    def url(self, base_url: str) -> str:
        """Return where requests go."""
        # Such addresses are given with and without the version: the format has but one.
        return f"{base_url}/messages" if base_url.endswith("/v1") else f"{base_url}/v1/messages"

    def body(self, request: LLMRequest, blobs: Mapping[str, bytes]) -> bytes:
        """Return the request body."""
        messages = _messages(request.entries, blobs)
        max_tokens = request.max_output_tokens or self._max_output_tokens(request.model) or DEFAULT_MAX_TOKENS
        head: dict[str, object] = {"model": request.model, "max_tokens": max_tokens, "stream": self._quirks.streams}
        head.update(self._thinking_members(request, max_tokens))
        offered = list(request.prompt.tools) or _called_before(request.entries)
        if offered:
            may_call = request.prompt.tools and not request.is_compaction
            head["tool_choice"] = {"type": "auto" if may_call else "none"}
        members = [json_text.write(head)[1:-1]]
        tools = [_tool(tool) for tool in offered]
        system = [_text(request.prompt.system_text)] if request.prompt.system_text.strip() else []
        # The order in which the provider reads: one marker behind both keeps both.
        _mark(system or tools)
        if tools:
            members.append(f'"tools":[{",".join(tools)}]')
        if system:
            members.append(f'"system":[{system[0]}]')
        for message in [message for message in messages if message.role == "user"][-_MARKED_MESSAGES:]:
            _mark(message.blocks)
        written = ",".join(f'{{"role":"{one.role}","content":[{",".join(one.blocks)}]}}' for one in messages)
        return f'{{{",".join(members)},"messages":[{written}]}}'.encode()

    def fold(self, attempt: int) -> MessagesFold:
        """Return a new fold."""
        return MessagesFold(attempt)

    def _thinking_members(self, request: LLMRequest, max_tokens: int) -> dict[str, object]:
        how = self._thinking(request.model)
        effort = self._quirks.efforts.get(request.effort, request.effort)
        effort = how.efforts.get(effort, effort)
        if how.kind == "adaptive":
            members: dict[str, object] = {"thinking": {"type": "adaptive", "display": "summarized"}}
            if effort:
                members["output_config"] = {"effort": effort}
            return members
        budget = min(_BUDGETS.get(effort, _BUDGETS["medium"]), max_tokens - _MIN_BUDGET)
        if how.kind != "budget" or budget < _MIN_BUDGET or not _may_think(request.entries):
            return {}
        return {"thinking": {"type": "enabled", "budget_tokens": budget}}


def replayable_call_id(call_id: str) -> str:
    """Return a call's ID as the format takes it: another provider's may hold characters that it refuses."""
    if _CALL_ID.fullmatch(call_id):
        return call_id
    digest = hashlib.sha256(call_id.encode()).hexdigest()[:16]
    return f"{_ILLEGAL_IN_ID.sub('_', call_id)[:40]}_{digest}"


def _called_before(entries: Sequence[llm_pb2.ContextEntry]) -> list[llm_pb2.ToolDefinition]:
    """Return tools that were called and are offered no longer: the provider refuses calls that no tool explains."""
    names = {
        replayable_name(item.tool_call.name): None
        for entry in entries
        for item in entry.assistant.items
        if item.HasField("tool_call")
    }
    return [llm_pb2.ToolDefinition(name=name, description="No longer offered.") for name in names]


def _may_think(entries: Sequence[llm_pb2.ContextEntry]) -> bool:
    """Tell whether a model with a budget may think: it refuses to in the midst of calls that it began without."""
    for entry in reversed(entries):
        match entry.WhichOneof("entry"):
            case "user":
                return True
            case "assistant":
                return any(_is_ours(item.reasoning) for item in entry.assistant.items if item.HasField("reasoning"))
            case _:
                pass
    return True


def _messages(entries: Sequence[llm_pb2.ContextEntry], blobs: Mapping[str, bytes]) -> list[_Message]:
    messages: list[_Message] = []
    for entry in entries:
        role, blocks = _blocks(entry, blobs)
        if not blocks:
            continue
        if messages and messages[-1].role == role:
            messages[-1].blocks.extend(blocks)
        else:
            messages.append(_Message(role=role, blocks=blocks))
    return messages


def _blocks(entry: llm_pb2.ContextEntry, blobs: Mapping[str, bytes]) -> tuple[str, list[str]]:
    match entry.WhichOneof("entry"):
        case "user":
            return "user", list(_content(entry.user.parts, blobs))
        case "assistant":
            return "assistant", list(_output_blocks(entry.assistant.items))
        case "tool_result":
            return "user", [_result(entry.tool_result, blobs)]
        case _:
            return "user", []


def _content(parts: Sequence[llm_pb2.ContentPart], blobs: Mapping[str, bytes]) -> Iterator[str]:
    """Yield parts as blocks; blank texts, which the provider refuses, are left out."""
    for part in parts:
        if part.WhichOneof("part") == "image":
            yield _image(part.image, blobs)
        else:
            text = text_of(part.text, blobs)
            if text.strip():
                yield _text(text)


def _text(text: str) -> str:
    return json_text.write({"type": "text", "text": text})


def _image(image: llm_pb2.ImagePart, blobs: Mapping[str, bytes]) -> str:
    content = blobs[image.blob.digest] if image.WhichOneof("source") == "blob" else image.data
    data = base64.b64encode(content).decode("ascii")
    source = {"type": "base64", "media_type": image.media_type, "data": data}
    return json_text.write({"type": "image", "source": source})


def _result(result: llm_pb2.ToolResult, blobs: Mapping[str, bytes]) -> str:
    head: dict[str, object] = {"type": "tool_result", "tool_use_id": replayable_call_id(result.call_id)}
    if result.is_error:
        head["is_error"] = True
    content = ",".join(_content(result.parts, blobs))
    return f'{json_text.write(head)[:-1]},"content":[{content}]}}' if content else json_text.write(head)


def _output_blocks(items: Sequence[llm_pb2.OutputItem]) -> Iterator[str]:
    """Yield a response's blocks. What was thought last is left out: no message may end with it."""
    thoughts: list[str] = []
    for item in items:
        match item.WhichOneof("item"):
            case "reasoning":
                if _is_ours(item.reasoning):
                    thoughts.append(item.reasoning.raw_json)
                continue
            case "message":
                if not item.message.text.strip():
                    continue
                written = _text(item.message.text)
            case "tool_call":
                call = item.tool_call
                head = {"type": "tool_use", "id": replayable_call_id(call.call_id), "name": replayable_name(call.name)}
                written = f'{json_text.write(head)[:-1]},"input":{replayable_arguments(call.arguments_json)}}}'
            case _:
                continue
        yield from thoughts
        thoughts.clear()
        yield written


def _is_ours(reasoning: llm_pb2.Reasoning) -> bool:
    return reasoning.wire_format == WIRE_FORMAT and json_text.read_object(reasoning.raw_json) is not None


def _tool(tool: llm_pb2.ToolDefinition) -> str:
    return json_text.write({"name": tool.name, "description": tool.description, "input_schema": tool_schema(tool)})


def _mark(blocks: list[str]) -> None:
    if blocks:
        blocks[-1] = blocks[-1][:-1] + CACHE_MARK
