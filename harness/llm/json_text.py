"""JSON as text: deterministic writing, strict reading, and slices of the original text. Pure.

Providers refuse a request in which a reasoning item changed by one byte, and a prompt cache misses when a body does;
so what is sent is written the same way each time, and what must go back unchanged is cut out of the text received.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

_SPACE = " \t\n\r"
_SURROGATE = re.compile("[\ud800-\udfff]")


class JSONTextError(ValueError):
    """Raised when a text is not JSON; the message names the place, never the content."""


def _refuse_constant(name: str) -> object:
    raise JSONTextError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        # It could not be written again.
        raise JSONTextError("a number is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def write(value: object) -> str:
    """Return compact JSON; equal values whose members stand in the same order give the same text."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def read(text: str) -> object:
    """Return the value of a JSON text.

    Raises:
        JSONTextError: It is not JSON, or nested too deeply, or holds a number that cannot be read.
    """
    try:
        start = _skip_space(text, 0)
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as err:
        raise JSONTextError(f"{err.msg} at character {err.pos}") from None
    except (RecursionError, ValueError) as err:
        raise JSONTextError(str(err) if isinstance(err, JSONTextError) else "too deep, or a number too long") from None
    end = _skip_space(text, end)
    if end != len(text):
        raise JSONTextError(f"Extra data at character {end}")
    return value


def read_object(text: str) -> dict[str, object] | None:
    """Return the members of a JSON object, or None where the text is anything else."""
    try:
        value = read(text)
    except JSONTextError:
        return None
    return value if isinstance(value, dict) else None


def member(text: str, name: str) -> str | None:
    """Return the exact text of a member's value of the object that `text` is, the last one of that name."""
    found: str | None = None
    if not text.lstrip(_SPACE).startswith("{"):
        return None
    for key, start, end in _members(text):
        if key == name:
            found = text[start:end]
    return found


def elements(text: str) -> list[str]:
    """Return the exact text of each element of the array that `text` is."""
    place = _skip_space(text, 0)
    if not text.startswith("[", place):
        return []
    place = _skip_space(text, place + 1)
    found: list[str] = []
    while not text.startswith("]", place):
        _, end = _DECODER.raw_decode(text, place)
        found.append(text[place:end])
        place = _skip_space(text, end)
        if text.startswith(",", place):
            place = _skip_space(text, place + 1)
    return found


def valid_text(text: str) -> str:
    """Return `text` with surrogate pairs joined and lone surrogates replaced, so that it can be stored as UTF-8.

    A provider may cut its text inside a pair: join the pieces first.
    """
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _members(text: str) -> Iterator[tuple[str, int, int]]:
    place = _skip_space(text, _skip_space(text, 0) + 1)
    while not text.startswith("}", place):
        key, place = _DECODER.raw_decode(text, place)
        start = _skip_space(text, _skip_space(text, place) + 1)
        _, place = _DECODER.raw_decode(text, start)
        yield key, start, place
        place = _skip_space(text, place)
        if text.startswith(",", place):
            place = _skip_space(text, place + 1)


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in _SPACE:
        place += 1
    return place
