"""The OpenAI Responses wire format: request bodies and the folding of events. Pure.

End rule: the answer counts when its terminal event has come (`response.completed`, `.incomplete`, `.failed`); a stream
that ends without one broke off. Items that finished before stand in where the terminal event repeats none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from harness.llm import json_text, wire
from harness.llm.dialect import Delta
from harness.llm.failures import error_in_stream, malformed
from harness.llm.llm import LLMRequest, ReasoningDelta, TextDelta, ToolCallDelta
from harness.llm.request_parts import (
    Quirks,
    data_url,
    replayable_arguments,
    replayable_name,
    text_of,
    tool_schema,
)
from harness.llm.sse import ServerSentEvent
from unreal_agent.llm.v1 import llm_pb2

WIRE_FORMAT = "openai-responses"


class ResponsesDialect:
    """Translates to and from the Responses format."""

    headers: Mapping[str, str] = {}

    def __init__(self, quirks: Quirks, reasons: Callable[[str], bool]) -> None:
        """Keep the provider's quirks.

        Args:
            quirks: The provider's departures.
            reasons: Tells whether a model takes reasoning settings; one that does not refuses them.
        """
        self._quirks = quirks
        self._reasons = reasons

    def url(self, base_url: str) -> str:
        """Return where requests go."""
        return f"{base_url}/responses"

    def body(self, request: LLMRequest, blobs: Mapping[str, bytes]) -> bytes:
        """Return the request body."""
        head: dict[str, object] = {"model": request.model, "store": False, "stream": self._quirks.streams}
        if request.prompt.system_text:
            head["instructions"] = request.prompt.system_text
        if request.prompt.tools:
            head["tools"] = [_tool(tool) for tool in request.prompt.tools]
            head["tool_choice"] = "none" if request.is_compaction else "auto"
        if self._reasons(request.model):
            effort = self._quirks.efforts.get(request.effort, request.effort)
            head["reasoning"] = {"effort": effort, "summary": "auto"} if effort else {"summary": "auto"}
            head["include"] = ["reasoning.encrypted_content"]
        if request.max_output_tokens and self._quirks.max_tokens_field:
            head["max_output_tokens"] = request.max_output_tokens
        if request.cache_key and self._quirks.sends_cache_key:
            head["prompt_cache_key"] = request.cache_key
        # Written piece by piece, because reasoning goes back byte for byte.
        items = [item for entry in request.entries for item in _input_items(entry, blobs)]
        return f'{json_text.write(head)[:-1]},"input":[{",".join(items)}]}}'.encode()

    def fold(self, attempt: int) -> ResponsesFold:
        """Return a new fold."""
        return ResponsesFold(attempt)


def _tool(tool: llm_pb2.ToolDefinition) -> dict[str, object]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool_schema(tool),
        "strict": False,
    }


def _input_items(entry: llm_pb2.ContextEntry, blobs: Mapping[str, bytes]) -> Iterator[str]:
    match entry.WhichOneof("entry"):
        case "user":
            content = [_input_part(part, blobs) for part in entry.user.parts]
            if content:
                yield json_text.write({"type": "message", "role": "user", "content": content})
        case "assistant":
            yield from _output_items(entry.assistant.items)
        case "tool_result":
            result = entry.tool_result
            yield json_text.write(
                {"type": "function_call_output", "call_id": result.call_id, "output": _result(result, blobs)}
            )
        case None:
            pass


def _input_part(part: llm_pb2.ContentPart, blobs: Mapping[str, bytes]) -> dict[str, object]:
    if part.WhichOneof("part") == "image":
        return {"type": "input_image", "image_url": data_url(part.image, blobs), "detail": "auto"}
    return {"type": "input_text", "text": text_of(part.text, blobs)}


def _result(result: llm_pb2.ToolResult, blobs: Mapping[str, bytes]) -> object:
    parts = [_input_part(part, blobs) for part in result.parts]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "input_text" else parts


def _output_items(items: Sequence[llm_pb2.OutputItem]) -> Iterator[str]:
    """Yield a response's items as they are sent back.

    The provider refuses reasoning without what it led to, so reasoning waits for the next item, and falls with it.
    """
    reasoning: list[str] = []
    for item in items:
        match item.WhichOneof("item"):
            case "reasoning":
                raw = item.reasoning.raw_json
                if item.reasoning.wire_format == WIRE_FORMAT and json_text.read_object(raw) is not None:
                    reasoning.append(raw)
                continue
            case "message":
                if not item.message.text:
                    continue
                written = json_text.write(_message(item.message))
            case "tool_call":
                written = json_text.write(_call(item.tool_call))
            case _:
                continue
        yield from reasoning
        reasoning.clear()
        yield written


def _message(message: llm_pb2.OutputMessage) -> dict[str, object]:
    written: dict[str, object] = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": message.text}],
    }
    if message.phase:
        written["phase"] = message.phase
    return written


def _call(call: llm_pb2.ToolCall) -> dict[str, object]:
    return {
        "type": "function_call",
        "call_id": call.call_id,
        "name": replayable_name(call.name),
        "arguments": replayable_arguments(call.arguments_json),
    }


class ResponsesFold:
    """Folds one attempt's events."""

    def __init__(self, attempt: int) -> None:
        """Start with nothing received."""
        self._attempt = attempt
        self._done: list[tuple[int, wire.JSONObject, str]] = []
        self._calls: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._texts: dict[tuple[str, int, int], wire.TextPieces] = {}
        self._output: llm_pb2.ModelOutput | None = None
        self._usage: llm_pb2.Usage | None = None
        self._has_reasoning_text = False
        self._ignored: Counter[str] = Counter()

    @property
    def is_whole(self) -> bool:
        """True once the terminal event has come."""
        return self._output is not None

    @property
    def is_ended(self) -> bool:
        """True once the terminal event has come."""
        return self._output is not None

    @property
    def ignored(self) -> Mapping[str, int]:
        """Unknown events and items, by type."""
        return self._ignored

    def feed(self, event: ServerSentEvent) -> Sequence[Delta]:
        """Take one event; see `ResponseFold.feed`."""
        if self._output is not None or event.data.strip() == "[DONE]":
            return ()
        value = wire.event_object(event)
        kind = wire.text(value.get("type")) or event.name
        match kind:
            case "response.output_text.delta" | "response.refusal.delta":
                return self._text(value)
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                return self._reasoning_text(value)
            case "response.function_call_arguments.delta":
                return self._arguments(value)
            case "response.output_item.added":
                return self._added(value)
            case "response.output_item.done":
                self._item_done(event, value)
            case "response.completed" | "response.incomplete" | "response.failed":
                self._terminal(event, wire.mapping(value.get("response")), kind.removeprefix("response."))
            case "error":
                raise error_in_stream(value)
            case "":
                if value.get("error"):
                    raise error_in_stream(value)
                self._ignored["(no type)"] += 1
            case _:
                self._ignored[kind[:100]] += 1
        return ()

    def feed_whole(self, text: str) -> Sequence[Delta]:
        """Take a whole response; see `ResponseFold.feed_whole`."""
        response = wire.whole_object(text)
        if not isinstance(response.get("output"), list):
            raise malformed("sent a response without output; check the base URL")
        self._take(response, text, wire.text(response.get("status")) or "completed", "the response")
        return list(self._shown())

    def resume(self) -> Sequence[llm_pb2.OutputItem] | None:
        """Return None: this format has no pauses."""
        return None

    def usage(self) -> llm_pb2.Usage | None:
        """Return what was counted."""
        return self._usage

    def output(self) -> llm_pb2.ModelOutput:
        """Return the response."""
        assert self._output is not None
        return self._output

    def _text(self, value: wire.JSONObject) -> Sequence[Delta]:
        place = ("text", _index(value.get("output_index")), _index(value.get("content_index")))
        shown = self._texts.setdefault(place, wire.TextPieces()).add(wire.text(value.get("delta")))
        return (TextDelta(attempt=self._attempt, text=shown),) if shown else ()

    def _reasoning_text(self, value: wire.JSONObject) -> Sequence[Delta]:
        part = value.get("summary_index", value.get("content_index"))
        place = ("reasoning", _index(value.get("output_index")), _index(part))
        is_new = place not in self._texts
        shown = self._texts.setdefault(place, wire.TextPieces()).add(wire.text(value.get("delta")))
        if not shown:
            return ()
        if is_new and self._has_reasoning_text:
            shown = "\n\n" + shown
        self._has_reasoning_text = True
        return (ReasoningDelta(attempt=self._attempt, text=shown),)

    def _added(self, value: wire.JSONObject) -> Sequence[Delta]:
        item = wire.mapping(value.get("item"))
        if item.get("type") != "function_call":
            return ()
        index = _index(value.get("output_index"))
        self._names[index] = json_text.valid_text(wire.text(item.get("name")))
        place = self._calls.setdefault(index, len(self._calls))
        return (ToolCallDelta(attempt=self._attempt, index=place, name=self._names[index], arguments=""),)

    def _arguments(self, value: wire.JSONObject) -> Sequence[Delta]:
        index = _index(value.get("output_index"))
        pieces = self._texts.setdefault(("arguments", index, 0), wire.TextPieces())
        shown = pieces.add(wire.arguments_text(value.get("delta")))
        if not shown:
            return ()
        place = self._calls.setdefault(index, len(self._calls))
        name = self._names.get(index, "")
        return (ToolCallDelta(attempt=self._attempt, index=place, name=name, arguments=shown),)

    def _item_done(self, event: ServerSentEvent, value: wire.JSONObject) -> None:
        item = wire.mapping(value.get("item"))
        raw = json_text.member(event.data, "item") or ""
        self._done.append((_index(value.get("output_index"), len(self._done)), item, raw))

    def _terminal(self, event: ServerSentEvent, response: wire.JSONObject, kind: str) -> None:
        if not response:
            raise malformed(f"sent no response object in event {event.number} ({kind})")
        raw = json_text.member(event.data, "response") or ""
        self._take(response, raw, wire.text(response.get("status")) or kind, f"event {event.number}")

    def _take(self, response: wire.JSONObject, raw: str, status: str, where: str) -> None:
        """Take a finished response, whose exact text is `raw`; `where` is its place, for messages."""
        if isinstance(response.get("usage"), dict):
            self._usage = wire.usage_message(
                wire.mapping(response["usage"]),
                raw_json=json_text.member(raw, "usage") or "",
                input_name="input",
                output_name="output",
            )
        if status == "failed":
            raise error_in_stream(response.get("error"))
        stop_reason = _stop_reason(response, status, where)
        items = self._finished_items(response, raw, where)
        output = llm_pb2.ModelOutput(
            response_id=json_text.valid_text(wire.text(response.get("id"))),
            model=json_text.valid_text(wire.text(response.get("model"))),
            stop_reason=stop_reason,
            usage=self._usage,
        )
        for item, raw_item in items:
            translated, is_refusal = self._translate(item, raw_item)
            output.items.extend(translated)
            if is_refusal:
                output.stop_reason = llm_pb2.STOP_REASON_REFUSED
        self._output = output

    def _shown(self) -> Iterator[Delta]:
        """Yield what a response that came whole says."""
        place = 0
        for item in self.output().items:
            match item.WhichOneof("item"):
                case "message" if item.message.text:
                    yield TextDelta(attempt=self._attempt, text=item.message.text)
                case "reasoning" if item.reasoning.summary:
                    yield ReasoningDelta(attempt=self._attempt, text=item.reasoning.summary)
                case "tool_call":
                    name, arguments = item.tool_call.name, item.tool_call.arguments_json
                    yield ToolCallDelta(attempt=self._attempt, index=place, name=name, arguments=arguments)
                    place += 1
                case _:
                    pass

    def _finished_items(self, response: wire.JSONObject, raw: str, where: str) -> list[tuple[wire.JSONObject, str]]:
        sent = response.get("output")
        if sent is not None and not isinstance(sent, list):
            raise malformed(f"sent an output that is no array in {where}")
        if not sent:
            return [(item, text) for _, item, text in sorted(self._done, key=lambda done: done[0])]
        texts = json_text.elements(json_text.member(raw, "output") or "")
        return [(wire.mapping(item), text) for item, text in zip(sent, texts, strict=True)]

    def _translate(self, item: wire.JSONObject, raw: str) -> tuple[list[llm_pb2.OutputItem], bool]:
        match item.get("type"):
            case "message":
                return _translate_message(item)
            case "function_call":
                call = llm_pb2.ToolCall(
                    call_id=json_text.valid_text(wire.text(item.get("call_id"))),
                    name=json_text.valid_text(wire.text(item.get("name"))),
                    arguments_json=json_text.valid_text(wire.arguments_text(item.get("arguments"))),
                )
                return [llm_pb2.OutputItem(tool_call=call)], False
            case "reasoning":
                parts = wire.objects(item.get("summary")) or wire.objects(item.get("content"))
                summary = "\n\n".join(wire.text(part.get("text")) for part in parts)
                reasoning = llm_pb2.Reasoning(
                    summary=json_text.valid_text(summary), raw_json=json_text.valid_text(raw), wire_format=WIRE_FORMAT
                )
                return [llm_pb2.OutputItem(reasoning=reasoning)], False
            case kind:
                self._ignored[f"item {kind}"[:100]] += 1
                return [], False


def _translate_message(item: wire.JSONObject) -> tuple[list[llm_pb2.OutputItem], bool]:
    parts = wire.objects(item.get("content"))
    refusals = [part for part in parts if part.get("type") == "refusal"]
    said = "".join(wire.text(part.get("refusal" if part.get("type") == "refusal" else "text")) for part in parts)
    phase = wire.text(item.get("phase"))
    if not said and not phase:
        return [], bool(refusals)
    message = llm_pb2.OutputMessage(text=json_text.valid_text(said), phase=json_text.valid_text(phase))
    return [llm_pb2.OutputItem(message=message)], bool(refusals)


def _stop_reason(response: wire.JSONObject, status: str, where: str) -> llm_pb2.StopReason.ValueType:
    if status == "completed":
        return llm_pb2.STOP_REASON_COMPLETE
    if status == "incomplete":
        reason = wire.text(wire.mapping(response.get("incomplete_details")).get("reason"))
        match reason:
            case "max_output_tokens" | "max_tokens":
                return llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS
            case "content_filter":
                return llm_pb2.STOP_REASON_REFUSED
            case "model_context_window_exceeded" | "context_length_exceeded":
                raise error_in_stream({"code": reason, "message": "the answer filled the model's window"})
            case _:
                pass
        raise malformed(f"ended with the unknown reason {reason[:100]!r} in {where}")
    raise malformed(f"ended with the unknown status {status[:100]!r} in {where}")


def _index(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
