"""The one table between the library's errors and `google.rpc.Status`, for servers and clients alike.

An error travels as a code, an `ErrorInfo` (domain "unreal-agent", the stable reason, metadata), a `BadRequest`
violation where an argument is at fault and a `RetryInfo` where waiting helps. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from harness.errors import (
    AlreadyExistsError,
    ConflictError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    HarnessError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)

ERROR_DOMAIN: Final = "unreal-agent"

STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"
"""Trailer that carries the serialised status; its meaning is fixed by gRPC."""

CONNECTION_LOST: Final = "CONNECTION_LOST"
"""Reason where nobody answered or the peer went away: whether the call had an effect is unknown."""

DRAINING: Final = "DRAINING"
"""Reason where a server that stops ended a call; what it did is unknown, except that nothing new is begun."""

MESSAGE_TOO_LARGE: Final = "MESSAGE_TOO_LARGE"

SERVER_BUSY: Final = "SERVER_BUSY"
"""Reason where a server has too much in hand; nothing was done."""

# gRPC refuses trailers over 8 KiB, and the message goes twice: once percent-encoded, once in the details.
_MAX_MESSAGE_CHARS: Final = 512
_MAX_METADATA_BYTES: Final = 2048

_SIGNS_OF_A_LOST_PEER: Final = ("RST_STREAM", "Stream removed", "Internal error from Core")

_UNSUPPORTED_PREFIX: Final = "UNSUPPORTED_"

# UnsupportedError shares a code with its base class and is told apart by its reason.
_MAX_RETRY_AFTER_S: Final = 365 * 86_400.0

_CLASS_OF_CODE: Final[Mapping[str, type[HarnessError]]] = {
    error_class.code: error_class
    for error_class in (
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        FailedPreconditionError,
        ConflictError,
        OutOfRangeError,
        ResourceExhaustedError,
        UnauthenticatedError,
        PermissionDeniedError,
        UnavailableError,
        DeadlineExceededError,
        DataLossError,
    )
}


def to_status(error: BaseException, *, request_id: str = "") -> status_pb2.Status:
    """Return what a caller is told of an error.

    An error that is none of ours is a bug: its text may hold anything, so the caller gets "internal error" and the
    request's ID, by which the log tells the rest.
    """
    if isinstance(error, HarnessError):
        return _status_of(error)
    if isinstance(error, TimeoutError):
        return _status_of(DeadlineExceededError("a limit of the server ran out", reason="DEADLINE_EXCEEDED"))
    metadata = {"request_id": request_id} if request_id else {}
    message = f"internal error (request {request_id})" if request_id else "internal error"
    return _status_of(HarnessError(message, reason="INTERNAL", metadata=metadata))


def from_status(status: status_pb2.Status) -> HarnessError:
    """Return the error that a status tells of; one without our details is told by its code."""
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else "UNKNOWN"
    error_info: Any = error_details_pb2.ErrorInfo()
    retry_info: Any = error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    reason, metadata = code, {}
    for detail in status.details:
        if _is_unpacked(detail, error_info) and error_info.domain == ERROR_DOMAIN:
            reason, metadata = error_info.reason or code, dict(error_info.metadata)
        elif _is_unpacked(detail, retry_info):
            wait_s = retry_info.retry_delay.seconds + retry_info.retry_delay.nanos / 1e9
            retry_after_s = min(max(0.0, wait_s), _MAX_RETRY_AFTER_S)
    error_class = _CLASS_OF_CODE.get(code, HarnessError)
    if error_class is FailedPreconditionError and reason.startswith(_UNSUPPORTED_PREFIX):
        error_class = UnsupportedError
    return error_class(status.message, reason=reason, metadata=metadata, retry_after_s=retry_after_s)


def _is_unpacked(detail: Any, message: Any) -> bool:
    """Return whether a detail is of a message's type, and now in it; one that can't be decoded tells nothing."""
    try:
        return bool(detail.Is(message.DESCRIPTOR) and detail.Unpack(message))
    except DecodeError:
        return False


def from_rpc_error(error: grpc.aio.AioRpcError) -> HarnessError:
    """Return the error that a failed call tells of, whether our server, gRPC or the network ended it."""
    details = _details_of(error)
    if details is not None:
        return from_status(details)
    return _error_of_transport(error.code(), error.details() or error.code().name.lower())


def trailers_of(status: status_pb2.Status) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata by which a server sends a status."""
    return ((STATUS_DETAILS_KEY, status.SerializeToString()),)


def grpc_code(status: status_pb2.Status) -> grpc.StatusCode:
    """Return gRPC's code of a status."""
    code: grpc.StatusCode = grpc.StatusCode[code_pb2.Code.Name(status.code)]
    return code


def _status_of(error: HarnessError) -> status_pb2.Status:
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=_clip(error.message, _MAX_MESSAGE_CHARS))
    metadata = _bounded(error.metadata)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata))
    if isinstance(error, InvalidArgumentError) and "field" in metadata:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=metadata["field"], description=_clip(error.message, _MAX_MESSAGE_CHARS)
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry_info = error_details_pb2.RetryInfo()
        retry_info.retry_delay.FromMicroseconds(round(error.retry_after_s * 1e6))
        status.details.add().Pack(retry_info)
    return status


def _bounded(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return metadata that fits into a trailer: long values are cut, what has no room is left out."""
    room = _MAX_METADATA_BYTES
    bounded: dict[str, str] = {}
    for key, value in metadata.items():
        clipped = _clip(value, _MAX_MESSAGE_CHARS)
        room -= len(key.encode()) + len(clipped.encode())
        if room < 0:
            break
        bounded[key] = clipped
    return bounded


def _clip(text: str, max_chars: int) -> str:
    # A lone surrogate can't be encoded; what a message shows of a bad value may hold one.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def _details_of(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except DecodeError:
                return None
            return status
    return None


def _error_of_transport(code: grpc.StatusCode, text: str) -> HarnessError:
    text = _clip(text, _MAX_MESSAGE_CHARS)
    if _is_lost_connection(code, text):
        return UnavailableError(f"the connection failed: {text}", reason=CONNECTION_LOST)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError("no answer came in time", reason="DEADLINE_EXCEEDED")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in text.lower():
        return ResourceExhaustedError(f"a message is too large: {text}", reason=MESSAGE_TOO_LARGE)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UnsupportedError(f"the server does not know the call: {text}", reason="UNSUPPORTED_CALL")
    return _CLASS_OF_CODE.get(code.name, HarnessError)(text, reason=code.name)


def _is_lost_connection(code: grpc.StatusCode, text: str) -> bool:
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return True
    # How a peer dies decides what gRPC makes of it: a reset or removed stream, or a write that meets its end, is no
    # answer of the server's.
    is_unclear = code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    return is_unclear and any(sign in text for sign in _SIGNS_OF_A_LOST_PEER)
