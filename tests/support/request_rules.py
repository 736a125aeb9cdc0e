"""What a provider demands of a request: pairing, order, roles, names, arguments, images. Used on every recorded body.

Stricter than any one provider: results stand directly behind their response, each call has exactly one, reasoning
stands before what it led to.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DATA_URL = re.compile(r"data:(image/(?:png|jpeg|gif|webp));base64,([A-Za-z0-9+/]+=*)")
_MAGIC = {"image/png": b"\x89PNG", "image/jpeg": b"\xff\xd8\xff", "image/gif": b"GIF8", "image/webp": b"RIFF"}
_MAX_CALL_ID_CHARS = 64

Message = Mapping[str, Any]


def assert_legal(body: bytes | Mapping[str, Any]) -> None:
    """Fail with every broken rule of a request body of any format."""
    value = json.loads(body) if isinstance(body, bytes) else body
    if "messages" not in value:
        broken = list(broken_responses_rules(value))
    else:
        broken = list(broken_messages_rules(value) if is_messages_body(value) else broken_chat_rules(value))
    assert not broken, "\n".join(broken)


def is_messages_body(body: Mapping[str, Any]) -> bool:
    """Tell whether a body is one of the Messages format: it has a bound, and blocks everywhere."""
    return "max_tokens" in body and all(isinstance(message.get("content"), list) for message in body["messages"])


def broken_chat_rules(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of Chat Completions that a body breaks."""
    messages: Sequence[Message] = body["messages"]
    yield from _broken_names(tool["function"]["name"] for tool in body.get("tools", []))
    open_calls: list[str] = []
    seen: set[str] = set()
    for place, message in enumerate(messages):
        role = message["role"]
        where = f"messages[{place}]"
        if role != "tool" and open_calls:
            yield f"{where}: {role} before the results of {open_calls}"
            open_calls = []
        if role == "system" and place:
            yield f"{where}: system is not first"
        elif role == "user":
            yield from _broken_content(where, message["content"])
        elif role == "assistant":
            calls = message.get("tool_calls", [])
            if not calls and not message.get("content"):
                yield f"{where}: empty assistant message"
            for call in calls:
                function = call["function"]
                yield from _broken_call(where, call["id"], function["name"], function["arguments"], seen)
                open_calls.append(call["id"])
        elif role == "tool":
            if message["tool_call_id"] not in open_calls:
                yield f"{where}: result of {message['tool_call_id']!r}, which is not open here"
            else:
                open_calls.remove(message["tool_call_id"])
            if not isinstance(message["content"], str):
                yield f"{where}: a tool message holds text only"
    if open_calls:
        yield f"no results of {open_calls}"


def broken_responses_rules(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of Responses that a body breaks."""
    if body.get("store") is not False:
        yield "store is not false"
    yield from _broken_names(tool["name"] for tool in body.get("tools", []))
    open_calls: list[str] = []
    seen: set[str] = set()
    previous = ""
    for place, item in enumerate(body["input"]):
        kind = item["type"]
        where = f"input[{place}]"
        is_output = kind in ("reasoning", "function_call") or item.get("role") == "assistant"
        if previous == "reasoning" and not is_output:
            yield f"{where}: {kind} behind reasoning that led to nothing"
        if kind == "message" and item["role"] == "user" and open_calls:
            yield f"{where}: user message before the results of {open_calls}"
            open_calls = []
        yield from _broken_item(where, item, open_calls, seen)
        previous = kind
    if previous == "reasoning":
        yield "the input ends with reasoning"
    if open_calls:
        yield f"no results of {open_calls}"


_MESSAGES_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_CACHE_MARKERS = 4


def broken_messages_rules(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of Messages that a body breaks."""
    messages: Sequence[Message] = body["messages"]
    yield from _broken_names(tool["name"] for tool in body.get("tools", []))
    yield from _broken_markers(body)
    if not body.get("tools") and any(
        block["type"] in ("tool_use", "tool_result") for message in messages for block in message["content"]
    ):
        yield "calls without tools"
    if not messages or messages[0]["role"] != "user":
        yield "the first message is not the user's"
    open_calls: list[str] = []
    seen: set[str] = set()
    previous = ""
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if message["role"] == previous:
            yield f"{where}: two messages of {previous} in a row"
        previous = message["role"]
        content = message["content"]
        if not isinstance(content, list) or not content:
            yield f"{where}: content is no filled list"
        elif previous == "user":
            yield from _broken_user_blocks(where, content, open_calls)
            open_calls = []
        elif previous == "assistant":
            yield from _broken_assistant_blocks(where, content, seen)
            open_calls = [block["id"] for block in content if block["type"] == "tool_use"]
        else:
            yield f"{where}: unknown role {previous!r}"
    if open_calls:
        yield f"no results of {open_calls}"


def _broken_markers(body: Mapping[str, Any]) -> Iterator[str]:
    blocks = [*body.get("tools", []), *body.get("system", [])]
    blocks += [block for message in body["messages"] for block in message["content"]]
    marked = [block for block in blocks if "cache_control" in block]
    if len(marked) > _MAX_CACHE_MARKERS:
        yield f"{len(marked)} cache markers"
    if any(block["type"] in ("thinking", "redacted_thinking") for block in marked if "type" in block):
        yield "a cache marker on what was thought"
    thinking = body.get("thinking", {})
    if thinking.get("type") == "enabled" and not 1024 <= thinking["budget_tokens"] < body["max_tokens"]:
        yield "the budget for thinking is out of bounds"


def _broken_user_blocks(where: str, content: Sequence[Message], open_calls: Sequence[str]) -> Iterator[str]:
    missing = list(open_calls)
    is_behind = False
    for block in content:
        if block["type"] != "tool_result":
            is_behind = True
            yield from _broken_block(where, block)
            continue
        if is_behind:
            yield f"{where}: a result behind other content"
        if block["tool_use_id"] not in missing:
            yield f"{where}: result of {block['tool_use_id']!r}, which is not open here"
        else:
            missing.remove(block["tool_use_id"])
        for part in block.get("content", []):
            yield from _broken_block(where, part)
    if missing:
        yield f"{where}: no results of {missing}"


def _broken_assistant_blocks(where: str, content: Sequence[Message], seen: set[str]) -> Iterator[str]:
    if content[-1]["type"] in ("thinking", "redacted_thinking"):
        yield f"{where}: ends with what was thought"
    for block in content:
        match block["type"]:
            case "tool_use":
                yield from _broken_call(where, block["id"], block["name"], json.dumps(block["input"]), seen)
                if _MESSAGES_ID.fullmatch(block["id"]) is None:
                    yield f"{where}: call ID {block['id']!r}"
            case "thinking":
                if not block.get("signature"):
                    yield f"{where}: a thought without its signature"
            case "redacted_thinking":
                if not block.get("data"):
                    yield f"{where}: a redacted thought without data"
            case _:
                yield from _broken_block(where, block)


def _broken_block(where: str, block: Message) -> Iterator[str]:
    match block["type"]:
        case "text":
            if not block["text"].strip():
                yield f"{where}: blank text"
        case "image":
            source = block["source"]
            yield from _broken_image(where, f"data:{source['media_type']};base64,{source['data']}")
        case kind:
            yield f"{where}: unknown block {kind!r}"


def _broken_item(where: str, item: Message, open_calls: list[str], seen: set[str]) -> Iterator[str]:
    match item["type"]:
        case "message":
            yield from _broken_content(where, item["content"])
        case "function_call":
            yield from _broken_call(where, item["call_id"], item["name"], item["arguments"], seen)
            open_calls.append(item["call_id"])
        case "function_call_output":
            if item["call_id"] not in open_calls:
                yield f"{where}: result of {item['call_id']!r}, which is not open here"
            else:
                open_calls.remove(item["call_id"])
            if not isinstance(item["output"], str):
                yield from _broken_content(where, item["output"])
        case "reasoning":
            if not item.get("encrypted_content"):
                yield f"{where}: reasoning without encrypted content, which nobody stored"
        case kind:
            yield f"{where}: unknown type {kind!r}"


def _broken_call(where: str, call_id: str, name: str, arguments: str, seen: set[str]) -> Iterator[str]:
    if not call_id or len(call_id) > _MAX_CALL_ID_CHARS:
        yield f"{where}: call ID {call_id!r}"
    if call_id in seen:
        yield f"{where}: call ID {call_id!r} is used twice"
    seen.add(call_id)
    yield from (f"{where}: {broken}" for broken in _broken_names([name]))
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except ValueError:
        is_object = False
    if not is_object:
        yield f"{where}: arguments are no JSON object"


def _broken_names(names: Iterator[str] | Sequence[str]) -> Iterator[str]:
    for name in names:
        if _NAME.fullmatch(name) is None:
            yield f"illegal tool name {name!r}"


def _broken_content(where: str, content: object) -> Iterator[str]:
    if isinstance(content, str):
        if not content:
            yield f"{where}: empty content"
        return
    if not isinstance(content, list) or not content:
        yield f"{where}: content is neither text nor a filled list"
        return
    for part in content:
        match part["type"]:
            case "text" | "input_text" | "output_text":
                if not isinstance(part["text"], str):
                    yield f"{where}: text is no text"
            case "image_url":
                yield from _broken_image(where, part["image_url"]["url"])
            case "input_image":
                yield from _broken_image(where, part["image_url"])
            case kind:
                yield f"{where}: unknown part {kind!r}"


def _broken_image(where: str, url: str) -> Iterator[str]:
    found = _DATA_URL.fullmatch(url)
    if found is None:
        yield f"{where}: no data URL of a known image type"
    elif not base64.b64decode(found.group(2), validate=True).startswith(_MAGIC[found.group(1)]):
        yield f"{where}: the image is no {found.group(1)}"
