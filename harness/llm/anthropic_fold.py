"""The Anthropic Messages wire format: folding of events and whole messages into a response. Pure.

End rule: the answer is whole once a `message_delta` has named a `stop_reason`; `message_stop` may never come. A turn
that the provider paused (`pause_turn`) goes on: what came is sent back, and the next stream continues the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.llm import json_text, wire
from harness.llm.dialect import Delta
from harness.llm.failures import AttemptError, ended_early, error_in_stream, malformed
from harness.llm.llm import ReasoningDelta, TextDelta, ToolCallDelta
from harness.llm.sse import ServerSentEvent
from unreal_agent.llm.v1 import llm_pb2

WIRE_FORMAT = "anthropic-messages"

_STOP_REASONS: Mapping[str, llm_pb2.StopReason.ValueType] = {
    "end_turn": llm_pb2.STOP_REASON_COMPLETE,
    "stop_sequence": llm_pb2.STOP_REASON_COMPLETE,
    "tool_use": llm_pb2.STOP_REASON_COMPLETE,
    "max_tokens": llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS,
    "refusal": llm_pb2.STOP_REASON_REFUSED,
}
_DELTA_MEMBERS: Mapping[str, str] = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
    "signature_delta": "signature",
}


@dataclass(slots=True, kw_only=True, eq=False)
class _Block:
    """A content block under construction."""

    start: wire.JSONObject
    raw: str
    """Its exact text where it came whole; empty where it comes in pieces."""

    call_place: int
    pieces: dict[str, wire.TextPieces] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return wire.text(self.start.get("type"))

    def add(self, member: str, piece: str) -> str:
        return self.pieces.setdefault(member, wire.TextPieces()).add(piece)

    def text(self, member: str) -> str:
        """Return a member: what it began with, and the pieces that came."""
        begun = wire.text(self.start.get(member))
        return json_text.valid_text(begun) + (self.pieces[member].whole() if member in self.pieces else "")

    def arguments(self) -> str:
        """Return a call's arguments: in pieces, or as the server put them into the block's start."""
        if "partial_json" in self.pieces:
            return self.pieces["partial_json"].whole()
        whole = json_text.member(self.raw, "input") if self.raw else None
        begun = self.start.get("input")
        return json_text.valid_text(whole if whole is not None and isinstance(begun, dict) else _written(begun))


class MessagesFold:
    """Folds one attempt's events."""

    def __init__(self, attempt: int) -> None:
        """Start with nothing received."""
        self._attempt = attempt
        self._response_id = ""
        self._model = ""
        self._blocks: list[_Block] = []
        self._open: dict[int, _Block] = {}
        self._calls = 0
        self._stop_reason = llm_pb2.STOP_REASON_UNSPECIFIED
        self._is_paused = False
        self._is_ended = False
        self._earlier_usage: list[wire.JSONObject] = []
        self._usage: dict[str, object] = {}
        self._ignored: Counter[str] = Counter()

    @property
    def is_whole(self) -> bool:
        """True once a stop reason has come."""
        return self._stop_reason != llm_pb2.STOP_REASON_UNSPECIFIED or self._is_paused

    @property
    def is_ended(self) -> bool:
        """True once `message_stop` has come."""
        return self._is_ended

    @property
    def ignored(self) -> Mapping[str, int]:
        """Unknown events, blocks and deltas, by name."""
        return self._ignored

    def feed(self, event: ServerSentEvent) -> Sequence[Delta]:
        """Take one event; see `ResponseFold.feed`."""
        if self._is_ended or event.data.strip() == "[DONE]":
            return ()
        try:
            value = wire.event_object(event)
        except AttemptError:
            if not self.is_whole:
                raise
            self._ignored["broken trailer"] += 1
            return ()
        kind = wire.text(value.get("type")) or event.name
        if self.is_whole and kind not in ("message_delta", "message_stop"):
            return ()
        return self._take(kind, event, value)

    def _take(self, kind: str, event: ServerSentEvent, value: wire.JSONObject) -> Sequence[Delta]:
        match kind:
            case "content_block_delta":
                return list(self._delta(event, value))
            case "content_block_start":
                raw = json_text.member(event.data, "content_block") or ""
                return self._begin(value.get("index"), wire.mapping(value.get("content_block")), raw)
            case "message_start":
                self._head(wire.mapping(value.get("message")))
            case "message_delta":
                self._usage.update(_counted(value.get("usage")))
                self._stop(wire.text(wire.mapping(value.get("delta")).get("stop_reason")), f"event {event.number}")
            case "message_stop":
                if not self.is_whole:
                    raise ended_early("ended the message without a stop_reason")
                self._is_ended = True
            case "error":
                raise error_in_stream(value)
            case "content_block_stop" | "ping":
                pass
            case _:
                if value.get("error"):
                    raise error_in_stream(value)
                self._ignored[kind[:100] or "(no type)"] += 1
        return ()

    def feed_whole(self, text: str) -> Sequence[Delta]:
        """Take a whole message; see `ResponseFold.feed_whole`."""
        message = wire.whole_object(text)
        content = message.get("content")
        if not isinstance(content, list):
            raise malformed("sent a message without content; check the base URL")
        self._head(message)
        deltas: list[Delta] = []
        for block, raw in zip(content, json_text.elements(json_text.member(text, "content") or ""), strict=True):
            deltas.extend(self._begin(None, wire.mapping(block), raw))
        self._stop(wire.text(message.get("stop_reason")), "the message")
        if not self.is_whole:
            raise ended_early("sent a message without a stop_reason")
        self._is_ended = True
        return deltas

    def usage(self) -> llm_pb2.Usage | None:
        """Return what was counted, of every stream of the answer."""
        counted = [usage for usage in (*self._earlier_usage, self._usage) if usage]
        if not counted:
            return None
        total = llm_pb2.Usage(raw_json=json_text.valid_text(json_text.write(counted[-1])))
        for usage in counted:
            read, written = (wire.count(usage.get(f"cache_{name}_input_tokens")) for name in ("read", "creation"))
            total.input_tokens += wire.count(usage.get("input_tokens")) + read + written
            total.cached_input_tokens += read
            total.cache_write_tokens += written
            total.output_tokens += wire.count(usage.get("output_tokens"))
            details = wire.mapping(usage.get("output_tokens_details"))
            total.reasoning_tokens += wire.count(details.get("thinking_tokens") or details.get("reasoning_tokens"))
        return total

    def output(self) -> llm_pb2.ModelOutput:
        """Return the response, its blocks in their order."""
        output = llm_pb2.ModelOutput(
            response_id=json_text.valid_text(self._response_id),
            model=json_text.valid_text(self._model),
            stop_reason=self._stop_reason,
            usage=self.usage(),
        )
        for block in self._blocks:
            output.items.extend(_items(block))
        return output

    def resume(self) -> Sequence[llm_pb2.OutputItem] | None:
        """Return what came so far where the provider paused, and await the rest; see `ResponseFold.resume`."""
        if not self._is_paused:
            return None
        self._earlier_usage.append(self._usage)
        self._usage = {}
        self._is_paused = self._is_ended = False
        self._open.clear()
        return [item for block in self._blocks for item in _items(block)]

    def _head(self, message: wire.JSONObject) -> None:
        self._response_id = self._response_id or wire.text(message.get("id"))
        self._model = self._model or wire.text(message.get("model"))
        self._usage.update(_counted(message.get("usage")))

    def _begin(self, index: object, start: wire.JSONObject, raw: str) -> Sequence[Delta]:
        kind = wire.text(start.get("type"))
        if not kind:
            self._ignored["block without a type"] += 1
            return ()
        block = _Block(start=start, raw=raw, call_place=self._calls)
        self._blocks.append(block)
        self._open[_place(index, len(self._blocks) - 1)] = block
        match kind:
            case "tool_use":
                self._calls += 1
                name, arguments = block.text("name"), block.arguments()
                shown = "" if arguments == "{}" else arguments
                return (ToolCallDelta(attempt=self._attempt, index=block.call_place, name=name, arguments=shown),)
            case "text" if text := block.text("text"):
                return (TextDelta(attempt=self._attempt, text=text),)
            case "thinking" if text := block.text("thinking"):
                return (ReasoningDelta(attempt=self._attempt, text=text),)
            case "text" | "thinking" | "redacted_thinking":
                pass
            case _:
                self._ignored[f"block {kind}"[:100]] += 1
        return ()

    def _delta(self, event: ServerSentEvent, value: wire.JSONObject) -> Iterator[Delta]:
        delta = wire.mapping(value.get("delta"))
        kind = wire.text(delta.get("type"))
        member = _DELTA_MEMBERS.get(kind)
        if member is None:
            self._ignored[f"delta {kind}"[:100]] += 1
            return
        block = self._open.get(_place(value.get("index"), max(self._open, default=0)))
        if block is None:
            raise malformed(f"continued a block that had not begun in event {event.number}")
        piece = delta.get(member)
        shown = block.add(member, wire.arguments_text(piece) if member == "partial_json" else wire.text(piece))
        if not shown:
            return
        match member:
            case "text":
                yield TextDelta(attempt=self._attempt, text=shown)
            case "thinking":
                yield ReasoningDelta(attempt=self._attempt, text=shown)
            case "partial_json" if block.kind == "tool_use":
                place, name = block.call_place, block.text("name")
                yield ToolCallDelta(attempt=self._attempt, index=place, name=name, arguments=shown)
            case _:
                pass

    def _stop(self, reason: str, where: str) -> None:
        if not reason:
            return
        if reason == "model_context_window_exceeded":
            raise error_in_stream({"code": reason, "message": "the answer filled the model's window"})
        if reason == "pause_turn":
            self._is_paused = True
            return
        if reason not in _STOP_REASONS:
            raise malformed(f"ended with the unknown stop_reason {reason[:100]!r} in {where}")
        self._stop_reason = _STOP_REASONS[reason]


def _items(block: _Block) -> Iterator[llm_pb2.OutputItem]:
    match block.kind:
        case "text":
            text = block.text("text")
            if text:
                yield llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text=text))
        case "tool_use":
            call = llm_pb2.ToolCall(call_id=block.text("id"), name=block.text("name"), arguments_json=block.arguments())
            yield llm_pb2.OutputItem(tool_call=call)
        case _:
            # What is neither said nor called goes back as it came: thoughts, and what the provider's own tools did.
            thinking = block.text("thinking") if block.kind == "thinking" else ""
            reasoning = llm_pb2.Reasoning(summary=thinking, raw_json=_raw(block), wire_format=WIRE_FORMAT)
            yield llm_pb2.OutputItem(reasoning=reasoning)


def _raw(block: _Block) -> str:
    """Return a block as it came: its own text, or its start with the pieces that followed."""
    if block.raw and not block.pieces:
        return json_text.valid_text(block.raw)
    whole = dict(block.start)
    for member in block.pieces:
        if member == "partial_json":
            whole["input"] = json_text.read_object(block.arguments()) or {}
        else:
            whole[member] = block.text(member)
    return json_text.valid_text(json_text.write(whole))


def _counted(usage: object) -> dict[str, object]:
    """Return the members that say something: a later null takes nothing back."""
    return {name: value for name, value in wire.mapping(usage).items() if value is not None}


def _written(value: object) -> str:
    return "" if value is None else wire.arguments_text(value)


def _place(index: object, default: int) -> int:
    return index if isinstance(index, int) and not isinstance(index, bool) else default
