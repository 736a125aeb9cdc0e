"""Every error of the library is the same error on the other side."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from clients._rpc.status import STATUS_DETAILS_KEY, from_rpc_error, from_status, to_status
from harness.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    HarnessError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
)


def subclasses(error_class: type[HarnessError]) -> list[type[HarnessError]]:
    return [error_class, *(below for direct in error_class.__subclasses__() for below in subclasses(direct))]


def facts(error: HarnessError) -> tuple[object, ...]:
    return type(error), error.code, error.reason, error.message, dict(error.metadata), error.retry_after_s


@pytest.mark.parametrize("error_class", subclasses(HarnessError), ids=lambda one: one.__name__)
@pytest.mark.parametrize("retry_after_s", [None, 0.25, 90.0])
def test_error_comes_back_as_it_was(error_class: type[HarnessError], retry_after_s: float | None) -> None:
    reason = "UNSUPPORTED_THING" if error_class is UnsupportedError else "SOME_REASON"
    error = error_class(
        "what failed: 'ü'", reason=reason, metadata={"field": "a.b", "x": "ÿ"}, retry_after_s=retry_after_s
    )
    assert facts(from_status(to_status(error))) == facts(error)


def test_invalid_argument_names_the_field_for_clients_of_other_languages() -> None:
    status = to_status(InvalidArgumentError("a.b must be set", reason="R", metadata={"field": "a.b"}))
    bad_request = error_details_pb2.BadRequest()
    assert status.details[1].Unpack(bad_request)
    assert [(one.field, one.description) for one in bad_request.field_violations] == [("a.b", "a.b must be set")]


@pytest.mark.parametrize("error", [ValueError("secret"), KeyError("secret"), RuntimeError("secret")])
def test_a_bug_tells_the_caller_only_where_to_look(error: Exception) -> None:
    status = to_status(error, request_id="r-1")
    assert b"secret" not in status.SerializeToString()
    told = from_status(status)
    assert (type(told), told.reason, told.message) == (HarnessError, "INTERNAL", "internal error (request r-1)")
    assert told.metadata == {"request_id": "r-1"}


def test_a_timeout_is_a_deadline() -> None:
    assert isinstance(from_status(to_status(TimeoutError())), DeadlineExceededError)


def test_long_texts_fit_into_a_trailer() -> None:
    metadata = {f"key{number}": "ü" * 10_000 for number in range(20)}
    error = NotFoundError("ü" * 100_000, reason="R", metadata={"field": "first", **metadata})
    status = to_status(error)
    assert len(status.SerializeToString()) < 6_000
    assert from_status(status).metadata["field"] == "first"


def test_text_that_cannot_be_encoded_is_shown_escaped() -> None:
    assert from_status(to_status(NotFoundError("bad \ud800 value", reason="R"))).message == "bad \\ud800 value"


def rpc_error(code: grpc.StatusCode, text: str = "", details: bytes | None = None) -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(*(() if details is None else ((STATUS_DETAILS_KEY, details),)))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, text)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed"),
        (grpc.StatusCode.CANCELLED, "CANCELLED"),
        (grpc.StatusCode.UNKNOWN, "Stream removed"),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
        (grpc.StatusCode.INTERNAL, "Internal error from Core"),
    ],
)
def test_a_lost_peer_is_a_lost_connection(code: grpc.StatusCode, text: str) -> None:
    error = from_rpc_error(rpc_error(code, text))
    assert (type(error), error.reason) == (UnavailableError, "CONNECTION_LOST")


@pytest.mark.parametrize(
    ("code", "text", "error_class", "reason"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineExceededError, "DEADLINE_EXCEEDED"),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CLIENT: Sent message larger than max (70000000 vs. 67108864)",
            ResourceExhaustedError,
            "MESSAGE_TOO_LARGE",
        ),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "quota", ResourceExhaustedError, "RESOURCE_EXHAUSTED"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", UnsupportedError, "UNSUPPORTED_CALL"),
        (grpc.StatusCode.FAILED_PRECONDITION, "no", FailedPreconditionError, "FAILED_PRECONDITION"),
        (grpc.StatusCode.UNKNOWN, "what", HarnessError, "UNKNOWN"),
    ],
)
def test_what_grpc_itself_says_is_told_by_its_code(
    code: grpc.StatusCode, text: str, error_class: type[HarnessError], reason: str
) -> None:
    error = from_rpc_error(rpc_error(code, text))
    assert (type(error), error.reason) == (error_class, reason)


def test_details_that_are_none_are_passed_over() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.NOT_FOUND, "gone", b"\xff\xff"))
    assert (type(error), error.reason, error.message) == (NotFoundError, "NOT_FOUND", "gone")


def test_error_info_of_another_domain_is_not_ours() -> None:
    status = status_pb2.Status(code=5, message="gone")
    status.details.add().Pack(error_details_pb2.ErrorInfo(domain="elsewhere", reason="X", metadata={"a": "b"}))
    error = from_status(status)
    assert (type(error), error.reason, error.metadata) == (NotFoundError, "NOT_FOUND", {})
