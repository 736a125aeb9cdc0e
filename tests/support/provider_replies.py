"""Event streams as real providers send them, for tests/support/provider.py: whole answers in either wire format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.provider import Reply

JSONObject = Mapping[str, Any]


def event(value: object) -> bytes:
    """Return one event without a name, as chat servers send them."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def named_event(value: JSONObject) -> bytes:
    """Return one event named by its type, as the Responses format has them."""
    return f"event: {value['type']}\n".encode() + event(value)


DONE = b"data: [DONE]\n\n"


def chat_chunk(delta: JSONObject | None = None, finish_reason: str | None = None, **members: Any) -> bytes:
    """Return one chunk of a chat answer."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish_reason}
    return event({"id": "chat-1", "object": "chat.completion.chunk", "model": "m-1", "choices": [choice], **members})


def chat_usage(prompt_tokens: int = 11, completion_tokens: int = 7) -> bytes:
    """Return the chunk of usage that follows a chat answer."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"id": "chat-1", "object": "chat.completion.chunk", "model": "m-1", "choices": [], "usage": usage})


def chat_stream(
    text: str = "", tool_calls: Sequence[tuple[str, str, str]] = (), finish_reason: str | None = None
) -> bytes:
    """Return a whole chat answer; a call is (ID, name, arguments text)."""
    chunks = [chat_chunk({"role": "assistant", "content": ""})]
    chunks += [chat_chunk({"content": text[start : start + 5]}) for start in range(0, len(text), 5)]
    for index, (call_id, name, arguments) in enumerate(tool_calls):
        head = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        chunks.append(chat_chunk({"tool_calls": [head]}))
        for start in range(0, len(arguments), 6):
            piece = {"index": index, "function": {"arguments": arguments[start : start + 6]}}
            chunks.append(chat_chunk({"tool_calls": [piece]}))
    chunks.append(chat_chunk({}, finish_reason or ("tool_calls" if tool_calls else "stop")))
    return b"".join((*chunks, chat_usage(), DONE))


def message_item(text: str, **members: Any) -> dict[str, Any]:
    """Return a finished message of the Responses format."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": content,
        **members,
    }


def call_item(call_id: str, name: str, arguments: str, **members: Any) -> dict[str, Any]:
    """Return a finished call of the Responses format."""
    return {
        "id": f"fc_{call_id}",
        "type": "function_call",
        "status": "completed",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        **members,
    }


def terminal(kind: str, output: Sequence[JSONObject], **members: Any) -> bytes:
    """Return a terminal event: kind is "completed", "incomplete" or "failed"."""
    response = {
        "id": "resp_1",
        "object": "response",
        "status": kind,
        "model": "m-1",
        "output": list(output),
        "usage": {
            "input_tokens": 11,
            "input_tokens_details": {"cached_tokens": 4},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": 18,
        },
        **members,
    }
    return named_event({"type": f"response.{kind}", "sequence_number": 99, "response": response})


def text_delta(text: str) -> bytes:
    """Return a piece of text of the Responses format."""
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    return named_event({"type": "response.output_text.delta", "delta": text, **place})


def responses_stream(text: str = "", tool_calls: Sequence[tuple[str, str, str]] = ()) -> bytes:
    """Return a whole answer of the Responses format; a call is (ID, name, arguments text)."""
    head = {"id": "resp_1", "status": "in_progress", "model": "m-1", "output": []}
    events = [named_event({"type": "response.created", "response": head})]
    output: list[dict[str, Any]] = []
    if text:
        events += [text_delta(text[start : start + 5]) for start in range(0, len(text), 5)]
        output.append(message_item(text))
    for call_id, name, arguments in tool_calls:
        item, index = call_item(call_id, name, arguments), len(output)
        added = {**item, "arguments": "", "status": "in_progress"}
        events.append(named_event({"type": "response.output_item.added", "output_index": index, "item": added}))
        for start in range(0, len(arguments), 6):
            piece = {"type": "response.function_call_arguments.delta", "output_index": index, "item_id": item["id"]}
            events.append(named_event({**piece, "delta": arguments[start : start + 6]}))
        output.append(item)
    for index, item in enumerate(output):
        events.append(named_event({"type": "response.output_item.done", "output_index": index, "item": item}))
    return b"".join((*events, terminal("completed", output)))


def block_start(index: int, block: JSONObject) -> bytes:
    """Return the beginning of a block of the Messages format."""
    return named_event({"type": "content_block_start", "index": index, "content_block": block})


def block_delta(index: int, kind: str, member: str, piece: str) -> bytes:
    """Return a piece of a block of the Messages format."""
    delta = {"type": kind, member: piece}
    return named_event({"type": "content_block_delta", "index": index, "delta": delta})


def message_start() -> bytes:
    """Return the first event of the Messages format."""
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m-1", "content": [], "usage": usage}
    return named_event({"type": "message_start", "message": {**message, "stop_reason": None}})


def message_end(stop_reason: str) -> bytes:
    """Return the event of the Messages format that ends an answer."""
    delta = {"stop_reason": stop_reason, "stop_sequence": None}
    return named_event({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 7}})


MESSAGE_STOP = named_event({"type": "message_stop"})


def messages_stream(text: str = "", tool_calls: Sequence[tuple[str, str, str]] = ()) -> bytes:
    """Return a whole answer of the Messages format; a call is (ID, name, arguments text)."""
    events = [message_start(), named_event({"type": "ping"})]
    if text:
        events.append(block_start(0, {"type": "text", "text": ""}))
        events += [block_delta(0, "text_delta", "text", text[start : start + 5]) for start in range(0, len(text), 5)]
        events.append(named_event({"type": "content_block_stop", "index": 0}))
    for index, (call_id, name, arguments) in enumerate(tool_calls, start=1 if text else 0):
        events.append(block_start(index, {"type": "tool_use", "id": call_id, "name": name, "input": {}}))
        for start in range(0, max(len(arguments), 1), 6):
            events.append(block_delta(index, "input_json_delta", "partial_json", arguments[start : start + 6]))
        events.append(named_event({"type": "content_block_stop", "index": index}))
    return b"".join((*events, message_end("tool_use" if tool_calls else "end_turn"), MESSAGE_STOP))


STREAMS = {"openai-responses": responses_stream, "openai-chat": chat_stream, "anthropic-messages": messages_stream}


def whole_stream(wire_format: str, text: str = "", tool_calls: Sequence[tuple[str, str, str]] = ()) -> bytes:
    """Return a whole answer in a wire format."""
    return STREAMS[wire_format](text, tool_calls)


def text_piece(wire_format: str, text: str) -> bytes:
    """Return the first piece of an answer in a wire format."""
    match wire_format:
        case "openai-responses":
            return text_delta(text)
        case "openai-chat":
            return chat_chunk({"content": text})
        case _:
            opening = block_start(0, {"type": "text", "text": ""})
            return message_start() + opening + block_delta(0, "text_delta", "text", text)


def stream_reply(*chunks: bytes) -> Reply:
    """Return a 200 event stream."""
    return Reply(steps=chunks)
