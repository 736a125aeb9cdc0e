"""Images are recognised by their content, and evident damage is seen without decoding."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from harness.inbox import ImageFacts, recognise_image

FORMS: list[tuple[str, dict[str, bool]]] = [
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("GIF", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
]


def encode(form: str, size: tuple[int, int], options: dict[str, bool], mode: str = "RGB") -> bytes:
    target = io.BytesIO()
    Image.new(mode, size, 7).save(target, form, **options)
    return target.getvalue()


@pytest.mark.parametrize(("form", "options"), FORMS)
@pytest.mark.parametrize("size", [(1, 1), (300, 7), (65, 1025)])
def test_type_and_size_come_from_the_content(form: str, options: dict[str, bool], size: tuple[int, int]) -> None:
    facts = recognise_image(encode(form, size, options))

    assert facts == ImageFacts(media_type=f"image/{form.lower()}", width=size[0], height=size[1])


def test_webp_with_transparency_is_measured() -> None:
    facts = recognise_image(encode("WEBP", (40, 30), {}, mode="RGBA"))

    assert facts == ImageFacts(media_type="image/webp", width=40, height=30)


@pytest.mark.parametrize(("form", "options"), FORMS)
def test_cut_off_image_is_damaged(form: str, options: dict[str, bool]) -> None:
    whole = encode(form, (64, 64), options)

    facts = recognise_image(whole[: len(whole) - 3])

    assert facts is not None
    assert facts.is_damaged


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<!doctype html><html></html>",
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        b"BM" + bytes(60),
        b"RIFF\x10\0\0\0WAVEfmt ",
    ],
)
def test_what_models_do_not_take_is_not_recognised(content: bytes) -> None:
    assert recognise_image(content) is None


@given(
    start=st.sampled_from(
        [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\x04\0\0\0WEBPVP8X", b"RIFF\0\0\0\0WEBPVP8 "]
    ),
    rest=st.binary(max_size=200),
)
def test_hostile_bytes_are_measured_or_damaged_and_never_raise(start: bytes, rest: bytes) -> None:
    facts = recognise_image(start + rest)

    assert facts is not None
