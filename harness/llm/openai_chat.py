"""The OpenAI Chat Completions wire format, as compatible servers speak it: request bodies and folding of chunks. Pure.

End rule: the answer is whole once a chunk has named a `finish_reason`; `[DONE]` and usage may follow, or never come. A
stream that ends without a `finish_reason` broke off, even if it says `[DONE]`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from harness.llm import json_text, wire
from harness.llm.chat_reasoning import ChatReasoning, replayed
from harness.llm.dialect import Delta
from harness.llm.failures import AttemptError, ended_early, error_in_stream, malformed
from harness.llm.llm import LLMRequest, ReasoningDelta, TextDelta, ToolCallDelta
from harness.llm.request_parts import (
    Quirks,
    data_url,
    images_of,
    joined_text,
    replayable_arguments,
    replayable_name,
    tool_schema,
)
from harness.llm.sse import ServerSentEvent
from harness.llm.tool_call_pieces import ToolCallPieces
from unreal_agent.llm.v1 import llm_pb2

_STOP_REASONS: Mapping[str, llm_pb2.StopReason.ValueType] = {
    "stop": llm_pb2.STOP_REASON_COMPLETE,
    "tool_calls": llm_pb2.STOP_REASON_COMPLETE,
    "function_call": llm_pb2.STOP_REASON_COMPLETE,
    # Names that compatible servers pass through from the engine behind them.
    "eos": llm_pb2.STOP_REASON_COMPLETE,
    "end_turn": llm_pb2.STOP_REASON_COMPLETE,
    "stop_sequence": llm_pb2.STOP_REASON_COMPLETE,
    "tool_use": llm_pb2.STOP_REASON_COMPLETE,
    "length": llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS,
    "max_tokens": llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS,
    "content_filter": llm_pb2.STOP_REASON_REFUSED,
    "refusal": llm_pb2.STOP_REASON_REFUSED,
    "sensitive": llm_pb2.STOP_REASON_REFUSED,
}
_FAILED_REASONS: Mapping[str, str] = {
    # finish_reason: the error code that it stands for
    "error": "server_error",
    "abort": "server_error",
    "network_error": "server_error",
    "insufficient_system_resource": "insufficient_system_resource",
    "model_context_window_exceeded": "model_context_window_exceeded",
    "model_length": "model_context_window_exceeded",
}
_KNOWN_MEMBERS = frozenset({"id", "object", "created", "model", "choices", "usage"})
"""A chunk's other members are counted as ignored."""


class ChatDialect:
    """Translates to and from the Chat Completions format."""

    headers: Mapping[str, str] = {}

    def __init__(self, quirks: Quirks) -> None:
        """Keep the provider's quirks."""
        self._quirks = quirks

    def url(self, base_url: str) -> str:
        """Return where requests go."""
        return f"{base_url}/chat/completions"

    def body(self, request: LLMRequest, blobs: Mapping[str, bytes]) -> bytes:
        """Return the request body."""
        quirks = self._quirks
        body: dict[str, object] = {"model": request.model, "stream": quirks.streams}
        if quirks.streams:
            body["stream_options"] = {"include_usage": True}
        if request.prompt.tools:
            body["tools"] = [_tool(tool) for tool in request.prompt.tools]
            body["tool_choice"] = "none" if request.is_compaction else "auto"
        effort = quirks.efforts.get(request.effort, request.effort)
        if effort:
            body.update({"reasoning": {"effort": effort}} if quirks.effort_is_object else {"reasoning_effort": effort})
        if request.max_output_tokens and quirks.max_tokens_field:
            body[quirks.max_tokens_field] = request.max_output_tokens
        if request.cache_key and quirks.sends_cache_key:
            body["prompt_cache_key"] = request.cache_key
        if quirks.marks_cache_for and request.model.startswith(quirks.marks_cache_for):
            body["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
        body["messages"] = list(_messages(request, blobs))
        return json_text.write(body).encode()

    def fold(self, attempt: int) -> ChatFold:
        """Return a new fold."""
        return ChatFold(attempt)


def _tool(tool: llm_pb2.ToolDefinition) -> dict[str, object]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool_schema(tool)}
    return {"type": "function", "function": function}


def _messages(request: LLMRequest, blobs: Mapping[str, bytes]) -> Iterator[dict[str, object]]:
    """Yield the messages. A tool message cannot hold an image: those follow behind all results of the response."""
    if request.prompt.system_text:
        yield {"role": "system", "content": request.prompt.system_text}
    images: list[dict[str, object]] = []
    for entry in request.entries:
        kind = entry.WhichOneof("entry")
        if images and kind != "tool_result":
            yield {"role": "user", "content": images}
            images = []
        if kind == "user":
            content = _user_content(entry.user, blobs)
            if content:
                yield {"role": "user", "content": content}
        elif kind == "assistant":
            message = _assistant(entry.assistant)
            if message is not None:
                yield message
        elif kind == "tool_result":
            yield _tool_message(entry.tool_result, blobs)
            images.extend(_result_images(entry.tool_result, blobs))
    if images:
        yield {"role": "user", "content": images}


def _user_content(user: llm_pb2.UserMessage, blobs: Mapping[str, bytes]) -> object:
    """Return plain text where there is no image: not every server takes a list."""
    if not images_of(user.parts):
        return joined_text(user.parts, blobs)
    return [
        _image(part.image, blobs)
        if part.WhichOneof("part") == "image"
        else {"type": "text", "text": joined_text([part], blobs)}
        for part in user.parts
    ]


def _image(image: llm_pb2.ImagePart, blobs: Mapping[str, bytes]) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(image, blobs)}}


def _tool_message(result: llm_pb2.ToolResult, blobs: Mapping[str, bytes]) -> dict[str, object]:
    text = joined_text(result.parts, blobs)
    if images_of(result.parts):
        note = "[The image follows in the next user message.]"
        text = f"{text}\n{note}" if text else note
    return {"role": "tool", "tool_call_id": result.call_id, "content": text}


def _result_images(result: llm_pb2.ToolResult, blobs: Mapping[str, bytes]) -> Iterator[dict[str, object]]:
    for image in images_of(result.parts):
        yield {"type": "text", "text": f"Image from the result of tool call {result.call_id} ({result.tool_name}):"}
        yield _image(image, blobs)


def _assistant(assistant: llm_pb2.AssistantMessage) -> dict[str, object] | None:
    """Return a response as one message, or None where nothing of it can be sent back."""
    texts: list[str] = []
    calls: list[dict[str, object]] = []
    reasoning: dict[str, object] = {}
    for item in assistant.items:
        match item.WhichOneof("item"):
            case "message":
                texts.append(item.message.text)
            case "tool_call":
                call = item.tool_call
                function = {
                    "name": replayable_name(call.name),
                    "arguments": replayable_arguments(call.arguments_json),
                }
                calls.append({"id": call.call_id, "type": "function", "function": function})
            case "reasoning":
                reasoning.update(replayed(item.reasoning))
            case None:
                pass
    text = "\n\n".join(text for text in texts if text)
    if not text and not calls:
        return None
    message: dict[str, object] = {"role": "assistant", "content": text or None, **reasoning}
    if calls:
        message["tool_calls"] = calls
    return message


class ChatFold:
    """Folds one attempt's chunks."""

    def __init__(self, attempt: int) -> None:
        """Start with nothing received."""
        self._attempt = attempt
        self._response_id = ""
        self._model = ""
        self._text = wire.TextPieces()
        self._reasoning = ChatReasoning()
        self._calls = ToolCallPieces()
        self._stop_reason = llm_pb2.STOP_REASON_UNSPECIFIED
        self._has_refusal = False
        self._is_ended = False
        self._usage: llm_pb2.Usage | None = None
        self._ignored: Counter[str] = Counter()

    @property
    def is_whole(self) -> bool:
        """True once a `finish_reason` has come."""
        return self._stop_reason != llm_pb2.STOP_REASON_UNSPECIFIED

    @property
    def is_ended(self) -> bool:
        """True once `[DONE]` has come."""
        return self._is_ended

    @property
    def ignored(self) -> Mapping[str, int]:
        """Unknown members, by name."""
        return self._ignored

    def feed(self, event: ServerSentEvent) -> Sequence[Delta]:
        """Take one event; see `ResponseFold.feed`."""
        if event.data.strip() == "[DONE]":
            if not self.is_whole:
                raise ended_early("ended the stream without a finish_reason")
            self._is_ended = True
            return ()
        if self.is_whole:
            self._trailer(event)
            return ()
        chunk = wire.event_object(event)
        if chunk.get("error"):
            raise error_in_stream(chunk)
        if event.name == "error":
            raise error_in_stream(dict(chunk))
        return self._chunk(event, chunk)

    def feed_whole(self, text: str) -> Sequence[Delta]:
        """Take a whole completion; see `ResponseFold.feed_whole`."""
        completion = wire.whole_object(text)
        choices = completion.get("choices")
        if not isinstance(choices, list) or not choices:
            raise malformed("sent a completion without choices; check the base URL")
        # A message is a delta that says all at once; its calls carry no index.
        whole = [
            {**choice, "delta": _numbered(wire.mapping(choice.get("message")))} for choice in wire.objects(choices)
        ]
        deltas = self._chunk(ServerSentEvent(number=1, name="", data=text), {**completion, "choices": whole})
        if not self.is_whole:
            raise ended_early("sent a completion without a finish_reason")
        self._is_ended = True
        return deltas

    def resume(self) -> Sequence[llm_pb2.OutputItem] | None:
        """Return None: this format has no pauses."""
        return None

    def usage(self) -> llm_pb2.Usage | None:
        """Return what was counted."""
        return self._usage

    def output(self) -> llm_pb2.ModelOutput:
        """Return the response: reasoning, text, calls."""
        output = llm_pb2.ModelOutput(
            response_id=json_text.valid_text(self._response_id),
            model=json_text.valid_text(self._model),
            stop_reason=llm_pb2.STOP_REASON_REFUSED if self._has_refusal else self._stop_reason,
            usage=self._usage,
        )
        reasoning = self._reasoning.item()
        if reasoning is not None:
            output.items.add(reasoning=reasoning)
        text = self._text.whole()
        if text:
            output.items.add(message=llm_pb2.OutputMessage(text=text))
        for call in self._calls.calls():
            output.items.add(tool_call=call)
        return output

    def _trailer(self, event: ServerSentEvent) -> None:
        """Take usage from what follows a whole answer; nothing else in it matters, broken or not."""
        try:
            chunk = wire.event_object(event)
        except AttemptError:
            self._ignored["broken trailer"] += 1
            return
        self._count_usage(event, chunk)

    def _chunk(self, event: ServerSentEvent, chunk: wire.JSONObject) -> list[Delta]:
        for name in chunk.keys() - _KNOWN_MEMBERS:
            self._ignored[name[:100]] += 1
        self._response_id = self._response_id or wire.text(chunk.get("id"))
        self._model = self._model or wire.text(chunk.get("model"))
        self._count_usage(event, chunk)
        choices = chunk.get("choices")
        if choices is not None and not isinstance(choices, list):
            raise malformed(f"sent choices that are no array in event {event.number}")
        deltas: list[Delta] = []
        for choice in wire.objects(choices):
            if choice.get("index", 0) not in (0, None):
                self._ignored["further choice"] += 1
                continue
            if choice.get("error"):
                raise error_in_stream(choice)
            deltas.extend(self._delta(wire.mapping(choice.get("delta"))))
            self._finish(event, wire.text(choice.get("finish_reason")))
        return deltas

    def _delta(self, delta: wire.JSONObject) -> Iterator[Delta]:
        thought = self._reasoning.add(delta)
        if thought:
            yield ReasoningDelta(attempt=self._attempt, text=thought)
        refusal = wire.text(delta.get("refusal"))
        self._has_refusal = self._has_refusal or bool(refusal)
        shown = self._text.add(_content_text(delta.get("content")) + refusal)
        if shown:
            yield TextDelta(attempt=self._attempt, text=shown)
        for piece in wire.objects(delta.get("tool_calls")):
            added = self._calls.add(piece)
            yield ToolCallDelta(attempt=self._attempt, index=added.place, name=added.name, arguments=added.arguments)

    def _finish(self, event: ServerSentEvent, reason: str) -> None:
        if not reason:
            return
        reason = reason.lower()
        if reason in _FAILED_REASONS:
            raise error_in_stream({"code": _FAILED_REASONS[reason], "message": f"finish_reason {reason}"})
        if reason not in _STOP_REASONS:
            raise malformed(f"ended with the unknown finish_reason {reason[:100]!r} in event {event.number}")
        self._stop_reason = _STOP_REASONS[reason]

    def _count_usage(self, event: ServerSentEvent, chunk: wire.JSONObject) -> None:
        """Keep the newest usage: some servers send a growing one with each chunk."""
        usage = chunk.get("usage")
        if isinstance(usage, dict) and usage:
            raw_json = json_text.member(event.data, "usage") or ""
            self._usage = wire.usage_message(usage, raw_json=raw_json, input_name="prompt", output_name="completion")


def _numbered(message: wire.JSONObject) -> wire.JSONObject:
    calls = [{**call, "index": index} for index, call in enumerate(wire.objects(message.get("tool_calls")))]
    return {**message, "tool_calls": calls}


def _content_text(content: object) -> str:
    """Return a delta's text: a text, or the text parts of a list."""
    if isinstance(content, list):
        return "".join(wire.text(part.get("text")) for part in wire.objects(content) if part.get("type") == "text")
    return wire.text(content)
