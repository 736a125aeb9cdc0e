"""Looks at protobuf messages of any type. Pure; never changes a message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet


def find_unknown_field(message: Message) -> str | None:
    """Return the path of the first field that this release does not know, or None.

    The path ends in the field's number, for example "content.parts[2].17".
    """
    # Discarding and measuring run in C: a message without unknown fields costs a copy, not a walk in Python.
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if known.ByteSize() == message.ByteSize():
        return None
    return _walk_to_unknown_field(message)


def find_unset_choice(message: Message) -> str | None:
    """Return the path of the first oneof that is unset or enum value that this release does not know, or None.

    Every oneof of the schemas says that exactly one of its fields must be set. Proto3 keeps an unknown enum number in
    its field, where `find_unknown_field` does not see it. Whether an enum may be 0, the caller knows.
    """
    shape = _shape(message.DESCRIPTOR)
    for name in shape.oneofs:
        if message.WhichOneof(name) is None:
            return name
    for name, numbers, is_repeated in shape.enums:
        value = getattr(message, name)
        if any(number not in numbers for number in (value if is_repeated else (value,))):
            return name
    if shape.has_choices_below:
        for path, part in _submessages(message):
            found = find_unset_choice(part)
            if found is not None:
                return f"{path}.{found}"
    return None


def find_messages(message: Message, wanted: Descriptor) -> Iterator[Message]:
    """Yield every message of one type inside a message, itself included, in the order of the fields' numbers."""
    if message.DESCRIPTOR is wanted:
        yield message
    if wanted.full_name in _types_below(message.DESCRIPTOR):
        for _, part in _submessages(message):
            yield from find_messages(part, wanted)


def _walk_to_unknown_field(message: Message) -> str | None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return str(unknown[0].field_number)
    for path, part in _submessages(message):
        found = _walk_to_unknown_field(part)
        if found is not None:
            return f"{path}.{found}"
    return None


def _submessages(message: Message) -> Iterator[tuple[str, Message]]:
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for key in sorted(value):
                    yield f"{field.name}[{key!r}]", value[key]
        elif field.is_repeated:
            for index, element in enumerate(value):
                yield f"{field.name}[{index}]", element
        else:
            yield field.name, value


@dataclass(frozen=True, slots=True)
class _Shape:
    """What of a message type can be unset or unknown."""

    oneofs: tuple[str, ...]
    enums: tuple[tuple[str, frozenset[int], bool], ...]
    has_choices_below: bool


@cache
def _shape(descriptor: Descriptor) -> _Shape:
    return _Shape(
        oneofs=tuple(oneof.name for oneof in descriptor.oneofs if not _is_optional_field(oneof)),
        enums=tuple(
            (field.name, frozenset(field.enum_type.values_by_number), field.is_repeated)
            for field in descriptor.fields
            if field.enum_type is not None
        ),
        has_choices_below=any(_has_choices(below) for below in _descriptors_below(descriptor).values()),
    )


def _has_choices(descriptor: Descriptor) -> bool:
    is_chosen = any(not _is_optional_field(oneof) for oneof in descriptor.oneofs)
    return is_chosen or any(field.type == FieldDescriptor.TYPE_ENUM for field in descriptor.fields)


def _is_optional_field(oneof: OneofDescriptor) -> bool:
    """Return whether a oneof only stands for proto3's `optional`."""
    return len(oneof.fields) == 1 and oneof.name == f"_{oneof.fields[0].name}"


@cache
def _types_below(descriptor: Descriptor) -> frozenset[str]:
    return frozenset(_descriptors_below(descriptor))


def _descriptors_below(descriptor: Descriptor) -> dict[str, Descriptor]:
    found: dict[str, Descriptor] = {}
    waiting = [descriptor]
    while waiting:
        for field in waiting.pop().fields:
            below = field.message_type
            if below is not None and below.full_name not in found:
                found[below.full_name] = below
                waiting.append(below)
    return found
