"""Checks of requests that hold whatever the state of the store is.

Pure; every failure is an `InvalidArgumentError` that names the field, or an `UnsupportedError` for a version. Every
engine calls these before it opens a transaction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NoReturn

from google.protobuf.timestamp_pb2 import Timestamp

from harness.errors import InvalidArgumentError, UnsupportedError
from harness.session_store import records
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

MAX_INTEGER: Final = 2**63 - 1
"""Largest number that both engines store; counters of the schemas are unsigned and could be larger."""

MAX_COMMIT_BYTES: Final = 32 * 1024 * 1024
MAX_BLOB_BYTES: Final = 64 * 1024 * 1024
"""A blob is held in memory once while it is stored; images and results are far smaller."""

MAX_INPUT_ID_CHARS: Final = 256
MAX_REQUEST_ID_CHARS: Final = 256
MAX_NAME_CHARS: Final = 256

_LAST_SECOND: Final = 253_402_300_799
_SESSION_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.-]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_OPERATION_TYPES: Final = frozenset(
    field.name for field in operation_pb2.Operation.DESCRIPTOR.oneofs_by_name["state"].fields
)
_KIND_OF_PAYLOAD: Final = {
    "content": item_pb2.INPUT_KIND_EXTERNAL,
    "control": item_pb2.INPUT_KIND_CONTROL,
    "crash": item_pb2.INPUT_KIND_CRASH,
}


def refuse(reason: str, field: str, problem: str) -> NoReturn:
    """Raise for a field of a request; `problem` follows the field's path in the message."""
    raise InvalidArgumentError(f"{field} {problem}", reason=reason, metadata={"field": field})


def check_session_id(session_id: str, field: str = "session_id") -> None:
    """Check a session's ID: INVALID_SESSION_ID. It is used as a path component elsewhere."""
    if not _SESSION_ID.fullmatch(session_id):
        refuse(
            "INVALID_SESSION_ID", field, f"must be 1 to 128 letters, digits, '-', '_' and '.', got {session_id[:140]!r}"
        )


def check_request_id(request_id: str, field: str) -> None:
    """Check an ID chosen by the caller: INVALID_REQUEST_ID."""
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS or _has_control_characters(request_id):
        problem = f"must be 1 to {MAX_REQUEST_ID_CHARS} characters without control characters"
        refuse("INVALID_REQUEST_ID", field, problem)


def check_incarnation(incarnation: session_pb2.Incarnation) -> None:
    """Check who asks for leases: INVALID_INCARNATION."""
    for name in ("name", "incarnation_id"):
        if not 1 <= len(getattr(incarnation, name)) <= MAX_NAME_CHARS:
            refuse("INVALID_INCARNATION", f"incarnation.{name}", f"must have 1 to {MAX_NAME_CHARS} characters")


def check_blob_ref(blob: llm_pb2.BlobRef, field: str) -> None:
    """Check a blob's address: INVALID_BLOB."""
    if not _DIGEST.fullmatch(blob.digest):
        refuse("INVALID_BLOB", f"{field}.digest", f"must be 64 lower-case hexadecimal digits, got {blob.digest[:80]!r}")
    if blob.size_bytes > MAX_BLOB_BYTES:
        refuse("INVALID_BLOB", f"{field}.size_bytes", f"must be at most {MAX_BLOB_BYTES}, got {blob.size_bytes}")


def check_integer(value: int, field: str) -> None:
    """Check that a counter can be stored: INVALID_NUMBER."""
    if value > MAX_INTEGER:
        refuse("INVALID_NUMBER", field, f"must be at most {MAX_INTEGER}, got {value}")


def check_timestamp(stamp: Timestamp, field: str) -> None:
    """Check that a time lies between 1970 and 9999, where all parts can compute with it: INVALID_TIME."""
    if not 0 <= stamp.seconds <= _LAST_SECOND or not 0 <= stamp.nanos < 1_000_000_000:
        refuse("INVALID_TIME", field, f"must be between 1970 and 9999, got {stamp.seconds} s and {stamp.nanos} ns")


def check_commit(request: store_pb2.CommitRequest) -> None:
    """Check a commit as far as its session is not needed.

    Raises:
        UnsupportedError: A version that this release does not know.
        InvalidArgumentError: UNKNOWN_FIELDS, INVALID_REQUEST_ID, INVALID_REST, INVALID_ITEM, INVALID_INPUT,
            INVALID_OPERATION, INVALID_BLOB, INVALID_NUMBER, INVALID_TIME, COMMIT_TOO_LARGE.
    """
    # Versions come first: what a later version adds would otherwise be reported as an unknown field.
    for index, item in enumerate(request.items):
        records.check_item_version(item, f"items[{index}]")
    for index, operation in enumerate(request.operations):
        records.check_operation_version(operation, f"operations[{index}]")
    records.check_fields_known(request, "the commit")
    check_request_id(request.commit_id, "commit_id")
    if request.ByteSize() > MAX_COMMIT_BYTES:
        refuse("COMMIT_TOO_LARGE", "the commit", f"must have at most {MAX_COMMIT_BYTES} bytes")
    check_integer(request.epoch, "epoch")
    check_integer(request.expected_sequence, "expected_sequence")
    check_rest(request.rest)
    for index, item in enumerate(request.items):
        check_item(item, f"items[{index}]")
    for index, operation in enumerate(request.operations):
        check_operation(operation, request.session_id, f"operations[{index}]")
    for index, blob in enumerate(request.blobs):
        check_blob_ref(blob, f"blobs[{index}]")


def check_rest(rest: session_pb2.Rest) -> None:
    """Check how a commit leaves its session: INVALID_REST."""
    if rest.state == session_pb2.REST_STATE_UNSPECIFIED:
        refuse("INVALID_REST", "rest.state", "must be set")
    if rest.session_state == session_pb2.SESSION_STATE_UNSPECIFIED:
        refuse("INVALID_REST", "rest.session_state", "must be set")
    if rest.state == session_pb2.REST_STATE_WAITING_UNTIL and not rest.HasField("wake_time"):
        refuse("INVALID_REST", "rest.wake_time", "must be set with REST_STATE_WAITING_UNTIL")
    check_timestamp(rest.wake_time, "rest.wake_time")


def check_item(item: item_pb2.Item, field: str) -> None:
    """Check one item: INVALID_ITEM, INVALID_INPUT."""
    match item.WhichOneof("item"):
        case "input":
            _check_input(item.input, f"{field}.input")
        case "turn":
            _check_turn(item.turn, f"{field}.turn")
        case "model_response":
            _check_response(item.model_response, f"{field}.model_response")
        case "tool_call_status":
            _check_status(item.tool_call_status, f"{field}.tool_call_status")
        case "turn_failure":
            if item.turn_failure.failure.error_class == llm_pb2.ERROR_CLASS_UNSPECIFIED:
                refuse("INVALID_ITEM", f"{field}.turn_failure.failure.error_class", "must be set")
        case "compaction" | "fork":
            pass
        case _:
            refuse("UNKNOWN_FIELDS", f"{field}.item", "must be set")


def _check_input(message: item_pb2.Input, field: str) -> None:
    if not 1 <= len(message.input_id) <= MAX_INPUT_ID_CHARS or _has_control_characters(message.input_id):
        problem = f"must be 1 to {MAX_INPUT_ID_CHARS} characters without control characters"
        refuse("INVALID_INPUT", f"{field}.input_id", problem)
    payload = message.WhichOneof("payload")
    if payload is None or message.kind != _KIND_OF_PAYLOAD[payload]:
        refuse("INVALID_INPUT", f"{field}.kind", f"must fit the payload {payload}, got {message.kind}")
    if payload == "content" and not message.content.parts:
        refuse("INVALID_INPUT", f"{field}.content.parts", "must hold at least one part")
    _check_parts_are_stored(message.content.parts, f"{field}.content.parts")


def _check_turn(turn: item_pb2.Turn, field: str) -> None:
    if not 1 <= len(turn.turn_id) <= MAX_NAME_CHARS:
        refuse("INVALID_ITEM", f"{field}.turn_id", f"must have 1 to {MAX_NAME_CHARS} characters")
    if turn.kind == item_pb2.TURN_KIND_UNSPECIFIED:
        refuse("INVALID_ITEM", f"{field}.kind", "must be set")


def _check_response(response: item_pb2.ModelResponse, field: str) -> None:
    if response.output.stop_reason == llm_pb2.STOP_REASON_UNSPECIFIED:
        refuse("INVALID_ITEM", f"{field}.output.stop_reason", "must be set")
    for index, output in enumerate(response.output.items):
        if output.WhichOneof("item") == "tool_call" and not 1 <= len(output.tool_call.call_id) <= MAX_NAME_CHARS:
            problem = f"must have 1 to {MAX_NAME_CHARS} characters"
            refuse("INVALID_ITEM", f"{field}.output.items[{index}].tool_call.call_id", problem)


def _check_status(status: item_pb2.ToolCallStatus, field: str) -> None:
    if len(set(status.operation_ids)) != len(status.operation_ids):
        refuse("INVALID_ITEM", f"{field}.operation_ids", "must not repeat an operation")
    if not status.HasField("result"):
        if not status.operation_ids:
            refuse("INVALID_ITEM", field, "must name operations or hold a result")
        return
    if status.result.outcome == item_pb2.CALL_OUTCOME_UNSPECIFIED:
        refuse("INVALID_ITEM", f"{field}.result.outcome", "must be set")
    if not status.result.parts:
        refuse("INVALID_ITEM", f"{field}.result.parts", "must hold at least one part")
    _check_parts_are_stored(status.result.parts, f"{field}.result.parts")


def _check_parts_are_stored(parts: Iterable[llm_pb2.ContentPart], field: str) -> None:
    for index, part in enumerate(parts):
        if part.WhichOneof("part") == "image" and part.image.WhichOneof("source") != "blob":
            refuse("INVALID_ITEM", f"{field}[{index}].image", "must name a blob; bytes are not stored in items")


def check_operation(operation: operation_pb2.Operation, session_id: str, field: str) -> None:
    """Check one operation: INVALID_OPERATION, UNSUPPORTED_OPERATION_TYPE."""
    if not _SESSION_ID.fullmatch(operation.operation_id):
        problem = f"must be 1 to 128 letters, digits, '-', '_' and '.', got {operation.operation_id[:140]!r}"
        refuse("INVALID_OPERATION", f"{field}.operation_id", problem)
    if operation.session_id != session_id:
        refuse("INVALID_OPERATION", f"{field}.session_id", f"must be {session_id!r}, got {operation.session_id!r}")
    if operation.type not in _OPERATION_TYPES:
        raise UnsupportedError(
            f"{field}.type {operation.type!r} is unknown to this release",
            reason="UNSUPPORTED_OPERATION_TYPE",
            metadata={"field": f"{field}.type", "found": operation.type},
        )
    if operation.WhichOneof("state") != operation.type:
        refuse("INVALID_OPERATION", f"{field}.state", f"must fit the type {operation.type!r}")
    for name in ("type_version", "status", "step", "effect_class"):
        if getattr(operation, name) == 0:
            refuse("INVALID_OPERATION", f"{field}.{name}", "must be set")
    check_integer(operation.step, f"{field}.step")


def _has_control_characters(text: str) -> bool:
    return _CONTROL_CHARACTER.search(text) is not None
