"""One placed entry of the conversation: its message, its size and its canonical digest. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

BYTES_PER_TOKEN = 4
"""Text bytes that are estimated as one token, where the provider has not counted yet."""

TOKENS_PER_IMAGE = 1_500
"""Estimate for an image of unknown size."""

PIXELS_PER_TOKEN = 750
"""Anthropic's published formula; those of others give less for large images."""

MIN_IMAGE_TOKENS = 85
MAX_IMAGE_TOKENS = 3_000
"""Between the least and the most that providers count for an image of up to 2,000 x 2,000 pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Amount of a part of the context."""

    entries: int = 0
    text_bytes: int = 0
    images: int = 0
    image_tokens: int = 0
    """Estimate for the images, by their size."""

    def __add__(self, other: Totals) -> Totals:
        """Return the sum."""
        return Totals(
            entries=self.entries + other.entries,
            text_bytes=self.text_bytes + other.text_bytes,
            images=self.images + other.images,
            image_tokens=self.image_tokens + other.image_tokens,
        )

    @property
    def estimated_tokens(self) -> int:
        """Estimate of its tokens, by sizes alone."""
        return self.text_bytes // BYTES_PER_TOKEN + self.image_tokens

    def message(self, estimated_tokens: int) -> item_pb2.ContextTotals:
        """Return it as it is recorded, with an estimate that may know more than the sizes."""
        return item_pb2.ContextTotals(
            entries=self.entries,
            text_bytes=self.text_bytes,
            images=self.images,
            estimated_tokens=estimated_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An entry of the conversation."""

    kind: str
    """"input", "heartbeat", "response", "tool_result", "late_result" or "summary"."""

    entry: llm_pb2.ContextEntry
    call_id: str = ""
    """The call that a result belongs to; empty otherwise."""

    totals: Totals


def place(kind: str, entry: llm_pb2.ContextEntry, *, call_id: str = "") -> Placed:
    """Return `entry` with its size."""
    return Placed(kind=kind, entry=entry, call_id=call_id, totals=_measure(entry))


def user_entry(parts: Iterable[llm_pb2.ContentPart], *, source_sequence: int) -> llm_pb2.ContextEntry:
    """Return a user-role entry."""
    return llm_pb2.ContextEntry(user=llm_pb2.UserMessage(parts=parts), source_sequence=source_sequence)


def text_part(text: str) -> llm_pb2.ContentPart:
    """Return a text as a content part."""
    return llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))


def calls_of(placed: Placed) -> list[llm_pb2.ToolCall]:
    """Return the calls of a response's entry, in the model's order."""
    return [one.tool_call for one in placed.entry.assistant.items if one.WhichOneof("item") == "tool_call"]


def total(placed: Iterable[Placed]) -> Totals:
    """Return the amount of several entries."""
    return sum((one.totals for one in placed), Totals())


def without_reasoning(placed: Placed) -> Placed | None:
    """Return a response's entry without its reasoning: None where nothing is left, itself where it had none."""
    items = placed.entry.assistant.items
    kept = [item for item in items if item.WhichOneof("item") != "reasoning"]
    if len(kept) == len(items):
        return placed
    if not kept:
        return None
    entry = llm_pb2.ContextEntry(
        assistant=llm_pb2.AssistantMessage(items=kept), source_sequence=placed.entry.source_sequence
    )
    return place(placed.kind, entry)


def chain(digest: bytes, placed: Iterable[Placed]) -> bytes:
    """Return the digest after further entries. Its form is fixed for ever: recorded turns are compared with it."""
    for one in placed:
        digest = hashlib.sha256(digest + _canonical(one.entry)).digest()
    return digest


def _measure(entry: llm_pb2.ContextEntry) -> Totals:
    match entry.WhichOneof("entry"):
        case "user":
            return _measure_parts(entry.user.parts)
        case "tool_result":
            return _measure_parts(entry.tool_result.parts)
        case _:
            return Totals(entries=1, text_bytes=sum(_output_bytes(item) for item in entry.assistant.items))


def _measure_parts(parts: Sequence[llm_pb2.ContentPart]) -> Totals:
    text_bytes = images = image_tokens = 0
    for part in parts:
        if part.WhichOneof("part") == "image":
            images += 1
            image_tokens += _image_tokens(part.image)
        elif part.text.WhichOneof("body") == "blob":
            text_bytes += part.text.blob.size_bytes
        else:
            text_bytes += len(part.text.text.encode())
    return Totals(entries=1, text_bytes=text_bytes, images=images, image_tokens=image_tokens)


def _image_tokens(image: llm_pb2.ImagePart) -> int:
    if not image.width or not image.height:
        return TOKENS_PER_IMAGE
    return min(max(image.width * image.height // PIXELS_PER_TOKEN, MIN_IMAGE_TOKENS), MAX_IMAGE_TOKENS)


def _output_bytes(item: llm_pb2.OutputItem) -> int:
    match item.WhichOneof("item"):
        case "message":
            return len(item.message.text.encode())
        case "tool_call":
            return len(item.tool_call.arguments_json.encode()) + len(item.tool_call.name.encode())
        case _:
            return len(item.reasoning.raw_json.encode())


def _canonical(entry: llm_pb2.ContextEntry) -> bytes:
    """Return length-prefixed fields; protobuf bytes aren't canonical."""
    fields: list[str] = []
    match entry.WhichOneof("entry"):
        case "user":
            fields.append("user")
            _add_parts(fields, entry.user.parts)
        case "tool_result":
            result = entry.tool_result
            fields += ["tool_result", result.call_id, result.tool_name]
            _add_parts(fields, result.parts)
        case _:
            fields.append("assistant")
            for item in entry.assistant.items:
                _add_output(fields, item)
    return b"".join(len(data).to_bytes(8, "big") + data for data in (field.encode() for field in fields))


def _add_parts(fields: list[str], parts: Sequence[llm_pb2.ContentPart]) -> None:
    for part in parts:
        if part.WhichOneof("part") == "image":
            fields += ["image", part.image.blob.digest, part.image.media_type]
        elif part.text.WhichOneof("body") == "blob":
            fields += ["text_blob", part.text.blob.digest]
        else:
            fields += ["text", part.text.text]


def _add_output(fields: list[str], item: llm_pb2.OutputItem) -> None:
    match item.WhichOneof("item"):
        case "message":
            fields += ["message", item.message.text, item.message.phase]
        case "tool_call":
            fields += ["tool_call", item.tool_call.call_id, item.tool_call.name, item.tool_call.arguments_json]
        case _:
            fields += ["reasoning", item.reasoning.wire_format, item.reasoning.raw_json]
