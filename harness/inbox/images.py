"""Recognises images by their content. Pure; reads headers only and decodes nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_JPEG_START = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"
# Start-of-frame markers; C4, C8 and CC lie in the range and mean something else.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD9)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What an image's header says."""

    media_type: str
    """image/png, image/jpeg, image/gif or image/webp."""

    width: int
    """Pixels, before any EXIF orientation; 0 where the image is damaged."""

    height: int
    """Pixels, before any EXIF orientation; 0 where the image is damaged."""

    @property
    def is_damaged(self) -> bool:
        """Whether the header cannot be read, or the image ends before its end marker."""
        return self.width == 0 or self.height == 0


def recognise_image(data: bytes) -> ImageFacts | None:
    """Return the type and size of an encoded image, or None where it is none of the types that models take.

    A provider answers a damaged image with an error for the whole request, so what is evidently cut off is told here.
    """
    reader = _reader(data)
    if reader is None:
        return None
    media_type, measure = reader
    try:
        width, height = measure(data)
    except (struct.error, IndexError):
        width, height = 0, 0
    return ImageFacts(media_type=media_type, width=width, height=height)


def _reader(data: bytes) -> tuple[str, Callable[[bytes], tuple[int, int]]] | None:
    if data.startswith(_PNG_SIGNATURE):
        return "image/png", _measure_png
    if data.startswith(_JPEG_START):
        return "image/jpeg", _measure_jpeg
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif", _measure_gif
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp", _measure_webp
    return None


def _measure_png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        return 0, 0
    width, height = struct.unpack_from(">II", data, 16)
    position = len(_PNG_SIGNATURE)
    while True:
        length, kind = struct.unpack_from(">I4s", data, position)
        position += 12 + length
        if position > len(data):
            return 0, 0
        if kind == b"IEND":
            return width, height


def _measure_jpeg(data: bytes) -> tuple[int, int]:
    if data.rfind(_JPEG_END) < 0:
        return 0, 0
    position = 2
    while True:
        if data[position] != 0xFF:
            return 0, 0
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1
        elif marker in _JPEG_BARE_MARKERS:
            position += 2
        elif marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 5)
            return width, height
        else:
            (length,) = struct.unpack_from(">H", data, position + 2)
            if length < 2:
                return 0, 0
            position += 2 + length


def _measure_gif(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    # The last block's terminator and the trailer; some writers leave bytes behind it.
    is_complete = b"\x00\x3b" in data
    return (width, height) if is_complete else (0, 0)


def _measure_webp(data: bytes) -> tuple[int, int]:
    (riff_bytes,) = struct.unpack_from("<I", data, 4)
    if riff_bytes + 8 > len(data):
        return 0, 0
    match data[12:16]:
        case b"VP8X":
            return _uint24(data, 24) + 1, _uint24(data, 27) + 1
        case b"VP8L" if data[20] == 0x2F:
            (bits,) = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    return 0, 0


def _uint24(data: bytes, position: int) -> int:
    low, high = struct.unpack_from("<HB", data, position)
    return int(low) | int(high) << 16
