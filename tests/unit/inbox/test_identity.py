"""Normal form, blobs, and when two inputs are the same."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from harness.errors import InvalidArgumentError
from harness.inbox import (
    MAX_INLINE_TEXT_BYTES,
    externalise,
    fingerprint,
    image_digests,
    normalise_input,
    with_image_facts,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

LONG = "é" * (MAX_INLINE_TEXT_BYTES // 2) + "x"


def jpeg() -> bytes:
    target = io.BytesIO()
    Image.new("RGB", (5, 3)).save(target, "JPEG")
    return target.getvalue()


def text(body: str) -> llm_pb2.ContentPart:
    return llm_pb2.ContentPart(text=llm_pb2.TextPart(text=body))


def image(data: bytes) -> llm_pb2.ContentPart:
    return llm_pb2.ContentPart(image=llm_pb2.ImagePart(data=data, media_type="image/png"))


def external(*parts: llm_pb2.ContentPart, input_id: str = "i1") -> item_pb2.Input:
    return item_pb2.Input(input_id=input_id, content=item_pb2.Content(parts=parts), metadata={"b": "2", "a": "1"})


def test_normal_form_fills_defaults_and_tells_images_by_their_content() -> None:
    message = external(text("look"), text(" \n"), image(jpeg()))

    normal = normalise_input(message)

    assert normal == item_pb2.Input(
        schema_version=1,
        input_id="i1",
        kind=item_pb2.INPUT_KIND_EXTERNAL,
        delivery=item_pb2.DELIVERY_INTERRUPT,
        metadata={"a": "1", "b": "2"},
        content=item_pb2.Content(
            parts=[
                text("look"),
                llm_pb2.ContentPart(image=llm_pb2.ImagePart(data=jpeg(), media_type="image/jpeg", width=5, height=3)),
            ]
        ),
    )


def test_controls_and_crashes_have_no_delivery() -> None:
    control = item_pb2.Input(
        input_id="c", delivery=item_pb2.DELIVERY_INTERRUPT, control=item_pb2.Control(compact=item_pb2.Compact())
    )
    crash = item_pb2.Input(input_id="x", crash=item_pb2.CrashReport(kind="EPOCH"))

    forms = [normalise_input(control), normalise_input(crash)]

    assert [(one.kind, one.delivery) for one in forms] == [
        (item_pb2.INPUT_KIND_CONTROL, item_pb2.DELIVERY_UNSPECIFIED),
        (item_pb2.INPUT_KIND_CRASH, item_pb2.DELIVERY_UNSPECIFIED),
    ]


def test_images_and_long_texts_become_blobs_and_short_texts_stay() -> None:
    message = normalise_input(external(text("short"), text(LONG), image(jpeg())))

    stored, blobs = externalise(message)

    digests = [hashlib.sha256(LONG.encode()).hexdigest(), hashlib.sha256(jpeg()).hexdigest()]
    assert blobs == {digests[0]: LONG.encode(), digests[1]: jpeg()}
    assert list(stored.content.parts) == [
        text("short"),
        llm_pb2.ContentPart(
            text=llm_pb2.TextPart(
                blob=llm_pb2.BlobRef(
                    digest=digests[0], size_bytes=len(LONG.encode()), media_type="text/plain; charset=utf-8"
                )
            )
        ),
        llm_pb2.ContentPart(
            image=llm_pb2.ImagePart(
                blob=llm_pb2.BlobRef(digest=digests[1], size_bytes=len(jpeg()), media_type="image/jpeg"),
                media_type="image/jpeg",
                width=5,
                height=3,
            )
        ),
    ]


def test_text_of_exactly_64_kib_stays_inline() -> None:
    message = external(text("x" * MAX_INLINE_TEXT_BYTES))

    assert externalise(message) == (message, {})


@pytest.mark.parametrize("function", [normalise_input, externalise, fingerprint])
def test_argument_is_left_alone(function: Callable[[item_pb2.Input], object]) -> None:
    message = external(text(LONG), text(""), image(jpeg()))
    before = message.SerializeToString(deterministic=True)

    function(message)

    assert message.SerializeToString(deterministic=True) == before


def test_same_content_in_any_form_has_one_fingerprint() -> None:
    sent = external(text("hi"), text(LONG), image(jpeg()))
    normal = normalise_input(sent)
    stored, _ = externalise(normal)
    stored_at_once, _ = externalise(sent)

    assert len({fingerprint(one) for one in (sent, normal, stored, stored_at_once)}) == 1


def test_a_text_uploaded_as_a_blob_is_the_text() -> None:
    blob = llm_pb2.BlobRef(digest=hashlib.sha256(b"hi").hexdigest(), size_bytes=2)
    uploaded = external(llm_pb2.ContentPart(text=llm_pb2.TextPart(blob=blob)))

    assert fingerprint(uploaded) == fingerprint(external(text("hi")))


def test_other_content_has_another_fingerprint() -> None:
    patches = [
        session_pb2.SettingsPatch(effort=""),
        session_pb2.SettingsPatch(model=""),
        session_pb2.SettingsPatch(model="", effort=""),
        session_pb2.SettingsPatch(enabled_tools=session_pb2.ToolSelection()),
        session_pb2.SettingsPatch(enabled_tools=session_pb2.ToolSelection(names=["a", "b"])),
        session_pb2.SettingsPatch(enabled_tools=session_pb2.ToolSelection(names=["ab"])),
    ]
    messages = [
        external(text("hi")),
        external(text("delete it")),
        external(text("hi"), input_id="i2"),
        external(text("hi"), text("there")),
        external(text("hithere")),
        external(image(jpeg())),
        item_pb2.Input(input_id="i1", content=item_pb2.Content(parts=[text("hi")])),
        item_pb2.Input(
            input_id="i1", delivery=item_pb2.DELIVERY_AFTER_TURN, content=item_pb2.Content(parts=[text("hi")])
        ),
        item_pb2.Input(input_id="i1", control=item_pb2.Control(retry_turn=item_pb2.RetryTurn())),
        item_pb2.Input(input_id="i1", control=item_pb2.Control(retry_turn=item_pb2.RetryTurn(omit_new=True))),
        *(item_pb2.Input(input_id="i1", control=item_pb2.Control(settings=patch)) for patch in patches),
    ]

    assert len({fingerprint(message) for message in messages}) == len(messages)


def uploaded(content: bytes) -> item_pb2.Input:
    """Names a blob as a PNG image, whatever it is."""
    digest = hashlib.sha256(content).hexdigest()
    blob = llm_pb2.BlobRef(digest=digest, size_bytes=len(content), media_type="image/png")
    return normalise_input(external(llm_pb2.ContentPart(image=llm_pb2.ImagePart(blob=blob))))


def test_uploaded_image_is_described_by_its_content() -> None:
    message = uploaded(jpeg())
    before = message.SerializeToString(deterministic=True)
    (digest,) = image_digests(message)

    described = with_image_facts(message, {digest: jpeg()})

    assert message.SerializeToString(deterministic=True) == before
    assert described == externalise(normalise_input(external(image(jpeg()))))[0]
    assert with_image_facts(message, {}) == message


def test_uploaded_blob_that_is_no_image_is_refused() -> None:
    message = uploaded(b"<svg/>")

    with pytest.raises(InvalidArgumentError) as caught:
        with_image_facts(message, {image_digests(message)[0]: b"<svg/>"})

    assert (caught.value.reason, caught.value.metadata["field"]) == (
        "UNSUPPORTED_IMAGE_TYPE",
        "content.parts[0].image.blob",
    )


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), min_size=1, max_size=4),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4),
)
def test_storing_never_changes_the_fingerprint(texts: list[str], metadata: dict[str, str]) -> None:
    message = item_pb2.Input(
        input_id="i", content=item_pb2.Content(parts=[text(one) for one in texts]), metadata=metadata
    )

    stored, _ = externalise(normalise_input(message))

    assert fingerprint(item_pb2.Input.FromString(stored.SerializeToString())) == fingerprint(message)
