"""How the harness itself speaks to the model: placeholders, late results and heartbeats. Pure.

The texts are constants of the conversation's prefix: a changed one breaks every provider's cache. What they mean, the
preamble of the prompt explains.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Final

from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

RUNNING_PLACEHOLDER: Final = "[still running; the result will follow in a later message]"
"""Stands in the place of a call's result while the call runs."""

LATE_RESULT_TAG: Final = "late_tool_result"
"""Element that encloses a late result."""

MAX_LISTED_CALLS: Final = 50
"""Running calls that one heartbeat lists."""

_MARK_CHARS = 16
_OUTCOMES: Final = {
    item_pb2.CALL_OUTCOME_COMPLETED: "completed",
    item_pb2.CALL_OUTCOME_REJECTED: "rejected",
    item_pb2.CALL_OUTCOME_FAILED: "failed",
    item_pb2.CALL_OUTCOME_CANCELED: "canceled",
    item_pb2.CALL_OUTCOME_UNKNOWN: "unknown",
    item_pb2.CALL_OUTCOME_NOT_CARRIED_OVER: "not carried over",
}


def text_part(text: str) -> llm_pb2.ContentPart:
    """Return a text as a content part."""
    return llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))


def late_result_parts(tool_name: str, call_id: str, result: item_pb2.CallResult) -> list[llm_pb2.ContentPart]:
    """Return a result as parts of a user-role message, fenced so that it can't pass for the user's words.

    The fence carries a mark made from the content itself. Content that would close its own fence must hold part of its
    own hash, which nobody can write; that also holds for texts that lie in blobs.
    """
    mark = _mark(tool_name, call_id, result.parts)
    outcome = _OUTCOMES.get(result.outcome, "unknown")
    opening = (
        f'<{LATE_RESULT_TAG} tool={_quoted(tool_name)} call_id={_quoted(call_id)} outcome="{outcome}" mark="{mark}">\n'
    )
    parts = [text_part(opening)]
    for part in result.parts:
        _append(parts, part)
    _append(parts, text_part(f'\n</{LATE_RESULT_TAG} mark="{mark}">'))
    return parts


def heartbeat_text(waited_s: float, running_calls: Sequence[item_pb2.RunningCall]) -> str:
    """Return the reason of a heartbeat, which the model is shown as it is.

    Args:
        waited_s: Seconds since the session last had something to do.
        running_calls: Not empty. Listed by call ID, the first 50.
    """
    ordered = sorted(running_calls, key=lambda call: call.call_id)
    listed = [{"call_id": call.call_id, "tool": call.tool_name} for call in ordered[:MAX_LISTED_CALLS]]
    more = len(ordered) - len(listed)
    return (
        f"[heartbeat] Nothing has finished for {round(waited_s)} s. Still running: {json.dumps(listed)}"
        f"{f' and {more} more' if more else ''}. This note comes from the harness, not from the user."
    )


def _mark(tool_name: str, call_id: str, parts: Sequence[llm_pb2.ContentPart]) -> str:
    hasher = hashlib.sha256(f"{_quoted(tool_name)} {_quoted(call_id)}".encode())
    for part in parts:
        hasher.update(_address(part))
    return hasher.hexdigest()[:_MARK_CHARS]


def _address(part: llm_pb2.ContentPart) -> bytes:
    if part.HasField("image"):
        blob, inline = part.image.blob, part.image.data
    else:
        blob, inline = part.text.blob, part.text.text.encode()
    return bytes.fromhex(blob.digest) if blob.digest else hashlib.sha256(inline).digest()


def _append(parts: list[llm_pb2.ContentPart], part: llm_pb2.ContentPart) -> None:
    """Append, joining neighbouring inline texts into one part."""
    last = parts[-1].text
    if last.WhichOneof("body") == "text" and part.text.WhichOneof("body") == "text":
        parts[-1] = text_part(last.text + part.text.text)
    else:
        parts.append(part)


def _quoted(text: str) -> str:
    """Return one line in quotes that can't end an attribute or an element early."""
    return json.dumps(text).replace("<", "\\u003c").replace(">", "\\u003e")
