"""Requests with one hostile value in each field of each message that a service takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

STRINGS = ("", "x" * 10_000, "nul\0in it", "line\nbreak", "../../etc/passwd", "/", "s1\u202e\u2028", "%s%n{0}")
BYTES = (b"", b"\xff\x00\xfe", b"PNG" * 1000)
_MAX_DEPTH = 6

_EXTREMES: dict[int, tuple[int | float, ...]] = {
    FieldDescriptor.TYPE_INT32: (-1, 2**31 - 1, -(2**31)),
    FieldDescriptor.TYPE_INT64: (-1, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_UINT32: (1, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (1, 2**63, 2**64 - 1),
}


def hostile_requests(make: Callable[[], Message], *, most: int) -> Iterator[tuple[str, Message]]:
    """Yield requests with the path and value of what is hostile in each.

    Args:
        make: Returns a fresh sound request.
        most: Values for each field at most; where there are more, neighbouring fields get different ones.
    """
    for index, path in enumerate(_leaves(type(make()).DESCRIPTOR, ())):
        values = _values(path[-1])
        for number in range(min(most, len(values))):
            value = values[(index + number * 3) % len(values)] if most < len(values) else values[number]
            request = make()
            _set(request, path, value)
            yield f"{'.'.join(field.name for field in path)}={str(value)[:20]!r}", request


def _leaves(message_type: Any, path: tuple[FieldDescriptor, ...]) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in message_type.fields:
        below = field.message_type
        if below is None:
            yield (*path, field)
        elif not below.GetOptions().map_entry and len(path) < _MAX_DEPTH:
            yield from _leaves(below, (*path, field))


def _values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.type == FieldDescriptor.TYPE_STRING:
        return STRINGS
    if field.type == FieldDescriptor.TYPE_BYTES:
        return BYTES
    if field.type == FieldDescriptor.TYPE_ENUM:
        return (0, 99, -1)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return (True,)
    return _EXTREMES[field.type]


def _set(message: Any, path: tuple[FieldDescriptor, ...], value: Any) -> None:
    for field, below in pairwise(path):
        part = getattr(message, field.name)
        if field.is_repeated:
            message = _element_with(part, below) or part.add()
        else:
            part.SetInParent()
            message = part
    if path[-1].is_repeated:
        getattr(message, path[-1].name).append(value)
    else:
        setattr(message, path[-1].name, value)


def _element_with(elements: Iterable[Any], field: FieldDescriptor) -> Any:
    """Return the first element in which a field is set already, or None."""
    return next((one for one in elements if any(known.name == field.name for known, _ in one.ListFields())), None)
