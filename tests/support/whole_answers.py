"""One answer with two calls as a server sends it that cannot stream, in every wire format."""

from __future__ import annotations

from typing import Any

from tests.support.provider_replies import call_item, message_item

ARGUMENTS = '{"command":"ls"}'
CHAT_CALLS = [{"id": f"c{n}", "type": "function", "function": {"name": "Bash", "arguments": ARGUMENTS}} for n in (1, 2)]
WHOLE: dict[str, dict[str, Any]] = {
    "openai-responses": {
        "id": "r1",
        "object": "response",
        "status": "completed",
        "model": "m-1",
        "output": [message_item("Looking."), call_item("c1", "Bash", ARGUMENTS), call_item("c2", "Bash", ARGUMENTS)],
        "usage": {"input_tokens": 11, "output_tokens": 7},
    },
    "openai-chat": {
        "id": "r1",
        "object": "chat.completion",
        "model": "m-1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Looking.", "tool_calls": CHAT_CALLS},
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7},
    },
    "anthropic-messages": {
        "id": "r1",
        "type": "message",
        "role": "assistant",
        "model": "m-1",
        "content": [
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "c2", "name": "Bash", "input": {"command": "ls"}},
        ],
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 11, "output_tokens": 7},
    },
}
