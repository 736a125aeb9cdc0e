"""What a prepared image is: requests, results, limits, and the type of a file by its content.

Pure; decodes nothing and imports no image library. `image_preparation` decodes, in a process of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.errors import FailedPreconditionError

MAX_SOURCE_BYTES = 64 * 1024 * 1024
MAX_SOURCE_PIXELS = 32_000_000

DEFAULT_MAX_WIDTH = 2_000
DEFAULT_MAX_HEIGHT = 2_000
DEFAULT_MAX_BYTES = 3_750_000
"""5,000,000 characters in base64, which every provider takes."""

MAX_SIDE = 8_000
"""The largest side that a request may ask for: the largest that any provider takes."""

MAX_RESULT_BYTES = 16 * 1024 * 1024

PNG = "image/png"
JPEG = "image/jpeg"
WEBP = "image/webp"
BMP = "image/bmp"
TIFF = "image/tiff"
GIF = "image/gif"

_SUPPORTED = "PNG, JPEG, WebP, BMP, TIFF and GIF can be shown"

_SIGNATURES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), PNG),
    (re.compile(rb"\xff\xd8\xff"), JPEG),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), WEBP),
    (re.compile(rb"GIF8[79]a"), GIF),
    (re.compile(rb"II[*+]\0|MM\0[*+]"), TIFF),
    # The size of the second header keeps texts that begin with "BM" apart.
    (re.compile(rb"BM.{12}[\x0c\x10\x28\x34\x38\x40\x6c\x7c]\0\0\0", re.DOTALL), BMP),
)

# Read in order; the words complete "the file is …".
_REFUSED = (
    (re.compile(rb"....ftyp(?:avif|avis)", re.DOTALL), "an AVIF image"),
    (re.compile(rb"....ftyp(?:hei|hev|mif1|msf1)", re.DOTALL), "a HEIC image"),
    (re.compile(rb"....ftyp", re.DOTALL), "a video"),
    (re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "), "a JPEG XL image"),
    (re.compile(rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51"), "a JPEG 2000 image"),
    (re.compile(rb"\0\0[\x01\x02]\0"), "an icon"),
    (re.compile(rb"8BPS"), "a Photoshop document"),
    (re.compile(rb"%PDF-"), "a PDF document"),
    (re.compile(rb"%!PS"), "a PostScript document"),
    (re.compile(rb"PK\x03\x04"), "a ZIP archive"),
    (re.compile(rb"\x1f\x8b"), "compressed with gzip"),
)
_SVG = re.compile(rb"<svg[\s>]", re.IGNORECASE)
_HTML = re.compile(rb"<!doctype html|<html[\s>]|<head[\s>]|<body[\s>]", re.IGNORECASE)
_BINARY = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """Which file to prepare, and how large the result may be."""

    workspace: str
    """Absolute path of the directory that `path` is confined to."""

    path: str
    """Relative to the workspace, or absolute."""

    max_width: int = DEFAULT_MAX_WIDTH
    """Pixels, 1 to `MAX_SIDE`."""

    max_height: int = DEFAULT_MAX_HEIGHT
    """Pixels, 1 to `MAX_SIDE`."""

    max_bytes: int = DEFAULT_MAX_BYTES
    """1 to `MAX_RESULT_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What became of an image."""

    media_type: str
    """Of the result: image/png, image/jpeg or image/webp."""

    width: int
    height: int
    original_media_type: str
    original_width: int
    """Pixels, after the orientation that its metadata ask for."""

    original_height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImage:
    """An image that fits."""

    content: bytes
    facts: ImageFacts


def detect_media_type(source: bytes, path: str) -> str:
    """Return the media type that a file's first bytes show, whatever its name is.

    Raises:
        FailedPreconditionError: IMAGE_UNSUPPORTED, saying what the file is.
    """
    for signature, media_type in _SIGNATURES:
        if signature.match(source):
            return media_type
    message = f"file {path!r} is {_describe(source[:_HEAD_BYTES])}, which can't be shown as an image; {_SUPPORTED}"
    raise FailedPreconditionError(message, reason="IMAGE_UNSUPPORTED")


def _describe(head: bytes) -> str:
    for signature, words in _REFUSED:
        if signature.match(head):
            return words
    if _BINARY.search(head):
        return "of an unknown binary format"
    if _SVG.search(head):
        return "an SVG drawing (text)"
    if _HTML.search(head):
        return "an HTML page (text)"
    return "a text"


def fit(width: int, height: int, max_width: int, max_height: int) -> tuple[int, int]:
    """Return the largest size of the same shape that fits; never larger than given, never below one pixel."""
    scale = min(1.0, max_width / width, max_height / height)
    return max(1, min(max_width, round(width * scale))), max(1, min(max_height, round(height * scale)))
