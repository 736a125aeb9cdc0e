"""Contract of the inbox: what an input is, when it is refused, and when two inputs are the same.

Owns the validation, the normal form and the identity of inputs. It stores nothing and decides nothing about a session:
whether an ID was seen is the session store's knowledge. Every function is pure and leaves its argument alone.

The way of an input: `validate_input` → `normalise_input` → `with_image_facts` → `externalise` → store. Where the ID is
known already, the fingerprints are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from harness.errors import InvalidArgumentError, UnsupportedError
from harness.inbox import validation
from harness.inbox.images import recognise_image
from harness.primitives.messages import find_unknown_field
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

INPUT_SCHEMA_VERSION: Final = 1

MAX_INLINE_TEXT_BYTES: Final = 64 * 1024
"""Texts above this are stored as blobs."""

TEXT_MEDIA_TYPE: Final = "text/plain; charset=utf-8"

_KIND_OF_PAYLOAD: Final = {
    "content": item_pb2.INPUT_KIND_EXTERNAL,
    "control": item_pb2.INPUT_KIND_CONTROL,
    "crash": item_pb2.INPUT_KIND_CRASH,
}
_DELIVERIES: Final = frozenset(
    {item_pb2.DELIVERY_UNSPECIFIED, item_pb2.DELIVERY_INTERRUPT, item_pb2.DELIVERY_AFTER_TURN}
)


def validate_input(message: item_pb2.Input) -> None:
    """Refuse an input that could not be stored, shown to every model or carried out.

    Takes an input as it is sent (kind, delivery and version may be unset) and in normal form. What passes can't fail a
    session later.

    Raises:
        InvalidArgumentError: `metadata["field"]` names the place. Reasons: UNKNOWN_FIELDS (also for an unset choice),
            INVALID_INPUT_ID, INVALID_INPUT_KIND, INVALID_DELIVERY, INVALID_METADATA, EMPTY_CONTENT, INVALID_TEXT,
            UNSUPPORTED_IMAGE_TYPE, INVALID_IMAGE, IMAGE_TOO_LARGE, INVALID_BLOB, INPUT_TOO_LARGE, INVALID_CONTROL,
            INVALID_CRASH.
        UnsupportedError: UNSUPPORTED_INPUT_VERSION.
    """
    if message.schema_version not in (0, INPUT_SCHEMA_VERSION):
        raise UnsupportedError(
            f"schema_version {message.schema_version} of an input is unknown; this release reads 1",
            reason="UNSUPPORTED_INPUT_VERSION",
            metadata={"field": "schema_version"},
        )
    unknown = find_unknown_field(message)
    if unknown is not None:
        raise InvalidArgumentError(
            f"the input holds a field that this release does not know: {unknown}",
            reason="UNKNOWN_FIELDS",
            metadata={"field": unknown},
        )
    validation.check_input_id(message.input_id)
    _check_kind(message)
    validation.check_metadata(message.metadata)
    match message.WhichOneof("payload"):
        case "content":
            validation.check_content(message.content)
        case "control":
            validation.check_control(message.control)
        case _:
            validation.check_crash(message.crash)


def _check_kind(message: item_pb2.Input) -> None:
    payload = message.WhichOneof("payload")
    if payload is None:
        validation.refuse("UNKNOWN_FIELDS", "payload", "must be content, control or crash; none is set")
    kind = _KIND_OF_PAYLOAD[payload]
    if message.kind not in (item_pb2.INPUT_KIND_UNSPECIFIED, kind):
        expected = item_pb2.InputKind.Name(kind)
        validation.refuse("INVALID_INPUT_KIND", "kind", f"must be {expected} with {payload}, got {message.kind}")
    if message.delivery not in _DELIVERIES:
        validation.refuse("INVALID_DELIVERY", "delivery", f"must be INTERRUPT or AFTER_TURN, got {message.delivery}")
    if kind != item_pb2.INPUT_KIND_EXTERNAL and message.delivery != item_pb2.DELIVERY_UNSPECIFIED:
        validation.refuse("INVALID_DELIVERY", "delivery", f"must be unset with {payload}")


def normalise_input(message: item_pb2.Input) -> item_pb2.Input:
    """Return a valid input's normal form, which is what is stored; idempotent.

    Version, kind and delivery are filled; an inline image gets the type and size that its content tells, whatever its
    sender said; text parts that say nothing are left out, because some providers refuse them.
    """
    normal = item_pb2.Input()
    normal.CopyFrom(message)
    normal.schema_version = INPUT_SCHEMA_VERSION
    payload = message.WhichOneof("payload")
    if payload is not None:
        normal.kind = _KIND_OF_PAYLOAD[payload]
    if payload != "content":
        normal.delivery = item_pb2.DELIVERY_UNSPECIFIED
        return normal
    if normal.delivery == item_pb2.DELIVERY_UNSPECIFIED:
        normal.delivery = item_pb2.DELIVERY_INTERRUPT
    parts = [_normal_part(part) for part in message.content.parts if not _is_blank(part)]
    del normal.content.parts[:]
    normal.content.parts.extend(parts)
    return normal


def _is_blank(part: llm_pb2.ContentPart) -> bool:
    return part.WhichOneof("part") == "text" and validation.is_blank(part.text)


def _normal_part(part: llm_pb2.ContentPart) -> llm_pb2.ContentPart:
    if part.WhichOneof("part") != "image":
        return part
    normal = llm_pb2.ContentPart()
    normal.CopyFrom(part)
    image = normal.image
    if image.WhichOneof("source") == "data":
        _describe(image, image.data)
    elif not image.media_type:
        image.media_type = image.blob.media_type
    return normal


def image_digests(message: item_pb2.Input) -> list[str]:
    """Return the digests of the blobs that an input names as images, for `with_image_facts`."""
    return [part.image.blob.digest for part in message.content.parts if part.image.HasField("blob")]


def with_image_facts(message: item_pb2.Input, contents: Mapping[str, bytes]) -> item_pb2.Input:
    """Return an input whose image blobs carry the type and size that their contents tell.

    A blob that was uploaded before is checked no later than the input that names it: what is no image would fail the
    request, and every later one.

    Args:
        message: In normal form.
        contents: By digest; an image that is not among them stays as its sender described it.

    Raises:
        InvalidArgumentError: UNSUPPORTED_IMAGE_TYPE, INVALID_IMAGE or IMAGE_TOO_LARGE.
    """
    checked = item_pb2.Input()
    checked.CopyFrom(message)
    for index, part in enumerate(checked.content.parts):
        if not part.image.HasField("blob"):
            continue
        content = contents.get(part.image.blob.digest)
        if content is not None:
            validation.check_image_bytes(content, f"content.parts[{index}].image.blob")
            _describe(part.image, content)
            part.image.blob.media_type = part.image.media_type
    return checked


def _describe(image: llm_pb2.ImagePart, content: bytes) -> None:
    facts = recognise_image(content)
    if facts is not None:
        image.media_type, image.width, image.height = facts.media_type, facts.width, facts.height


def externalise(message: item_pb2.Input) -> tuple[item_pb2.Input, dict[str, bytes]]:
    """Replace image bytes, and texts over 64 KiB, by references.

    Returns:
        The input as it is stored, and the contents of the blobs that must be stored before it, by digest.
    """
    external = item_pb2.Input()
    external.CopyFrom(message)
    if message.WhichOneof("payload") != "content":
        return external, {}
    parts, blobs = externalise_parts(message.content.parts)
    del external.content.parts[:]
    external.content.parts.extend(parts)
    return external, blobs


def externalise_parts(
    parts: Iterable[llm_pb2.ContentPart],
) -> tuple[list[llm_pb2.ContentPart], dict[str, bytes]]:
    """Do for any parts, a tool's result too, what `externalise` does for an input's."""
    blobs: dict[str, bytes] = {}
    external = []
    for part in parts:
        copy = llm_pb2.ContentPart()
        copy.CopyFrom(part)
        if part.text.WhichOneof("body") == "text":
            encoded = part.text.text.encode()
            if len(encoded) > MAX_INLINE_TEXT_BYTES:
                copy.text.blob.CopyFrom(blob_ref(encoded, TEXT_MEDIA_TYPE))
                blobs[copy.text.blob.digest] = encoded
        elif part.image.WhichOneof("source") == "data":
            copy.image.blob.CopyFrom(blob_ref(part.image.data, part.image.media_type))
            blobs[copy.image.blob.digest] = part.image.data
        external.append(copy)
    return external, blobs


def blob_ref(content: bytes, media_type: str) -> llm_pb2.BlobRef:
    """Return the reference that addresses a content."""
    digest = hashlib.sha256(content).hexdigest()
    return llm_pb2.BlobRef(digest=digest, size_bytes=len(content), media_type=media_type)


def fingerprint(message: item_pb2.Input) -> bytes:
    """Return 32 bytes that are equal for valid inputs of the same content, and for no others.

    What the server fills in does not count, nor whether a text or an image is inline or a blob already. The ID
    counts, the session does not. Computed over the fields and never over serialised bytes, which are not canonical.
    """
    content = normalise_input(message)
    content.ClearField("schema_version")
    for part in content.content.parts:
        if part.HasField("text"):
            _keep_address(part.text, part.text.text.encode())
        elif part.HasField("image"):
            _keep_address(part.image, part.image.data)
    hasher = hashlib.sha256()
    for piece in _canonical(content):
        hasher.update(len(piece).to_bytes(8, "big"))
        hasher.update(piece)
    return hasher.digest()


def _keep_address(part: llm_pb2.TextPart | llm_pb2.ImagePart, inline: bytes) -> None:
    """Leave only a content's address; type and size of an image follow from its bytes."""
    digest = part.blob.digest if part.HasField("blob") else hashlib.sha256(inline).hexdigest()
    part.Clear()
    part.blob.digest = digest


def _canonical(message: Message) -> Iterable[bytes]:
    """Yield a message's set fields by number, each with its shape, so that no two contents give the same pieces."""
    fields = sorted(message.ListFields(), key=lambda entry: entry[0].number)
    yield f"message {len(fields)}".encode()
    for field, value in fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield f"{field.number} map {len(value)}".encode()
            for key in sorted(value):
                yield str(key).encode()
                yield str(value[key]).encode()
            continue
        values = value if field.is_repeated else [value]
        yield f"{field.number} {len(values)}".encode()
        for element in values:
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                yield from _canonical(element)
            else:
                yield element if isinstance(element, bytes) else str(element).encode()
