"""Stored records: which versions are read, how older ones become current, and what is said of one that can't be read.

Pure. Up-casters of items and operations belong here: a record that has passed through is in the current version.
"""

from __future__ import annotations

from typing import TypedDict, TypeVar

from google.protobuf.message import DecodeError, Message

from harness.errors import DataLossError, FailedPreconditionError, InvalidArgumentError, UnsupportedError
from harness.primitives.messages import find_unknown_field, find_unset_choice
from harness.session_store.session_store import (
    INPUT_SCHEMA_VERSION,
    ITEM_SCHEMA_VERSION,
    OPERATION_SCHEMA_VERSION,
)
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

MessageT = TypeVar("MessageT", bound=Message)


def decode_item(record: bytes, place: str) -> item_pb2.Item:
    """Return a stored item in the current version.

    Args:
        record: The serialised item.
        place: Where it lies, for people: "item 7 of session 'a'".

    Raises:
        DataLossError: RECORD_CORRUPT.
        UnsupportedError: UNSUPPORTED_ITEM_VERSION, UNSUPPORTED_INPUT_VERSION.
        FailedPreconditionError: UNKNOWN_FIELDS; a later release wrote it.
    """
    item = _parse(item_pb2.Item, record, place)
    check_item_version(item, place)
    _check_known(item, record, place)
    if item.WhichOneof("item") is None:
        raise FailedPreconditionError(**_unknown_fields(place, "item"))
    return item


def decode_operation(record: bytes, place: str) -> operation_pb2.Operation:
    """Return a stored operation in the current version; raises as `decode_item` does."""
    operation = _parse(operation_pb2.Operation, record, place)
    check_operation_version(operation, place)
    _check_known(operation, record, place)
    if operation.WhichOneof("state") is None:
        raise FailedPreconditionError(**_unknown_fields(place, "state"))
    return operation


def check_stored_item(item: item_pb2.Item, place: str) -> None:
    """Check an item that came decoded, from a store elsewhere; raises as `decode_item` does."""
    check_item_version(item, place)
    _check_whole(item, item.WhichOneof("item"), "item", place)


def check_stored_operation(operation: operation_pb2.Operation, place: str) -> None:
    """Check an operation that came decoded, from a store elsewhere; raises as `decode_item` does."""
    check_operation_version(operation, place)
    _check_whole(operation, operation.WhichOneof("state"), "state", place)


def decode(message_type: type[MessageT], record: bytes, place: str) -> MessageT:
    """Return a stored message that has no version of its own; raises as `decode_item` does."""
    message = _parse(message_type, record, place)
    _check_known(message, record, place)
    return message


def check_item_version(item: item_pb2.Item, place: str) -> None:
    """Refuse an item, or an input in it, of a version that this release does not know."""
    _check_version("ITEM", item.schema_version, ITEM_SCHEMA_VERSION, place)
    if item.HasField("input"):
        _check_version("INPUT", item.input.schema_version, INPUT_SCHEMA_VERSION, place)


def check_operation_version(operation: operation_pb2.Operation, place: str) -> None:
    """Refuse an operation of a version that this release does not know."""
    _check_version("OPERATION", operation.schema_version, OPERATION_SCHEMA_VERSION, place)


def check_fields_known(message: Message, place: str) -> None:
    """Refuse a message with unknown fields, unknown enum values or an unset oneof: UNKNOWN_FIELDS."""
    path = find_unknown_field(message) or find_unset_choice(message)
    if path is not None:
        raise InvalidArgumentError(**_unknown_fields(place, path))


def _parse(message_type: type[MessageT], record: bytes, place: str) -> MessageT:
    message = message_type()
    try:
        message.ParseFromString(record)
    except DecodeError as err:
        raise DataLossError(
            f"{place} cannot be decoded: {err}", reason="RECORD_CORRUPT", metadata={"place": place}
        ) from err
    return message


def _check_known(message: Message, record: bytes, place: str) -> None:
    # A record is read far more often than written, so the walk is left to records whose size looks odd.
    message.DiscardUnknownFields()
    if message.ByteSize() != len(record):
        original = type(message).FromString(record)
        path = find_unknown_field(original)
        if path is not None:
            raise FailedPreconditionError(**_unknown_fields(place, path))


def _check_whole(message: Message, chosen: str | None, oneof: str, place: str) -> None:
    path = find_unknown_field(message) or (None if chosen else oneof)
    if path is not None:
        raise FailedPreconditionError(**_unknown_fields(place, path))


def _check_version(kind: str, found: int, supported: int, place: str) -> None:
    if not 1 <= found <= supported:
        raise UnsupportedError(
            f"{place} has {kind.lower()} version {found}; this release reads 1 to {supported}",
            reason=f"UNSUPPORTED_{kind}_VERSION",
            metadata={"place": place, "found": str(found), "supported": str(supported)},
        )


class _ErrorFacts(TypedDict):
    message: str
    reason: str
    metadata: dict[str, str]


def _unknown_fields(place: str, path: str) -> _ErrorFacts:
    return _ErrorFacts(
        message=f"{place} has a field that is unknown to this release or a choice that is not made: {path}",
        reason="UNKNOWN_FIELDS",
        metadata={"place": place, "field": path},
    )
