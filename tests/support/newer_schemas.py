"""The schemas of a release to come, made at run time: every message has a field more, and so has every enum a value.

Two releases can't share the default descriptor pool of one process, so the newer one has a pool of its own. Its
messages are made and read like any other, by their full names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.message import Message

from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.gateway.v1 import operation_manager_gateway_service_pb2 as gateway_pb2

NEW_FIELD = "novelty"
NEW_FIELD_NUMBER = 900
NEW_VALUE_NUMBER = 900
_OURS = "unreal_agent/"


class NewerSchemas:
    """Message types of the release to come."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in _with_dependencies([coordinator_pb2.DESCRIPTOR, gateway_pb2.DESCRIPTOR]):
            schema = _copy(file)
            if file.name.startswith(_OURS):
                for message in schema.message_type:
                    _extend_message(message)
                for enum in schema.enum_type:
                    _extend_enum(enum)
            self._pool.Add(schema)

    def type(self, full_name: str) -> type[Message]:
        """Return a message type, for example "unreal_agent.session.v1.Input"."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(full_name))

    def newer(self, message: Message) -> Message:
        """Return a message of the present release as one of the newer."""
        return self.type(message.DESCRIPTOR.full_name).FromString(message.SerializeToString())

    def adorned(self, message: Message, *, but: Iterable[str] = ()) -> Message:
        """Return it with the new field set in each message that it holds, all but those of some types and below."""
        newer = self.newer(message)
        for part in messages_in(newer, but):
            setattr(part, NEW_FIELD, "new")
        return newer


def messages_in(message: Message, but: Iterable[str] = ()) -> Iterator[Message]:
    """Yield a message of ours and those in it, all but those of some types (by full name) and below."""
    name = message.DESCRIPTOR.full_name
    if not name.startswith("unreal_agent.") or name in but:
        return
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                yield from messages_in(part, but)


def _with_dependencies(files: Iterable[FileDescriptor]) -> Iterable[FileDescriptor]:
    """Return files behind what they import, each once."""
    found: dict[str, FileDescriptor] = {}
    for file in files:
        for one in (*_with_dependencies(file.dependencies), file):
            found.setdefault(one.name, one)
    return found.values()


def _copy(file: FileDescriptor) -> FileDescriptorProto:
    schema = FileDescriptorProto()
    file.CopyToProto(schema)
    return schema


def _extend_message(message: DescriptorProto) -> None:
    if message.options.map_entry:
        return
    message.field.add(
        name=NEW_FIELD,
        number=NEW_FIELD_NUMBER,
        type=FieldDescriptorProto.TYPE_STRING,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )
    for nested in message.nested_type:
        _extend_message(nested)
    for enum in message.enum_type:
        _extend_enum(enum)


def _extend_enum(enum: EnumDescriptorProto) -> None:
    prefix = enum.value[0].name.removesuffix("UNSPECIFIED")
    enum.value.add(name=f"{prefix}NOVELTY", number=NEW_VALUE_NUMBER)
