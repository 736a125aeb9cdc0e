"""Decodes an image and makes it fit: orientation, size in pixels, size in bytes.

The same source and request give the same bytes. Runs in the image worker only: sources are hostile, the library that
decodes them is large, and what it costs in memory and time is bounded by the process.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator

from PIL import Image

from harness.errors import FailedPreconditionError, ResourceExhaustedError
from harness.primitives.confined_files import open_directory, read_file
from harness.primitives.images import (
    BMP,
    GIF,
    JPEG,
    MAX_SOURCE_BYTES,
    MAX_SOURCE_PIXELS,
    PNG,
    TIFF,
    WEBP,
    ImageFacts,
    ImageRequest,
    PreparedImage,
    detect_media_type,
    fit,
)

_DECODERS = {PNG: "PNG", JPEG: "JPEG", WEBP: "WEBP", BMP: "BMP", TIFF: "TIFF", GIF: "GIF"}

# What the model's provider takes as it is, where nothing has to change.
_UNCHANGED_MODES = {
    PNG: frozenset({"1", "L", "LA", "P", "RGB", "RGBA"}),
    JPEG: frozenset({"L", "RGB"}),
    WEBP: frozenset({"RGB", "RGBA"}),
}

_JPEG_QUALITIES = (90, 80, 65, 50, 35)
_SHRINK_QUALITY = 65
_SHRINK_FACTOR = 0.75
_SHRINK_ROUNDS = 8

_ORIENTATION_TAG = 0x0112
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset({5, 6, 7, 8})


def prepare_file(request: ImageRequest) -> PreparedImage:
    """Return a workspace's image file, made to fit.

    Raises:
        HarnessError: What `confined_files` and `prepare_image` raise.
    """
    with open_directory(request.workspace) as root:
        source = read_file(root, request.path, max_bytes=MAX_SOURCE_BYTES)
    return prepare_image(source, request)


def prepare_image(source: bytes, request: ImageRequest) -> PreparedImage:
    """Return an image made to fit; unchanged where it fits already and every provider takes its kind.

    Raises:
        FailedPreconditionError: IMAGE_UNSUPPORTED, IMAGE_DAMAGED.
        ResourceExhaustedError: IMAGE_TOO_MANY_PIXELS; IMAGE_TOO_LARGE where no smaller form fits into `max_bytes`.
        MemoryError: The process's bound was reached.
    """
    media_type = detect_media_type(source, request.path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _prepare(source, media_type, request)
    except (FailedPreconditionError, ResourceExhaustedError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(request.path, str(error)) from error
    # A damaged file makes the decoders raise nearly anything: SyntaxError, struct.error, OverflowError …
    except Exception as error:
        message = f"file {request.path!r} begins like {media_type} but can't be decoded: {_one_line(error)}"
        raise FailedPreconditionError(message, reason="IMAGE_DAMAGED") from error


def _prepare(source: bytes, media_type: str, request: ImageRequest) -> PreparedImage:
    with Image.open(io.BytesIO(source), formats=[_DECODERS[media_type]]) as image:
        _check_pixels(image, request.path)
        is_animated = media_type != JPEG and getattr(image, "is_animated", False)
        stored_size = image.size
        if media_type == JPEG:
            # The decoder itself can halve a JPEG, which costs less than decoding it whole; sideways ones fit as well.
            side = max(request.max_width, request.max_height)
            image.draft(None, (2 * side, 2 * side))
        image.load()
        _check_pixels(image, request.path)
        if media_type != JPEG:
            stored_size = image.size
        orientation = _orientation(image)
        width, height = stored_size[::-1] if orientation in _SIDEWAYS else stored_size
        target = fit(width, height, request.max_width, request.max_height)
        is_unchanged = (
            orientation == 1
            and target == (width, height)
            and not is_animated
            and image.mode in _UNCHANGED_MODES.get(media_type, ())
            and len(source) <= request.max_bytes
        )
        if is_unchanged:
            content, result_type = source, media_type
        else:
            picture = _scale(_plain(image), target[::-1] if orientation in _SIDEWAYS else target)
            if orientation in _TRANSPOSITIONS:
                picture = picture.transpose(_TRANSPOSITIONS[orientation])
            content, result_type, target = _encode(picture, media_type, request)
    facts = ImageFacts(
        media_type=result_type,
        width=target[0],
        height=target[1],
        original_media_type=media_type,
        original_width=width,
        original_height=height,
    )
    return PreparedImage(content=content, facts=facts)


def _check_pixels(image: Image.Image, path: str) -> None:
    width, height = image.size
    if width * height > MAX_SOURCE_PIXELS:
        raise _too_many_pixels(path, f"it has {width} x {height} = {width * height:,}")


def _too_many_pixels(path: str, detail: str) -> ResourceExhaustedError:
    message = f"file {path!r} has too many pixels: {detail}; at most {MAX_SOURCE_PIXELS:,} are decoded"
    return ResourceExhaustedError(message, reason="IMAGE_TOO_MANY_PIXELS")


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 where the metadata are missing or nonsense."""
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    # As in `prepare_image`; damaged metadata do not spoil the picture.
    except Exception:
        return 1
    return orientation if orientation in _TRANSPOSITIONS else 1


def _plain(image: Image.Image) -> Image.Image:
    """Return the picture as grey, RGB or RGBA with 8 bits a channel, without metadata."""
    if image.mode in ("RGB", "RGBA", "L"):
        plain = image.convert("RGBA") if "transparency" in image.info else image.copy()
    elif image.mode.startswith("I;16"):
        plain = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    elif image.mode in ("I", "F"):
        plain = _stretch(image)
    elif image.has_transparency_data:
        plain = image.convert("RGBA")
    else:
        plain = image.convert("L" if image.mode == "1" else "RGB")
    plain.info = {}
    return plain


def _stretch(image: Image.Image) -> Image.Image:
    """Map the values of a picture of unknown range to 0..255."""
    levels = image.convert("F")
    lowest, highest = levels.getextrema()
    # Two pairs are given only for pictures of several bands.
    assert not isinstance(lowest, tuple) and not isinstance(highest, tuple)
    span = highest - lowest
    factor = 255 / span if 0 < span < float("inf") else 0.0
    return levels.point(lambda value: value * factor - lowest * factor).convert("L")


def _scale(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)


def _encode(image: Image.Image, media_type: str, request: ImageRequest) -> tuple[bytes, str, tuple[int, int]]:
    """Return the first form that fits into the bytes, best first, with its type and size in pixels."""
    smallest = 0
    for candidate, result_type, size in _forms(image, media_type):
        if len(candidate) <= request.max_bytes:
            return candidate, result_type, size
        smallest = len(candidate)
    raise ResourceExhaustedError(
        f"file {request.path!r} can't be made small enough: {smallest:,} bytes in its smallest form, "
        f"{smallest - request.max_bytes:,} too many",
        reason="IMAGE_TOO_LARGE",
    )


def _forms(image: Image.Image, media_type: str) -> Iterator[tuple[bytes, str, tuple[int, int]]]:
    if media_type != JPEG:
        yield _save(image, "PNG"), PNG, image.size
    opaque = _opaque(image)
    for quality in _JPEG_QUALITIES:
        yield _save(opaque, "JPEG", quality=quality), JPEG, opaque.size
    for _ in range(_SHRINK_ROUNDS):
        size = (max(1, round(opaque.width * _SHRINK_FACTOR)), max(1, round(opaque.height * _SHRINK_FACTOR)))
        opaque = _scale(opaque, size)
        yield _save(opaque, "JPEG", quality=_SHRINK_QUALITY), JPEG, size


def _opaque(image: Image.Image) -> Image.Image:
    """Return a picture without transparency, on white."""
    if image.mode != "RGBA":
        return image
    ground = Image.new("RGB", image.size, "white")
    ground.paste(image, mask=image.getchannel("A"))
    return ground


def _save(image: Image.Image, form: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
