"""Looks at protobuf messages of any type. Pure; never changes a message."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet


def find_unknown_field(message: Message) -> str | None:
    """Return the path of the first field that this release does not know, or None.

    The path ends in the field's number, for example "content.parts[2].17".
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return str(unknown[0].field_number)
    for path, part in _submessages(message):
        found = find_unknown_field(part)
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
