"""Every error that the library raises for its callers.

    HarnessError
    ├── InvalidArgumentError      malformed, whatever the state
    ├── NotFoundError             unknown session, turn, operation, blob
    ├── AlreadyExistsError        an ID reused with other content
    ├── FailedPreconditionError   the state does not allow it
    │   └── UnsupportedError      unknown type or version
    ├── ConflictError             the sequence moved, or the writer lost its lease
    ├── OutOfRangeError           a cursor or offset past the end
    ├── ResourceExhaustedError    a bound was reached
    ├── UnauthenticatedError      no or bad credentials
    ├── PermissionDeniedError     a known caller that may not
    ├── UnavailableError          draining, or a dependency is down
    ├── DeadlineExceededError     our own limit ran out (also TimeoutError)
    └── DataLossError             a record cannot be decoded

A failing command, a refused tool call and a cancelled operation are no errors: they are states that the model sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class HarnessError(Exception):
    """Base of the tree.

    Attributes:
        code: The gRPC status name that stands for the class.
        reason: Stable UPPER_SNAKE constant; programs branch on code and reason, never on text.
        message: One line for a person: what failed, which value, what to do. No secrets, no prompt text.
        metadata: Further facts for programs; short strings.
        retry_after_s: Seconds after which the same request may succeed; None where waiting does not help.
    """

    code: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Keep the facts; `message` is also the exception's text."""
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.retry_after_s = retry_after_s


class InvalidArgumentError(HarnessError):
    """Raised when a request is malformed whatever the state is. Fix the call."""

    code = "INVALID_ARGUMENT"


class NotFoundError(HarnessError):
    """Raised when a session, turn, operation or blob is unknown."""

    code = "NOT_FOUND"


class AlreadyExistsError(HarnessError):
    """Raised when an ID is used again with other content."""

    code = "ALREADY_EXISTS"


class FailedPreconditionError(HarnessError):
    """Raised when the state does not allow the request."""

    code = "FAILED_PRECONDITION"


class UnsupportedError(FailedPreconditionError):
    """Raised when a type or version is unknown; the reason begins with UNSUPPORTED_. Nothing was changed."""


class ConflictError(HarnessError):
    """Raised when the expected sequence moved or the writer lost its lease. Read again, retry the whole step."""

    code = "ABORTED"


class OutOfRangeError(HarnessError):
    """Raised when a cursor or offset lies past the end."""

    code = "OUT_OF_RANGE"


class ResourceExhaustedError(HarnessError):
    """Raised when a queue, a quota, a disk or a size bound is full."""

    code = "RESOURCE_EXHAUSTED"


class UnauthenticatedError(HarnessError):
    """Raised when credentials are missing or bad."""

    code = "UNAUTHENTICATED"


class PermissionDeniedError(HarnessError):
    """Raised when a known caller may not do this."""

    code = "PERMISSION_DENIED"


class UnavailableError(HarnessError):
    """Raised when a dependency is down or the server drains. Retry with the same request ID."""

    code = "UNAVAILABLE"


class DeadlineExceededError(HarnessError, TimeoutError):
    """Raised when a limit of our own ran out. Retry only with a request ID."""

    code = "DEADLINE_EXCEEDED"


class DataLossError(HarnessError):
    """Raised when a stored record cannot be decoded. Stop, and look at the place that the message names."""

    code = "DATA_LOSS"
