"""Images: the content says the type, limits come before decoding, and what does not fit is made to fit."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from harness.errors import HarnessError
from harness.primitives.image_preparation import prepare_file, prepare_image
from harness.primitives.images import ImageFacts, ImageRequest, fit

RED, BLUE = (255, 0, 0), (0, 0, 255)


def request(**values: int) -> ImageRequest:
    return ImageRequest(workspace="/nowhere", path="picture", **values)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return a picture that hardly compresses."""
    bands = [Image.effect_noise((width, height), 100) for _ in range(4)]
    return Image.merge("RGBA", bands).convert(mode)


def save(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def facts_of(source: bytes, **limits: int) -> ImageFacts:
    """Return the facts of a prepared image, having checked that they are true of its bytes."""
    prepared = prepare_image(source, request(**limits))
    with Image.open(io.BytesIO(prepared.content)) as result:
        result.load()
        assert result.size == (prepared.facts.width, prepared.facts.height)
        assert result.get_format_mimetype() == prepared.facts.media_type
    assert prepare_image(source, request(**limits)) == prepared
    return prepared.facts


def reason(source: bytes, **limits: int) -> tuple[str, str]:
    with pytest.raises(HarnessError) as caught:
        prepare_image(source, request(**limits))
    return caught.value.reason, caught.value.message


def png(width: int, height: int, body: bytes = b"") -> bytes:
    """Return a PNG that claims a size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("form", "media_type", "result_type"),
    [
        ("PNG", "image/png", "image/png"),
        ("JPEG", "image/jpeg", "image/jpeg"),
        ("WEBP", "image/webp", "image/webp"),
        ("BMP", "image/bmp", "image/png"),
        ("TIFF", "image/tiff", "image/png"),
        ("GIF", "image/gif", "image/png"),
    ],
)
def test_the_type_comes_from_the_content(form: str, media_type: str, result_type: str) -> None:
    facts = facts_of(save(noise(40, 30), form))
    assert facts == ImageFacts(
        media_type=result_type,
        width=40,
        height=30,
        original_media_type=media_type,
        original_width=40,
        original_height=30,
    )


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_what_fits_already_is_not_touched(form: str) -> None:
    source = save(noise(40, 30), form)
    assert prepare_image(source, request()).content == source


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
        (b"<!DOCTYPE html><html><body>x</body></html>", "an HTML page"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "a HEIC image"),
        (b"\0\0\0\x18ftypavif\0\0\0\0", "an AVIF image"),
        (b"%PDF-1.7\n", "a PDF document"),
        (b"\0\0\1\0\1\0", "an icon"),
        (b"BM is how this text begins, and nothing more", "a text"),
        (b"\x7fELF\2\1\1\0", "an unknown binary format"),
        (b"\x89PNG", "a text"),
    ],
)
def test_other_content_is_refused_in_words(source: bytes, words: str) -> None:
    kind, message = reason(source)
    assert kind == "IMAGE_UNSUPPORTED"
    assert words in message and "PNG, JPEG, WebP, BMP, TIFF and GIF" in message


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
def test_a_damaged_file_is_an_error_in_words(form: str) -> None:
    source = save(noise(200, 200), form)
    kind, message = reason(source[: len(source) // 2])
    assert kind == "IMAGE_DAMAGED"
    assert "can't be decoded" in message and "\n" not in message


def test_pixels_are_counted_before_decoding() -> None:
    # The body is empty: whoever decoded it would call it damaged instead.
    assert reason(png(6000, 6000)) == (
        "IMAGE_TOO_MANY_PIXELS",
        "file 'picture' has too many pixels: it has 6000 x 6000 = 36,000,000; at most 32,000,000 are decoded",
    )
    assert reason(png(2**31 - 1, 2**31 - 1))[0] == "IMAGE_TOO_MANY_PIXELS"


def test_a_text_chunk_cannot_be_a_bomb() -> None:
    bomb = b"k\0\0" + zlib.compress(bytes(200_000_000), 9)
    chunk = struct.pack(">I", len(bomb)) + b"zTXt" + bomb + struct.pack(">I", zlib.crc32(b"zTXt" + bomb))
    source = save(noise(4, 4), "PNG")
    assert reason(source[:33] + chunk + source[33:])[0] == "IMAGE_DAMAGED"


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((400, 200), {"max_width": 100}, (100, 50)),
        ((200, 400), {"max_height": 100}, (50, 100)),
        ((400, 300), {"max_width": 200, "max_height": 30}, (40, 30)),
        ((5000, 2), {"max_width": 100}, (100, 1)),
        ((30, 20), {"max_width": 100, "max_height": 100}, (30, 20)),
    ],
)
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_what_is_too_large_in_pixels_keeps_its_shape(
    form: str, size: tuple[int, int], limits: dict[str, int], expected: tuple[int, int]
) -> None:
    facts = facts_of(save(noise(*size), form), **limits)
    assert (facts.width, facts.height) == expected
    assert (facts.original_width, facts.original_height) == size
    scaled_type = {"JPEG": "image/jpeg"}.get(form, "image/png")
    assert facts.media_type == (scaled_type if size != expected else f"image/{form.lower()}")


@given(st.integers(1, 40_000), st.integers(1, 40_000), st.integers(1, 8000), st.integers(1, 8000))
def test_a_fitted_size_fits_and_never_grows(width: int, height: int, max_width: int, max_height: int) -> None:
    fitted = fit(width, height, max_width, max_height)
    assert 1 <= fitted[0] <= min(width, max_width) and 1 <= fitted[1] <= min(height, max_height)
    if width <= max_width and height <= max_height:
        assert fitted == (width, height)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("limit", [2000, 40])
def test_the_orientation_of_the_metadata_is_applied(form: str, orientation: int, limit: int) -> None:
    # Upright the picture is 80 wide and 60 high with a red left half; it is stored as the tag says.
    upright = Image.new("RGB", (80, 60), BLUE)
    upright.paste(RED, (0, 0, 40, 60))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    source = save(stored, form, exif=exif)
    prepared = prepare_image(source, request(max_width=limit, max_height=limit))
    facts = prepared.facts
    assert (facts.original_width, facts.original_height) == (80, 60)
    assert (facts.width, facts.height) == ((80, 60) if limit == 2000 else (40, 30))
    with Image.open(io.BytesIO(prepared.content)) as result:
        assert result.getexif().get(0x0112, 1) == 1
        shown = result.convert("RGB")
        left, right = shown.getpixel((2, 15)), shown.getpixel((facts.width - 3, 15))
    assert isinstance(left, tuple) and isinstance(right, tuple)
    assert left[0] > 200 > 60 > left[2] and right[2] > 200 > 60 > right[0]


def test_the_first_frame_of_an_animation_is_shown() -> None:
    frames = [Image.new("RGB", (20, 10), colour) for colour in (RED, BLUE)]
    for form in ("GIF", "WEBP", "PNG"):
        source = save(frames[0], form, save_all=True, append_images=frames[1:], duration=100)
        prepared = prepare_image(source, request())
        assert prepared.facts.media_type == "image/png"
        with Image.open(io.BytesIO(prepared.content)) as result:
            assert not getattr(result, "is_animated", False)
            shown = result.convert("RGB").getpixel((5, 5))
        assert isinstance(shown, tuple) and shown[0] > 200


def test_transparency_survives_where_it_can() -> None:
    picture = Image.new("RGBA", (10, 10), (255, 0, 0, 0))
    for form, image in (("PNG", picture), ("WEBP", picture), ("TIFF", picture), ("GIF", picture)):
        prepared = prepare_image(save(image, form), request(max_width=5))
        with Image.open(io.BytesIO(prepared.content)) as result:
            assert result.convert("RGBA").getchannel("A").getpixel((2, 2)) == 0


def test_what_is_too_large_in_bytes_becomes_a_jpeg_then_smaller() -> None:
    source = save(noise(300, 300, "RGBA"), "PNG")
    generous = facts_of(source, max_bytes=60_000)
    assert (generous.media_type, generous.width) == ("image/jpeg", 300)
    tight = facts_of(source, max_bytes=5_000)
    assert tight.media_type == "image/jpeg" and tight.width < 300
    kind, message = reason(source, max_bytes=300)
    assert kind == "IMAGE_TOO_LARGE" and "too many" in message


def test_a_jpeg_too_large_in_bytes_stays_one() -> None:
    source = save(noise(300, 300), "JPEG", quality=100)
    assert facts_of(source, max_bytes=len(source) - 1).width == 300


@pytest.mark.parametrize(
    ("mode", "form"),
    [
        ("1", "PNG"),
        ("L", "PNG"),
        ("P", "PNG"),
        ("LA", "PNG"),
        ("I;16", "PNG"),
        ("I", "TIFF"),
        ("F", "TIFF"),
        ("CMYK", "JPEG"),
        ("CMYK", "TIFF"),
        ("L", "JPEG"),
        ("P", "GIF"),
        ("1", "BMP"),
    ],
)
@pytest.mark.parametrize("limit", [2000, 16])
def test_every_colour_mode_can_be_shown(mode: str, form: str, limit: int) -> None:
    facts = facts_of(save(noise(32, 32).convert("L").convert(mode), form), max_width=limit)
    assert facts.width == min(32, limit)


def test_sixteen_bits_keep_their_brightness() -> None:
    source = save(Image.new("I;16", (8, 8), 32_768), "PNG")
    with Image.open(io.BytesIO(prepare_image(source, request()).content)) as result:
        assert (result.mode, result.getpixel((0, 0))) == ("L", 128)


def test_metadata_do_not_reach_the_result() -> None:
    exif = Image.Exif()
    exif[0x010E] = "a secret place"
    source = save(noise(64, 64), "JPEG", exif=exif, comment=b"a secret place")
    assert b"secret" in source
    assert b"secret" not in prepare_image(source, request(max_width=32)).content


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.png").open("wb") as sparse:
        sparse.truncate(10 * 1024**4)
    with pytest.raises(HarnessError) as caught:
        prepare_file(ImageRequest(workspace=str(tmp_path), path="huge.png"))
    assert caught.value.reason == "FILE_TOO_LARGE"


def _seeds() -> list[bytes]:
    picture = noise(24, 16)
    forms = [save(picture, form) for form in ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")]
    return [*forms, save(picture, "TIFF", compression="tiff_lzw"), save(picture.convert("P"), "PNG")]


@settings(max_examples=300)
@given(
    seed=st.sampled_from(_seeds()),
    patches=st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=4)), max_size=6),
    cut=st.integers(0, 3000),
    tail=st.binary(max_size=16),
)
@example(seed=b"", patches=[], cut=0, tail=b"")
def test_damage_ends_in_an_image_or_in_words(
    seed: bytes, patches: list[tuple[int, bytes]], cut: int, tail: bytes
) -> None:
    source = bytearray(seed)
    for place, patch in patches:
        start = place % (len(source) + 1)
        source[start : start + len(patch)] = patch
    content = bytes(source[: max(cut, 16)]) + tail
    try:
        prepared = prepare_image(content, request(max_width=16, max_bytes=20_000))
    except HarnessError as error:
        assert error.reason.startswith("IMAGE_") and "\n" not in error.message
        return
    assert len(prepared.content) <= 20_000 and 1 <= prepared.facts.width <= 16
