"""What is refused at the door, and with which reason."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from google.protobuf import duration_pb2
from PIL import Image

from harness.errors import InvalidArgumentError, UnsupportedError
from harness.inbox import normalise_input, validate_input
from harness.inbox.validation import MAX_IMAGE_BYTES, MAX_INPUT_BYTES
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

DIGEST = "0" * 64


def png(width: int = 2, height: int = 2) -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (width, height)).save(target, "PNG")
    return target.getvalue()


def text(body: str) -> llm_pb2.ContentPart:
    return llm_pb2.ContentPart(text=llm_pb2.TextPart(text=body))


def image(data: bytes, media_type: str = "") -> llm_pb2.ContentPart:
    return llm_pb2.ContentPart(image=llm_pb2.ImagePart(data=data, media_type=media_type))


def image_blob(media_type: str, size_bytes: int = 10, digest: str = DIGEST) -> llm_pb2.ContentPart:
    blob = llm_pb2.BlobRef(digest=digest, size_bytes=size_bytes, media_type=media_type)
    return llm_pb2.ContentPart(image=llm_pb2.ImagePart(blob=blob))


def text_blob(media_type: str, size_bytes: int = 10) -> llm_pb2.ContentPart:
    blob = llm_pb2.BlobRef(digest=DIGEST, size_bytes=size_bytes, media_type=media_type)
    return llm_pb2.ContentPart(text=llm_pb2.TextPart(blob=blob))


def external(*parts: llm_pb2.ContentPart, input_id: str = "i1") -> item_pb2.Input:
    return item_pb2.Input(input_id=input_id, content=item_pb2.Content(parts=parts))


def control(payload: item_pb2.Control) -> item_pb2.Input:
    return item_pb2.Input(input_id="c1", control=payload)


def settings(patch: session_pb2.SettingsPatch) -> item_pb2.Input:
    return control(item_pb2.Control(settings=patch))


def with_fields(change: Callable[[item_pb2.Input], None]) -> item_pb2.Input:
    message = external(text("hi"))
    change(message)
    return message


def later_field(message: item_pb2.Input) -> None:
    """Adds a field that this release does not know, as a later client would send it."""
    message.content.parts[0].MergeFromString(b"\xf8\x07\x01")


ACCEPTED = {
    "text": external(text("hi")),
    "longest ID": external(text("hi"), input_id="é" * 256),
    "image alone": external(image(png())),
    "image whose type is misnamed": external(image(png(), "image/jpeg")),
    "image with blank text": external(image(png()), text(" \n")),
    "blank and real text": external(text(" "), text("x")),
    "image in a blob": external(image_blob("image/webp")),
    "text in a blob": external(text_blob("text/plain; charset=utf-8")),
    "after the turn": item_pb2.Input(
        input_id="i", delivery=item_pb2.DELIVERY_AFTER_TURN, content=item_pb2.Content(parts=[text("x")])
    ),
    "hard stop": control(
        item_pb2.Control(
            stop=item_pb2.Stop(mode=item_pb2.STOP_MODE_HARD, abandon_after=duration_pb2.Duration(seconds=0))
        )
    ),
    "heartbeat": control(item_pb2.Control(heartbeat=item_pb2.Heartbeat(reason="waited"))),
    "empty effort": settings(session_pb2.SettingsPatch(effort="")),
    "emptied prompt": settings(session_pb2.SettingsPatch(system_prompt="")),
    "bounds lifted": settings(session_pb2.SettingsPatch(limits=session_pb2.SessionLimits())),
    "all tools": settings(session_pb2.SettingsPatch(enabled_tools=session_pb2.ToolSelection())),
    "no fallback": settings(session_pb2.SettingsPatch(fallback_provider="")),
    "cancel": control(item_pb2.Control(cancel_operation=item_pb2.CancelOperation(operation_id="op-1"))),
    "abandon": control(item_pb2.Control(abandon_operation=item_pb2.AbandonOperation(operation_id="op-1"))),
    "retry": control(item_pb2.Control(retry_turn=item_pb2.RetryTurn())),
    "compact": control(item_pb2.Control(compact=item_pb2.Compact())),
    "crash": item_pb2.Input(input_id="crash/3", crash=item_pb2.CrashReport(kind="EPOCH")),
}

REFUSED = {
    "empty ID": (external(text("x"), input_id=""), "INVALID_INPUT_ID", "input_id"),
    "long ID": (external(text("x"), input_id="x" * 10_000), "INVALID_INPUT_ID", "input_id"),
    "ID with NUL": (external(text("x"), input_id="a\0b"), "INVALID_INPUT_ID", "input_id"),
    "ID with newline": (external(text("x"), input_id="a\nb"), "INVALID_INPUT_ID", "input_id"),
    "ID with C1 control": (external(text("x"), input_id="a\x85b"), "INVALID_INPUT_ID", "input_id"),
    "no payload": (item_pb2.Input(input_id="i"), "UNKNOWN_FIELDS", "payload"),
    "later field": (with_fields(later_field), "UNKNOWN_FIELDS", "content.parts[0].127"),
    "wrong kind": (
        with_fields(lambda m: setattr(m, "kind", item_pb2.INPUT_KIND_CONTROL)),
        "INVALID_INPUT_KIND",
        "kind",
    ),
    "unknown kind": (
        item_pb2.Input.FromString(b"\x18\x63" + external(text("x")).SerializeToString()),
        "INVALID_INPUT_KIND",
        "kind",
    ),
    "unknown delivery": (
        item_pb2.Input.FromString(b"\x20\x63" + external(text("x")).SerializeToString()),
        "INVALID_DELIVERY",
        "delivery",
    ),
    "delivery of a control": (
        item_pb2.Input(
            input_id="c",
            delivery=item_pb2.DELIVERY_INTERRUPT,
            control=item_pb2.Control(retry_turn=item_pb2.RetryTurn()),
        ),
        "INVALID_DELIVERY",
        "delivery",
    ),
    "no part": (external(), "EMPTY_CONTENT", "content.parts"),
    "blank text": (external(text(" \n"), text("")), "EMPTY_CONTENT", "content.parts"),
    "unset part": (external(llm_pb2.ContentPart()), "UNKNOWN_FIELDS", "content.parts[0]"),
    "unset text": (
        external(llm_pb2.ContentPart(text=llm_pb2.TextPart())),
        "UNKNOWN_FIELDS",
        "content.parts[0].text",
    ),
    "unset image": (
        external(llm_pb2.ContentPart(image=llm_pb2.ImagePart())),
        "UNKNOWN_FIELDS",
        "content.parts[0].image",
    ),
    "NUL in text": (external(text("x"), text("a\0b")), "INVALID_TEXT", "content.parts[1].text"),
    "SVG as image": (
        external(image(b"<svg/>", "image/png")),
        "UNSUPPORTED_IMAGE_TYPE",
        "content.parts[0].image.data",
    ),
    "empty image": (external(image(b"")), "UNSUPPORTED_IMAGE_TYPE", "content.parts[0].image.data"),
    "cut image": (external(image(png()[:-4])), "INVALID_IMAGE", "content.parts[0].image.data"),
    "wide image": (external(image(png(8_001, 1))), "IMAGE_TOO_LARGE", "content.parts[0].image.data"),
    "heavy image": (
        external(image(png() + bytes(MAX_IMAGE_BYTES))),
        "IMAGE_TOO_LARGE",
        "content.parts[0].image.data",
    ),
    "BMP in a blob": (external(image_blob("image/bmp")), "UNSUPPORTED_IMAGE_TYPE", "content.parts[0].image.media_type"),
    "heavy blob": (
        external(image_blob("image/png", MAX_IMAGE_BYTES + 1)),
        "IMAGE_TOO_LARGE",
        "content.parts[0].image.blob.size_bytes",
    ),
    "bad digest": (
        external(image_blob("image/png", digest="A" * 64)),
        "INVALID_BLOB",
        "content.parts[0].image.blob.digest",
    ),
    "empty blob": (external(text_blob("text/plain", 0)), "INVALID_BLOB", "content.parts[0].text.blob.size_bytes"),
    "image as text blob": (
        external(text_blob("image/png")),
        "INVALID_BLOB",
        "content.parts[0].text.blob.media_type",
    ),
    "too much text": (external(text("x" * 9_000_000), text("x" * 9_000_000)), "INPUT_TOO_LARGE", "content"),
    "huge text blob": (
        external(text_blob("text/plain", MAX_INPUT_BYTES + 1)),
        "INPUT_TOO_LARGE",
        "content.parts[0].text.blob.size_bytes",
    ),
    "many labels": (
        with_fields(lambda m: m.metadata.update({str(n): "" for n in range(65)})),
        "INVALID_METADATA",
        "metadata",
    ),
    "long label": (with_fields(lambda m: m.metadata.update({"x" * 129: ""})), "INVALID_METADATA", "metadata"),
    "nameless label": (with_fields(lambda m: m.metadata.update({"": "x"})), "INVALID_METADATA", "metadata"),
    "long value": (with_fields(lambda m: m.metadata.update({"k": "x" * 4_097})), "INVALID_METADATA", "metadata['k']"),
    "control of nothing": (control(item_pb2.Control()), "UNKNOWN_FIELDS", "control"),
    "stop without mode": (control(item_pb2.Control(stop=item_pb2.Stop())), "INVALID_CONTROL", "control.stop.mode"),
    "negative patience": (
        control(
            item_pb2.Control(
                stop=item_pb2.Stop(mode=item_pb2.STOP_MODE_HARD, abandon_after=duration_pb2.Duration(seconds=-1))
            )
        ),
        "INVALID_CONTROL",
        "control.stop.abandon_after",
    ),
    "blank heartbeat": (
        control(item_pb2.Control(heartbeat=item_pb2.Heartbeat(reason=" "))),
        "INVALID_CONTROL",
        "control.heartbeat.reason",
    ),
    "empty patch": (settings(session_pb2.SettingsPatch()), "INVALID_CONTROL", "control.settings"),
    "unknown effort": (
        settings(session_pb2.SettingsPatch(effort="extreme")),
        "INVALID_CONTROL",
        "control.settings.effort",
    ),
    "blank model": (settings(session_pb2.SettingsPatch(model=" ")), "INVALID_CONTROL", "control.settings.model"),
    "negative time": (
        settings(
            session_pb2.SettingsPatch(
                limits=session_pb2.SessionLimits(max_wall_time=duration_pb2.Duration(seconds=0, nanos=-1))
            )
        ),
        "INVALID_CONTROL",
        "control.settings.limits.max_wall_time",
    ),
    "repeated tool": (
        settings(session_pb2.SettingsPatch(enabled_tools=session_pb2.ToolSelection(names=["Bash", "Bash"]))),
        "INVALID_CONTROL",
        "control.settings.enabled_tools.names[1]",
    ),
    "cancel nothing": (
        control(item_pb2.Control(cancel_operation=item_pb2.CancelOperation())),
        "INVALID_CONTROL",
        "control.cancel_operation.operation_id",
    ),
    "abandon a path": (
        control(item_pb2.Control(abandon_operation=item_pb2.AbandonOperation(operation_id="../x"))),
        "INVALID_CONTROL",
        "control.abandon_operation.operation_id",
    ),
    "crash of no kind": (
        item_pb2.Input(input_id="i", crash=item_pb2.CrashReport(message="x")),
        "INVALID_CRASH",
        "crash.kind",
    ),
}


@pytest.mark.parametrize("message", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_good_input_passes_as_sent_and_in_normal_form(message: item_pb2.Input) -> None:
    before = message.SerializeToString(deterministic=True)

    validate_input(message)
    validate_input(normalise_input(message))

    assert message.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(("message", "reason", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_with_reason_and_place(message: item_pb2.Input, reason: str, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate_input(message)

    assert (caught.value.reason, caught.value.metadata["field"]) == (reason, field)


def test_later_version_is_refused_as_unsupported() -> None:
    message = with_fields(lambda m: setattr(m, "schema_version", 2))

    with pytest.raises(UnsupportedError) as caught:
        validate_input(message)

    assert caught.value.reason == "UNSUPPORTED_INPUT_VERSION"


def test_refusal_does_not_repeat_the_prompt() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        validate_input(external(text("my secret plan\0")))

    assert "secret" not in caught.value.message
