"""Checks of what an input carries. Pure; every failure is an `InvalidArgumentError` that names the field.

An input is checked when it is submitted and never later, so that a bad one can't fail a session: what passes here can
be stored, shown to every model and carried out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Final, NoReturn

from google.protobuf import duration_pb2

from harness.errors import InvalidArgumentError
from harness.inbox.images import recognise_image
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

MAX_INPUT_ID_CHARS: Final = 256
MAX_PARTS: Final = 1_000
MAX_INPUT_BYTES: Final = 16 * 1024 * 1024
"""Texts and images of one input together; the bound of SubmitInput."""

MAX_IMAGE_BYTES: Final = 3_750_000
"""5 MB in base64: what the strictest provider takes for one image."""

MAX_IMAGE_SIDE_PIXELS: Final = 8_000
"""What the strictest provider takes."""

MAX_METADATA_ENTRIES: Final = 64
MAX_METADATA_KEY_CHARS: Final = 128
MAX_METADATA_VALUE_CHARS: Final = 4_096
MAX_REASON_CHARS: Final = 4_096
MAX_HEARTBEAT_CHARS: Final = 65_536
"""A heartbeat lists the calls that run."""

MAX_SYSTEM_PROMPT_BYTES: Final = 1024 * 1024
MAX_NAME_CHARS: Final = 256
"""A provider's, a model's or a tool's name."""

IMAGE_MEDIA_TYPES: Final = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
EFFORTS: Final = frozenset({"", "low", "medium", "high", "xhigh", "max"})

_DIGEST = re.compile(r"[0-9a-f]{64}")
_OPERATION_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MAX_DURATION_S = 315_576_000_000


def refuse(reason: str, field: str, problem: str) -> NoReturn:
    """Raise for a field.

    Args:
        reason: Stable constant.
        field: Path in the input, for example "content.parts[0].text".
        problem: What is wrong and what would be right; follows the path in the message. No prompt text.
    """
    raise InvalidArgumentError(f"{field} {problem}", reason=reason, metadata={"field": field})


def check_input_id(input_id: str) -> None:
    """Check an input's ID: INVALID_INPUT_ID."""
    if not 1 <= len(input_id) <= MAX_INPUT_ID_CHARS:
        refuse("INVALID_INPUT_ID", "input_id", f"must have 1 to {MAX_INPUT_ID_CHARS} characters, got {len(input_id)}")
    if any(unicodedata.category(character) == "Cc" for character in input_id):
        refuse("INVALID_INPUT_ID", "input_id", f"must not hold control characters, got {input_id!r}")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Check an input's labels: INVALID_METADATA."""
    if len(metadata) > MAX_METADATA_ENTRIES:
        refuse("INVALID_METADATA", "metadata", f"must have at most {MAX_METADATA_ENTRIES} entries, got {len(metadata)}")
    for key, value in metadata.items():
        if not 1 <= len(key) <= MAX_METADATA_KEY_CHARS:
            problem = f"must have keys of 1 to {MAX_METADATA_KEY_CHARS} characters, got {len(key)}"
            refuse("INVALID_METADATA", "metadata", problem)
        if len(value) > MAX_METADATA_VALUE_CHARS:
            problem = f"must have at most {MAX_METADATA_VALUE_CHARS} characters, got {len(value)}"
            refuse("INVALID_METADATA", f"metadata[{key!r}]", problem)


def check_content(content: item_pb2.Content) -> None:
    """Check a user's message: EMPTY_CONTENT, INVALID_TEXT, the image reasons, INVALID_BLOB, INPUT_TOO_LARGE."""
    if not content.parts:
        refuse("EMPTY_CONTENT", "content.parts", "must hold at least one part")
    if len(content.parts) > MAX_PARTS:
        refuse("INPUT_TOO_LARGE", "content.parts", f"must hold at most {MAX_PARTS} parts, got {len(content.parts)}")
    has_substance = False
    total_bytes = 0
    for index, part in enumerate(content.parts):
        field = f"content.parts[{index}]"
        match part.WhichOneof("part"):
            case "text":
                total_bytes += _check_text_part(part.text, f"{field}.text")
                has_substance = has_substance or not is_blank(part.text)
            case "image":
                total_bytes += _check_image_part(part.image, f"{field}.image")
                has_substance = True
            case _:
                refuse("UNKNOWN_FIELDS", field, "must be a text or an image; neither is set")
    if total_bytes > MAX_INPUT_BYTES:
        refuse("INPUT_TOO_LARGE", "content", f"must have at most {MAX_INPUT_BYTES} bytes, got {total_bytes}")
    if not has_substance:
        refuse("EMPTY_CONTENT", "content.parts", "must hold an image or text that is not blank")


def is_blank(text: llm_pb2.TextPart) -> bool:
    """Return whether a text part says nothing; a blob counts as text."""
    return text.WhichOneof("body") == "text" and not text.text.strip()


def _check_text_part(text: llm_pb2.TextPart, field: str) -> int:
    match text.WhichOneof("body"):
        case "text":
            return check_text(text.text, field)
        case "blob":
            check_blob(text.blob, f"{field}.blob", MAX_INPUT_BYTES)
            if text.blob.media_type and not text.blob.media_type.startswith("text/"):
                problem = f"must be empty or begin with 'text/', got {text.blob.media_type!r}"
                refuse("INVALID_BLOB", f"{field}.blob.media_type", problem)
            return text.blob.size_bytes
        case _:
            refuse("UNKNOWN_FIELDS", field, "must hold text or a blob; neither is set")


def check_text(text: str, field: str) -> int:
    """Check that a text can be stored and sent, and return its bytes: INVALID_TEXT."""
    position = text.find("\0")
    if position >= 0:
        refuse("INVALID_TEXT", field, f"must not hold NUL; there is one at character {position}")
    try:
        return len(text.encode())
    except UnicodeEncodeError as err:
        refuse("INVALID_TEXT", field, f"must be valid Unicode; there is a lone surrogate at character {err.start}")


def _check_image_part(image: llm_pb2.ImagePart, field: str) -> int:
    match image.WhichOneof("source"):
        case "data":
            check_image_bytes(image.data, f"{field}.data")
            return len(image.data)
        case "blob":
            _check_image_blob(image, field)
            return image.blob.size_bytes
        case _:
            refuse("UNKNOWN_FIELDS", field, "must hold data or a blob; neither is set")


def check_image_bytes(data: bytes, field: str) -> None:
    """Check an encoded image: IMAGE_TOO_LARGE, UNSUPPORTED_IMAGE_TYPE, INVALID_IMAGE."""
    if len(data) > MAX_IMAGE_BYTES:
        problem = f"must have at most {MAX_IMAGE_BYTES} bytes, got {len(data)}; scale the image down"
        refuse("IMAGE_TOO_LARGE", field, problem)
    facts = recognise_image(data)
    if facts is None:
        refuse("UNSUPPORTED_IMAGE_TYPE", field, "must be a PNG, JPEG, GIF or WebP image by its content")
    if facts.is_damaged:
        refuse("INVALID_IMAGE", field, f"must be a whole image; its {facts.media_type} data is damaged or cut off")
    if max(facts.width, facts.height) > MAX_IMAGE_SIDE_PIXELS:
        problem = f"must be at most {MAX_IMAGE_SIDE_PIXELS} pixels a side, got {facts.width} x {facts.height}"
        refuse("IMAGE_TOO_LARGE", field, problem)


def _check_image_blob(image: llm_pb2.ImagePart, field: str) -> None:
    check_blob(image.blob, f"{field}.blob", MAX_IMAGE_BYTES)
    media_type = image.media_type or image.blob.media_type
    if media_type not in IMAGE_MEDIA_TYPES:
        problem = f"must be one of {', '.join(sorted(IMAGE_MEDIA_TYPES))}, got {media_type!r}"
        refuse("UNSUPPORTED_IMAGE_TYPE", f"{field}.media_type", problem)
    if max(image.width, image.height) > MAX_IMAGE_SIDE_PIXELS:
        problem = f"must be at most {MAX_IMAGE_SIDE_PIXELS} pixels a side, got {image.width} x {image.height}"
        refuse("IMAGE_TOO_LARGE", field, problem)


def check_blob(blob: llm_pb2.BlobRef, field: str, max_bytes: int) -> None:
    """Check a reference to a blob: INVALID_BLOB, or IMAGE_TOO_LARGE and INPUT_TOO_LARGE by its size."""
    if not _DIGEST.fullmatch(blob.digest):
        refuse("INVALID_BLOB", f"{field}.digest", f"must be 64 lower-case hexadecimal digits, got {blob.digest[:80]!r}")
    if blob.size_bytes == 0:
        refuse("INVALID_BLOB", f"{field}.size_bytes", "must be positive")
    if blob.size_bytes > max_bytes:
        reason = "IMAGE_TOO_LARGE" if max_bytes == MAX_IMAGE_BYTES else "INPUT_TOO_LARGE"
        refuse(reason, f"{field}.size_bytes", f"must be at most {max_bytes}, got {blob.size_bytes}")


def check_control(control: item_pb2.Control) -> None:
    """Check what a CONTROL input asks for: INVALID_CONTROL, INVALID_TEXT."""
    match control.WhichOneof("control"):
        case "stop":
            _check_stop(control.stop)
        case "heartbeat":
            _check_heartbeat(control.heartbeat)
        case "settings":
            check_settings_patch(control.settings)
        case "cancel_operation":
            field = "control.cancel_operation"
            _check_operation_id(control.cancel_operation.operation_id, field)
            _check_reason(control.cancel_operation.reason, field)
            if control.cancel_operation.HasField("abandon_after"):
                _check_duration(control.cancel_operation.abandon_after, f"{field}.abandon_after")
        case "abandon_operation":
            _check_operation_id(control.abandon_operation.operation_id, "control.abandon_operation")
            _check_reason(control.abandon_operation.reason, "control.abandon_operation")
        case "compact":
            _check_reason(control.compact.reason, "control.compact")
        case "retry_turn":
            pass
        case _:
            refuse("UNKNOWN_FIELDS", "control", "must say what it asks for; nothing is set")


def _check_stop(stop: item_pb2.Stop) -> None:
    if stop.mode not in (item_pb2.STOP_MODE_HARD, item_pb2.STOP_MODE_WHEN_IDLE):
        refuse("INVALID_CONTROL", "control.stop.mode", f"must be HARD or WHEN_IDLE, got {stop.mode}")
    _check_reason(stop.reason, "control.stop")
    if stop.HasField("abandon_after"):
        _check_duration(stop.abandon_after, "control.stop.abandon_after")


def _check_heartbeat(heartbeat: item_pb2.Heartbeat) -> None:
    _check_reason(heartbeat.reason, "control.heartbeat", MAX_HEARTBEAT_CHARS)
    if not heartbeat.reason.strip():
        refuse("INVALID_CONTROL", "control.heartbeat.reason", "must not be blank")
    for index, call in enumerate(heartbeat.running_calls):
        if not call.call_id:
            refuse("INVALID_CONTROL", f"control.heartbeat.running_calls[{index}].call_id", "must not be empty")


def _check_operation_id(operation_id: str, field: str) -> None:
    if not _OPERATION_ID.fullmatch(operation_id):
        problem = f"must be 1 to 128 letters, digits, '-', '_' and '.', got {operation_id[:140]!r}"
        refuse("INVALID_CONTROL", f"{field}.operation_id", problem)


def _check_reason(reason: str, field: str, max_chars: int = MAX_REASON_CHARS) -> None:
    check_text(reason, f"{field}.reason")
    if len(reason) > max_chars:
        problem = f"must have at most {max_chars} characters, got {len(reason)}"
        refuse("INVALID_CONTROL", f"{field}.reason", problem)


def check_settings_patch(patch: session_pb2.SettingsPatch) -> None:
    """Check a change of settings: INVALID_CONTROL, INVALID_TEXT. Whether its names exist, the coordinator says."""
    field = "control.settings"
    if not patch.ListFields():
        refuse("INVALID_CONTROL", field, "must change at least one setting")
    if patch.HasField("provider"):
        _check_name(patch.provider, f"{field}.provider")
    if patch.HasField("model"):
        _check_name(patch.model, f"{field}.model")
    if patch.HasField("fallback_provider") and patch.fallback_provider:
        _check_name(patch.fallback_provider, f"{field}.fallback_provider")
    if patch.effort not in EFFORTS:
        problem = f"must be low, medium, high, xhigh, max or empty, got {patch.effort[:40]!r}"
        refuse("INVALID_CONTROL", f"{field}.effort", problem)
    prompt_bytes = check_text(patch.system_prompt, f"{field}.system_prompt")
    if prompt_bytes > MAX_SYSTEM_PROMPT_BYTES:
        problem = f"must have at most {MAX_SYSTEM_PROMPT_BYTES} bytes, got {prompt_bytes}"
        refuse("INVALID_CONTROL", f"{field}.system_prompt", problem)
    _check_tool_names(patch.enabled_tools.names, f"{field}.enabled_tools.names")
    if patch.limits.HasField("max_wall_time"):
        _check_duration(patch.limits.max_wall_time, f"{field}.limits.max_wall_time")


def _check_tool_names(names: Iterable[str], field: str) -> None:
    seen = set[str]()
    for index, name in enumerate(names):
        _check_name(name, f"{field}[{index}]")
        if name in seen:
            refuse("INVALID_CONTROL", f"{field}[{index}]", f"must not repeat a name, got {name!r} again")
        seen.add(name)


def _check_name(name: str, field: str) -> None:
    check_text(name, field)
    if not name.strip() or len(name) > MAX_NAME_CHARS:
        refuse("INVALID_CONTROL", field, f"must have 1 to {MAX_NAME_CHARS} characters and not be blank")


def _check_duration(duration: duration_pb2.Duration, field: str) -> None:
    """Refuse what is no duration or negative; 0 is a legal bound where the field says what it means."""
    if not 0 <= duration.seconds <= _MAX_DURATION_S or not 0 <= duration.nanos < 1_000_000_000:
        refuse("INVALID_CONTROL", field, f"must not be negative, got {duration.seconds} s and {duration.nanos} ns")


def check_crash(crash: item_pb2.CrashReport) -> None:
    """Check what is known of a crash: INVALID_CRASH, INVALID_TEXT."""
    if not crash.kind.strip():
        refuse("INVALID_CRASH", "crash.kind", "must not be blank")
    for name, text in (("kind", crash.kind), ("message", crash.message)):
        check_text(text, f"crash.{name}")
        if len(text) > MAX_REASON_CHARS:
            refuse("INVALID_CRASH", f"crash.{name}", f"must have at most {MAX_REASON_CHARS} characters")
