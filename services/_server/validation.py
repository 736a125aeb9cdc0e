"""Bounds of requests that hold for every service: size, decodability, known fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import Message

from harness.errors import InvalidArgumentError, ResourceExhaustedError
from harness.primitives.messages import find_unknown_field, find_unset_choice

MIB: Final = 1024 * 1024

DEFAULT_REQUEST_BYTES: Final = 4 * MIB
"""Bound of a request, or of one message of a stream, where its method has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRules:
    """What a service says about its methods. Keys are RPC names, for example "Commit"."""

    max_request_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bounds that differ from `DEFAULT_REQUEST_BYTES`; per message for a stream."""

    strict: frozenset[str] = frozenset()
    """Methods that change something and whose implementation does not look for unknown fields itself."""

    endless: frozenset[str] = frozenset()
    """Streams of answers that the caller resumes from a cursor: a draining server ends them at once."""

    conversations: frozenset[str] = frozenset()
    """Two-way streams: a draining server ends the requests, and the handler answers what it has and returns."""


def check_size(size_bytes: int, max_bytes: int, method: str) -> None:
    """Refuse a message that is too large, before it is decoded: MESSAGE_TOO_LARGE."""
    if size_bytes > max_bytes:
        raise ResourceExhaustedError(
            f"{method} takes messages of at most {max_bytes} bytes, got {size_bytes}",
            reason="MESSAGE_TOO_LARGE",
            metadata={"max_bytes": str(max_bytes), "size_bytes": str(size_bytes)},
        )


def check_fields_known(message: Message) -> None:
    """Refuse a request with a field or enum value that this release does not know, or an unset oneof: UNKNOWN_FIELDS.

    Such a request asks for something that would silently not be done.
    """
    path = find_unknown_field(message) or find_unset_choice(message)
    if path is not None:
        raise InvalidArgumentError(
            f"the request has {path}, which this release does not know or which must be set",
            reason="UNKNOWN_FIELDS",
            metadata={"field": path},
        )


def undecodable(method: str) -> InvalidArgumentError:
    """Return the error for bytes that are no message of the method's type, or are nested too deeply."""
    return InvalidArgumentError(
        f"the request of {method} cannot be decoded; it is no message of its type, or is nested too deeply",
        reason="UNDECODABLE_REQUEST",
    )
