"""What kind of failure an answer is: HTTP statuses, error bodies and errors inside streams become `ErrorClass`. Pure.

The order of the rules matters: a provider's exact code first, then words that tell of a context overflow (which come
with every status and code there is), then the HTTP status, then general types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus

from harness.llm import json_text
from harness.llm.retry import retry_after_in_message_s, retry_after_s
from unreal_agent.llm.v1 import llm_pb2

MAX_DETAIL_CHARS = 400
"""Provider's words kept in a message."""

RETRIED = frozenset(
    {
        llm_pb2.ERROR_CLASS_RATE_LIMIT,
        llm_pb2.ERROR_CLASS_OVERLOAD,
        llm_pb2.ERROR_CLASS_TIMEOUT,
        llm_pb2.ERROR_CLASS_CONNECTION,
    }
)
"""Classes that the same request may survive."""

WAITED_FOR = frozenset({llm_pb2.ERROR_CLASS_RATE_LIMIT, llm_pb2.ERROR_CLASS_OVERLOAD})
"""Classes that a session waits out when the adapter gave up."""

_EXACT_CODES: Mapping[str, llm_pb2.ErrorClass.ValueType] = {
    code: error_class
    for error_class, codes in {
        llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW: (
            "context_length_exceeded context_window_exceeded model_context_window_exceeded exceed_context_size_error "
            "string_above_max_length request_too_large prompt_too_long"
        ),
        llm_pb2.ERROR_CLASS_QUOTA: (
            "insufficient_quota usage_not_included usage_limit_reached credit_balance_exhausted billing_not_active "
            "billing_hard_limit_reached insufficient_credits insufficient_balance billing_error payment_required"
        ),
        llm_pb2.ERROR_CLASS_AUTHENTICATION: (
            "invalid_api_key invalid_token authentication_error token_expired missing_api_key unauthorized"
        ),
        llm_pb2.ERROR_CLASS_PERMISSION: (
            "permission_error permission_denied access_denied forbidden unsupported_country_region_territory"
        ),
        llm_pb2.ERROR_CLASS_CONTENT_POLICY: (
            "cyber_policy bio_policy misalignment_policy_violation invalid_prompt content_policy_violation "
            "content_filter moderation_blocked data_inspection_failed"
        ),
        llm_pb2.ERROR_CLASS_RATE_LIMIT: (
            "rate_limit_exceeded rate_limit_error rate_limited too_many_requests rate_limit_reached_error"
        ),
        llm_pb2.ERROR_CLASS_OVERLOAD: (
            "server_is_overloaded slow_down overloaded_error overloaded engine_overloaded_error service_unavailable "
            "model_overloaded insufficient_system_resource"
        ),
        llm_pb2.ERROR_CLASS_TIMEOUT: "timeout_error request_timeout gateway_timeout",
    }.items()
    for code in codes.split()
}
"""Codes and types whose meaning does not depend on the status."""

_GENERAL_TYPES: Mapping[str, llm_pb2.ErrorClass.ValueType] = {
    code: error_class
    for error_class, codes in {
        llm_pb2.ERROR_CLASS_INVALID_REQUEST: (
            "invalid_request_error bad_request badrequesterror invalid_value unsupported_parameter unsupported_value "
            "missing_required_parameter unknown_parameter invalid_type model_not_found not_found_error "
            "image_parse_error invalid_image invalid_base64_image unsupported_image_media_type validation_error"
        ),
        llm_pb2.ERROR_CLASS_OVERLOAD: "server_error internal_server_error api_error internal_error upstream_error",
    }.items()
    for code in codes.split()
}

_OVERFLOW_WORDS = re.compile(
    r"context[_ ]length[_ ]exceeded|maximum context length|max(imum)? context (window|size)"
    r"|exceed\w* (the |its |your |this model'?s? |the model'?s? )?(available |maximum |max )?context"
    r"|(larger|longer|greater|more) than (the |its |this |the model'?s? )?(maximum |max )?context"
    r"|context (size|length|window|limit) (has been |was |is )?(exceeded|too small|full)"
    r"|(prompt|input|request|message|conversation)s? (is|are|was) too (long|large)|too many (input|prompt) tokens"
    r"|prompt too long|request too large|payload too large|entity too large"
    r"|exceed\w* (the )?(maximum|max|model'?s?)( number of| allowed)?( input| token)* (tokens|limit|length)"
    r"|maximum prompt length|more (input )?tokens than|tokens in request more than"
    r"|reduce the length of (the |your )?(messages|prompt|input)|context window"
)
_REQUEST_OVER_MINUTE_LIMIT = re.compile(
    r"request (is )?too large|(larger|bigger|greater|more) than (the|your) .{0,40}per[- ]minute"
    r"|tokens must be reduced|too large for"
)
_LIMIT_AND_REQUESTED = re.compile(r"limit:? (\d+)\b.{0,60}\brequested:? (\d+)")
_QUOTA_WORDS = re.compile(
    r"credit balance is too low|insufficient (credit|balance|funds)"
    r"|reached your (specified )?(api )?(usage|spend\w*) limit"
)
_POLICY_WORDS = re.compile(
    r"(blocked|flagged|rejected) by (our |the )?(content|safety|usage|moderation)[ -](filter|polic|system)"
)
_RATE_WORDS = re.compile(r"rate[ _-]limit|too many requests|per[ -]minute|\b[tr]pm\b")

_SECRET_SHAPES = re.compile(r"\b(?:sk|pk|fw|gsk|rk|xai)[-_][\w*.\-]{4,}|Bearer\s+\S+|(?<=//)[^/@\s]+@", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]+")
_TAG = re.compile(r"<[^>]*>")

_ADVICE: Mapping[llm_pb2.ErrorClass.ValueType, str] = {
    llm_pb2.ERROR_CLASS_AUTHENTICATION: "set {key} to a valid key",
    llm_pb2.ERROR_CLASS_PERMISSION: "use a key that may use this model",
    llm_pb2.ERROR_CLASS_QUOTA: "add credit to the account, or set {key} to another account's key",
    llm_pb2.ERROR_CLASS_INVALID_REQUEST: "check the model, the effort and the base URL",
    llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW: "shorten the conversation, or choose a model with a larger window",
    llm_pb2.ERROR_CLASS_CONTENT_POLICY: "change or leave out what was new in this request",
}


class AttemptError(Exception):
    """Raised inside an adapter when an attempt failed. Holds no credential; `detail` may hold a provider's words.

    Attributes:
        error_class: What kind of failure it is.
        detail: What happened, as the end of a sentence that begins with the provider's name.
        provider_code: The provider's code; empty if none.
        http_status: 0 where none.
        retry_after_s: The wait that the provider asked for; None if none.
    """

    def __init__(
        self,
        error_class: llm_pb2.ErrorClass.ValueType,
        detail: str,
        *,
        provider_code: str = "",
        http_status: int = 0,
        retry_after_s: float | None = None,
    ) -> None:
        """Keep the facts."""
        super().__init__(detail)
        self.error_class = error_class
        self.detail = detail
        self.provider_code = provider_code
        self.http_status = http_status
        self.retry_after_s = retry_after_s


def malformed(detail: str) -> AttemptError:
    """Return the fault of an answer that cannot be decoded; `detail` names the place."""
    return AttemptError(llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, detail)


def ended_early(detail: str) -> AttemptError:
    """Return the fault of a stream that stopped before its answer was whole."""
    return AttemptError(llm_pb2.ERROR_CLASS_CONNECTION, detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFacts:
    """What an error object says, whatever its form."""

    code: str = ""
    error_type: str = ""
    message: str = ""
    status: int = 0
    """HTTP status: the response's, or the one that the error object carries; 0 where none."""


def read_error(error: object, status: int = 0) -> ErrorFacts:
    """Return the facts of an error value: an object, a text, or a list that holds one."""
    if isinstance(error, list):
        error = error[0] if error else None
    if isinstance(error, dict) and isinstance(error.get("error"), dict | list | str):
        outer = error
        error = error["error"]
        if isinstance(error, str):
            error = {"message": outer.get("message") or error, "code": outer.get("code") or error}
        return read_error(error, status)
    if isinstance(error, str):
        return ErrorFacts(message=error, status=status)
    if not isinstance(error, dict):
        return ErrorFacts(status=status)
    code, error_type = error.get("code"), error.get("type")
    if isinstance(code, int) and not isinstance(code, bool) and not status and 400 <= code <= 599:
        status = code
    message = error.get("message") or error.get("detail") or error.get("error_description")
    return ErrorFacts(
        code=str(code) if isinstance(code, str | int) and not isinstance(code, bool) else "",
        error_type=error_type if isinstance(error_type, str) else "",
        message=message if isinstance(message, str) else json_text.write(message) if message else "",
        status=status,
    )


def classify(facts: ErrorFacts) -> llm_pb2.ErrorClass.ValueType:
    """Return the class of an error."""
    message = facts.message.lower()
    names = [name.lower() for name in (facts.code, facts.error_type) if name]
    exact = next((_EXACT_CODES[name] for name in names if name in _EXACT_CODES), None)
    if exact is None and facts.status == HTTPStatus.TOO_MANY_REQUESTS:
        exact = llm_pb2.ERROR_CLASS_RATE_LIMIT
    if exact == llm_pb2.ERROR_CLASS_RATE_LIMIT:
        return llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW if _is_over_minute_limit(message) else exact
    if exact is not None:
        return exact
    if facts.status not in (401, 402, 403) and _OVERFLOW_WORDS.search(message) and not _RATE_WORDS.search(message):
        return llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW
    by_words = _class_of_words(message)
    by_status = _class_of_status(facts.status)
    # Words decide where the status says no more than that the request was refused.
    if by_words is not None and by_status in (None, llm_pb2.ERROR_CLASS_INVALID_REQUEST):
        return by_words
    if by_status is not None:
        return by_status
    # An error inside a 200 stream that no rule knows is retried: most of them are a provider's own trouble.
    return next((_GENERAL_TYPES[name] for name in names if name in _GENERAL_TYPES), llm_pb2.ERROR_CLASS_OVERLOAD)


def error_in_stream(error: object) -> AttemptError:
    """Return the fault that an error object inside a 200 stream stands for."""
    facts = read_error(error)
    code = facts.code or facts.error_type
    return AttemptError(
        classify(facts),
        f"reported an error{_in_brackets(code)}{_quoted(facts.message)}",
        provider_code=code,
        http_status=HTTPStatus.OK,
        retry_after_s=retry_after_in_message_s(facts.message),
    )


def error_of_response(status: int, headers: Mapping[str, str], body: bytes, now: datetime) -> AttemptError:
    """Return the fault that an HTTP response other than 200 stands for.

    Args:
        status: HTTP status.
        headers: Looked up in lower case.
        body: As much of it as was read; JSON of any form, text or HTML.
        now: Wall clock's time, for dates in Retry-After.
    """
    text = body.decode(errors="replace")
    try:
        facts = read_error(json_text.read(text), status)
    except json_text.JSONTextError:
        # A proxy's page: its words, without the mark-up.
        facts = ErrorFacts(message=" ".join(_TAG.sub(" ", text[:4000]).split()), status=status)
    code = facts.code or facts.error_type
    waits = [
        wait
        for wait in (retry_after_s(headers, now, status), retry_after_in_message_s(facts.message))
        if wait is not None
    ]
    return AttemptError(
        classify(facts),
        f"answered HTTP {status}{_in_brackets(code)}{_quoted(facts.message)}",
        provider_code=code,
        http_status=status,
        retry_after_s=max(waits, default=None),
    )


def failure_of(fault: AttemptError, *, provider: str, key_variable: str, secrets: Sequence[str]) -> llm_pb2.Failure:
    """Return what is recorded of a fault: one line, what failed and what to do, without secrets."""
    line = f"{provider} {fault.detail}"
    advice = _ADVICE.get(fault.error_class, "")
    if advice:
        line = f"{line}; {advice.format(key=key_variable or 'the API key')}"
    return llm_pb2.Failure(
        error_class=fault.error_class,
        message=without_secrets(line, secrets),
        provider_code=without_secrets(fault.provider_code, secrets)[:200],
        http_status=fault.http_status,
    )


def without_secrets(text: str, secrets: Sequence[str]) -> str:
    """Return a text on one line, without the secrets and without what looks like one."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "***")
    return json_text.valid_text(_CONTROL.sub(" ", without_secret_shapes(text)))


def without_secret_shapes(text: str) -> str:
    """Return a text without what looks like a key or a token."""
    return _SECRET_SHAPES.sub("***", text)


def _class_of_status(status: int) -> llm_pb2.ErrorClass.ValueType | None:
    known = {
        401: llm_pb2.ERROR_CLASS_AUTHENTICATION,
        402: llm_pb2.ERROR_CLASS_QUOTA,
        403: llm_pb2.ERROR_CLASS_PERMISSION,
        408: llm_pb2.ERROR_CLASS_TIMEOUT,
        413: llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW,
        425: llm_pb2.ERROR_CLASS_OVERLOAD,
        # Not implemented, and a version that is not spoken: the same request never succeeds.
        501: llm_pb2.ERROR_CLASS_INVALID_REQUEST,
        505: llm_pb2.ERROR_CLASS_INVALID_REQUEST,
    }
    if status in known:
        return known[status]
    if status >= 500:
        return llm_pb2.ERROR_CLASS_OVERLOAD
    return llm_pb2.ERROR_CLASS_INVALID_REQUEST if status >= 300 else None


def _class_of_words(message: str) -> llm_pb2.ErrorClass.ValueType | None:
    if _QUOTA_WORDS.search(message):
        return llm_pb2.ERROR_CLASS_QUOTA
    return llm_pb2.ERROR_CLASS_CONTENT_POLICY if _POLICY_WORDS.search(message) else None


def _is_over_minute_limit(message: str) -> bool:
    """Tell whether a rate limit can never be met, because the one request is larger than it."""
    amounts = _LIMIT_AND_REQUESTED.search(message.replace(",", ""))
    if amounts is not None:
        return int(amounts.group(2)) > int(amounts.group(1))
    return _REQUEST_OVER_MINUTE_LIMIT.search(message) is not None


def _in_brackets(code: str) -> str:
    return f" ({code[:100]})" if code else ""


def _quoted(message: str) -> str:
    if not message:
        return ""
    cut = message if len(message) <= MAX_DETAIL_CHARS else message[:MAX_DETAIL_CHARS] + "…"
    return f": {cut}"
