from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.llm.failures import error_in_stream, error_of_response, failure_of
from unreal_agent.llm.v1 import llm_pb2

NOW = datetime(2026, 3, 1, tzinfo=UTC)

OVER_MINUTE = (
    "Request too large for m-1 in organization org-1 on tokens per min (TPM): Limit 30000, Requested 64821. The input "
    "or output tokens must be reduced in order to run successfully."
)
USED_UP_MINUTE = (
    "Rate limit reached for m-1 in organization org-1 on tokens per min (TPM): Limit 30000, Used 29000, "
    "Requested 2000. Please try again in 2s."
)


def body(error: object) -> bytes:
    return json.dumps({"error": error}).encode()


RESPONSES: list[tuple[int, bytes, str]] = [
    (400, body({"code": "context_length_exceeded", "message": "too long"}), "CONTEXT_OVERFLOW"),
    (400, body({"type": "invalid_request_error", "message": "prompt is too long: 210000 tokens"}), "CONTEXT_OVERFLOW"),
    (413, b"<html><body>Request Entity Too Large</body></html>", "CONTEXT_OVERFLOW"),
    (413, b"", "CONTEXT_OVERFLOW"),
    (413, body({"type": "request_too_large", "message": "Request exceeds the maximum size"}), "CONTEXT_OVERFLOW"),
    (
        400,
        body(
            {
                "type": "invalid_request_error",
                "message": "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000",
            }
        ),
        "CONTEXT_OVERFLOW",
    ),
    (401, body({"type": "authentication_error", "message": "invalid x-api-key"}), "AUTHENTICATION"),
    (403, body({"type": "permission_error", "message": "Your API key may not use it."}), "PERMISSION"),
    (402, body({"type": "billing_error", "message": "Payment."}), "QUOTA"),
    (
        400,
        body({"type": "invalid_request_error", "message": "Your credit balance is too low to access the API."}),
        "QUOTA",
    ),
    (
        400,
        body({"type": "invalid_request_error", "message": "You have reached your specified API usage limits."}),
        "QUOTA",
    ),
    (
        400,
        body({"type": "invalid_request_error", "message": "Output blocked by content filtering policy"}),
        "CONTENT_POLICY",
    ),
    (404, body({"type": "not_found_error", "message": "model: m-1"}), "INVALID_REQUEST"),
    (429, body({"type": "rate_limit_error", "message": "This would exceed your rate limit."}), "RATE_LIMIT"),
    (500, body({"type": "api_error", "message": "Internal server error"}), "OVERLOAD"),
    (504, body({"type": "timeout_error", "message": "Timed out"}), "TIMEOUT"),
    (529, body({"type": "overloaded_error", "message": "Overloaded"}), "OVERLOAD"),
    (
        400,
        body({"code": "invalid_request_error", "message": "This model's maximum context length is 8192 tokens."}),
        "CONTEXT_OVERFLOW",
    ),
    (400, body({"message": "Your input exceeds the context window of this model."}), "CONTEXT_OVERFLOW"),
    (400, body({"message": "the request exceeds the available context size, try increasing it"}), "CONTEXT_OVERFLOW"),
    (400, body({"message": "Input is longer than the maximum context"}), "CONTEXT_OVERFLOW"),
    (400, body({"message": "input token count (1200000) exceeds the maximum number of tokens"}), "CONTEXT_OVERFLOW"),
    (400, body({"message": "Please reduce the length of the messages or completion."}), "CONTEXT_OVERFLOW"),
    (500, body({"message": "prompt too long; exceeded max context length by 12 tokens"}), "CONTEXT_OVERFLOW"),
    (429, body({"code": "rate_limit_exceeded", "message": OVER_MINUTE}), "CONTEXT_OVERFLOW"),
    (429, body({"message": "The request is larger than your per-minute limit"}), "CONTEXT_OVERFLOW"),
    (429, body({"code": "rate_limit_exceeded", "message": USED_UP_MINUTE}), "RATE_LIMIT"),
    (429, b"", "RATE_LIMIT"),
    (429, body({"message": "This request would exceed the limit of 30,000 input tokens per minute"}), "RATE_LIMIT"),
    (429, body({"code": "insufficient_quota", "message": "You exceeded your current quota"}), "QUOTA"),
    (429, body({"type": "insufficient_quota", "code": None, "message": "quota"}), "QUOTA"),
    (402, body({"message": "Insufficient credits", "code": 402}), "QUOTA"),
    (401, body({"type": "invalid_request_error", "code": "invalid_api_key", "message": "bad key"}), "AUTHENTICATION"),
    (401, b"unauthorized", "AUTHENTICATION"),
    (403, body({"type": "permission_error", "message": "no"}), "PERMISSION"),
    (400, body({"code": "invalid_prompt", "message": "flagged"}), "CONTENT_POLICY"),
    (400, body({"type": "invalid_request_error", "message": "Unsupported parameter: 'effort'"}), "INVALID_REQUEST"),
    (400, body({"message": "max_tokens is too large: 999999. At most 128000 completion tokens."}), "INVALID_REQUEST"),
    (404, body({"code": "model_not_found", "message": "no such model"}), "INVALID_REQUEST"),
    (307, b"", "INVALID_REQUEST"),
    (408, b"", "TIMEOUT"),
    (529, body({"type": "overloaded_error", "message": "Overloaded"}), "OVERLOAD"),
    (503, b"<html>Service Unavailable</html>", "OVERLOAD"),
    (500, json.dumps({"detail": "boom"}).encode(), "OVERLOAD"),
    (501, b"", "INVALID_REQUEST"),
    (400, json.dumps([{"error": {"message": "bad", "code": 400}}]).encode(), "INVALID_REQUEST"),
    (400, json.dumps({"error": "registry model not found"}).encode(), "INVALID_REQUEST"),
]


@pytest.mark.parametrize(("status", "content", "expected"), RESPONSES)
def test_a_response_is_classified_by_code_then_words_then_status(status: int, content: bytes, expected: str) -> None:
    error = error_of_response(status, {}, content, NOW)
    assert llm_pb2.ErrorClass.Name(error.error_class) == f"ERROR_CLASS_{expected}"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "OVERLOAD"),
        ({"type": "error", "code": "server_is_overloaded", "message": "busy"}, "OVERLOAD"),
        ({"code": "rate_limit_exceeded", "message": USED_UP_MINUTE}, "RATE_LIMIT"),
        ({"code": "rate_limit_exceeded", "message": OVER_MINUTE}, "CONTEXT_OVERFLOW"),
        ({"code": "context_length_exceeded", "message": "too long"}, "CONTEXT_OVERFLOW"),
        ({"error": {"message": "only a message"}}, "OVERLOAD"),
        ({"error": {"code": 401, "message": "User not found"}}, "AUTHENTICATION"),
        ({"error": {"code": 502, "message": "bad gateway"}}, "OVERLOAD"),
        ({"error": "text"}, "OVERLOAD"),
        ({"code": "cyber_policy", "message": "refused"}, "CONTENT_POLICY"),
        ({"code": "model_context_window_exceeded"}, "CONTEXT_OVERFLOW"),
        ({"code": "unheard_of", "message": "?"}, "OVERLOAD"),
        (None, "OVERLOAD"),
        ([], "OVERLOAD"),
    ],
)
def test_an_error_inside_a_stream_is_classified_by_its_body(error: object, expected: str) -> None:
    assert llm_pb2.ErrorClass.Name(error_in_stream(error).error_class) == f"ERROR_CLASS_{expected}"


def test_the_larger_of_header_and_message_is_the_wait() -> None:
    content = body({"code": "rate_limit_exceeded", "message": "Please try again in 9s"})
    assert error_of_response(429, {"retry-after": "3"}, content, NOW).retry_after_s == 9.0
    assert error_of_response(429, {"retry-after": "12"}, content, NOW).retry_after_s == 12.0
    assert error_in_stream({"code": "rate_limit_exceeded", "message": "try again in 500ms"}).retry_after_s == 0.5


def test_the_failure_says_what_to_do_and_holds_no_secret() -> None:
    secret = "abc-very-secret"
    message = f"Incorrect API key provided: {secret}, or sk-proj-12345***wxyz, or Bearer zzz.\nSee http://u:pw@host/x"
    error = error_of_response(401, {}, body({"code": "invalid_api_key", "message": message}), NOW)
    failure = failure_of(error, provider="acme", key_variable="ACME_API_KEY", secrets=(secret,))
    assert failure == llm_pb2.Failure(
        error_class=llm_pb2.ERROR_CLASS_AUTHENTICATION,
        message=(
            "acme answered HTTP 401 (invalid_api_key): Incorrect API key provided: ***, or ***, or *** "
            "See http://***host/x; set ACME_API_KEY to a valid key"
        ),
        provider_code="invalid_api_key",
        http_status=401,
    )


ERROR_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["error", "message", "code", "type", "detail"]), inner)
    ),
    max_leaves=6,
)


@given(st.integers(300, 599), st.binary(max_size=80) | ERROR_VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_body_gives_a_storable_failure(status: int, content: bytes) -> None:
    failure = failure_of(error_of_response(status, {}, content, NOW), provider="p", key_variable="", secrets=("",))
    assert failure.error_class != llm_pb2.ERROR_CLASS_UNSPECIFIED
    assert "\n" not in failure.message
    assert len(failure.SerializeToString()) < 5000
