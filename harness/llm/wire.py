"""Reading a provider's JSON: values narrowed to what they must be, with the place named where they are not. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from harness.llm import json_text
from harness.llm.failures import error_in_stream, malformed
from harness.llm.sse import ServerSentEvent
from unreal_agent.llm.v1 import llm_pb2

JSONObject = Mapping[str, object]

_MAX_COUNT = 2**63 - 1


def event_object(event: ServerSentEvent) -> JSONObject:
    """Return an event's data.

    Raises:
        AttemptError: It is not a JSON object.
    """
    try:
        value = json_text.read(event.data)
    except json_text.JSONTextError as err:
        raise malformed(f"sent broken JSON in event {event.number}: {err}") from None
    if not isinstance(value, dict):
        raise malformed(f"sent no JSON object in event {event.number}")
    return value


def whole_object(content: str) -> JSONObject:
    """Return a whole answer's object.

    Raises:
        AttemptError: It is not a JSON object, or reports an error.
    """
    try:
        value = json_text.read(content)
    except json_text.JSONTextError as err:
        raise malformed(f"sent a broken JSON answer: {err}; check the base URL") from None
    if not isinstance(value, dict):
        raise malformed("sent no JSON object; check the base URL")
    if value.get("error"):
        raise error_in_stream(value)
    return value


def text(value: object) -> str:
    """Return a text, or an empty one for any other value."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> JSONObject:
    """Return an object, or an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def objects(value: object) -> list[JSONObject]:
    """Return the objects of an array; whatever else it holds is left out, and no array is an empty one."""
    return [element for element in value if isinstance(element, dict)] if isinstance(value, list) else []


def count(value: object) -> int:
    """Return a number of tokens; 0 for what cannot be one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT else 0


def arguments_text(value: object) -> str:
    """Return a call's arguments as text: as sent, or written out where a server sent an object; empty for null."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json_text.write(value)


class TextPieces:
    """A text that arrives in pieces which may end inside a surrogate pair."""

    def __init__(self) -> None:
        """Start empty."""
        self._pieces: list[str] = []
        self._held = ""

    def add(self, piece: str) -> str:
        """Take a piece and return what can be shown of it now: half a pair waits for its other half."""
        self._pieces.append(piece)
        piece = self._held + piece
        self._held = ""
        if piece and "\ud800" <= piece[-1] <= "\udbff":
            piece, self._held = piece[:-1], piece[-1]
        return json_text.valid_text(piece)

    def whole(self) -> str:
        """Return the text so far."""
        return json_text.valid_text("".join(self._pieces))


def usage_message(usage: JSONObject, *, raw_json: str, input_name: str, output_name: str) -> llm_pb2.Usage:
    """Return a usage object in neutral form.

    Args:
        usage: The provider's object.
        raw_json: Its exact text.
        input_name: Stem of its input members: "input" or "prompt".
        output_name: Stem of its output members: "output" or "completion".
    """
    input_details = mapping(usage.get(f"{input_name}_tokens_details"))
    output_details = mapping(usage.get(f"{output_name}_tokens_details"))
    return llm_pb2.Usage(
        input_tokens=count(usage.get(f"{input_name}_tokens")),
        cached_input_tokens=count(input_details.get("cached_tokens") or usage.get("prompt_cache_hit_tokens")),
        cache_write_tokens=count(input_details.get("cache_write_tokens")),
        output_tokens=count(usage.get(f"{output_name}_tokens")),
        reasoning_tokens=count(output_details.get("reasoning_tokens")),
        raw_json=json_text.valid_text(raw_json),
    )
