"""What the wire formats share when they write a request: content, arguments, names, quirks. Pure, but for blobs."""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.llm import json_text
from unreal_agent.llm.v1 import llm_pb2

MAX_TOOL_NAME_CHARS = 64

_ILLEGAL_IN_NAME = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """Where a provider departs from the wire format that it speaks."""

    max_tokens_field: str = "max_tokens"
    """Member that bounds a chat answer; empty: the provider takes no bound, in whatever format."""

    streams: bool = True
    """False: answers are asked for whole, from servers that cannot stream them."""

    key_header: str = "authorization"
    """Header that carries the key: `authorization` as a bearer token, any other as it is."""

    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers of every request."""

    effort_is_object: bool = False
    """Chat: True sends `reasoning: {effort}`, False `reasoning_effort`."""

    efforts: Mapping[str, str] = field(default_factory=dict)
    """Our effort to the provider's, where it lacks one; others go unchanged."""

    sends_cache_key: bool = False
    """True: the cache key goes into the body as `prompt_cache_key`."""

    cache_key_header: str = ""
    """Header that carries the cache key, so that a session stays with the machine that holds its cache; empty: none."""

    marks_cache_for: str = ""
    """Prefix of the models whose prompt cache has to be asked for; empty: none."""


async def load_blobs(
    entries: Sequence[llm_pb2.ContextEntry], load_blob: Callable[[str], Awaitable[bytes]]
) -> dict[str, bytes]:
    """Return the bytes of every blob that the entries name, by digest."""
    blobs: dict[str, bytes] = {}
    for entry in entries:
        for digest in _digests(_parts_of(entry)):
            if digest not in blobs:
                blobs[digest] = await load_blob(digest)
    return blobs


def text_of(part: llm_pb2.TextPart, blobs: Mapping[str, bytes]) -> str:
    """Return a text part's text."""
    if part.WhichOneof("body") == "blob":
        return blobs[part.blob.digest].decode(errors="replace")
    return part.text


def data_url(image: llm_pb2.ImagePart, blobs: Mapping[str, bytes]) -> str:
    """Return an image as a data URL."""
    content = blobs[image.blob.digest] if image.WhichOneof("source") == "blob" else image.data
    return f"data:{image.media_type};base64,{base64.b64encode(content).decode('ascii')}"


def joined_text(parts: Sequence[llm_pb2.ContentPart], blobs: Mapping[str, bytes]) -> str:
    """Return the text parts on lines of their own; images are left out."""
    return "\n".join(text_of(part.text, blobs) for part in parts if part.WhichOneof("part") == "text")


def images_of(parts: Sequence[llm_pb2.ContentPart]) -> list[llm_pb2.ImagePart]:
    """Return the images, in order."""
    return [part.image for part in parts if part.WhichOneof("part") == "image"]


def replayable_arguments(arguments_json: str) -> str:
    """Return a call's arguments as every provider takes them back: a JSON object.

    Blank text becomes an empty object. Text that is no JSON object, which was the model's error, is wrapped:
    `{"malformed_arguments": "<the text>"}`; so the history stays legal and the model sees what it wrote.
    """
    if not arguments_json.strip():
        return "{}"
    value = json_text.read_object(arguments_json)
    if value is not None and not _has_lone_surrogate(value):
        return arguments_json
    return json_text.write({"malformed_arguments": arguments_json})


def replayable_name(name: str) -> str:
    """Return a tool name that a provider takes back, also where the model made up an illegal one."""
    return _ILLEGAL_IN_NAME.sub("_", name)[:MAX_TOOL_NAME_CHARS] or "unnamed"


def tool_schema(tool: llm_pb2.ToolDefinition) -> object:
    """Return a tool's parameters schema, members in the stored order."""
    return json_text.read(tool.parameters_json) if tool.parameters_json else {"type": "object", "properties": {}}


def _has_lone_surrogate(value: object) -> bool:
    text = json_text.write(value)
    return json_text.valid_text(text) != text


def _parts_of(entry: llm_pb2.ContextEntry) -> Sequence[llm_pb2.ContentPart]:
    match entry.WhichOneof("entry"):
        case "user":
            return entry.user.parts
        case "tool_result":
            return entry.tool_result.parts
        case _:
            return ()


def _digests(parts: Sequence[llm_pb2.ContentPart]) -> Iterator[str]:
    for part in parts:
        if part.WhichOneof("part") == "image" and part.image.WhichOneof("source") == "blob":
            yield part.image.blob.digest
        elif part.WhichOneof("part") == "text" and part.text.WhichOneof("body") == "blob":
            yield part.text.blob.digest
