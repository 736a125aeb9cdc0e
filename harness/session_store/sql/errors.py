"""What callers of a store get, whichever its engine."""

from __future__ import annotations

from harness.errors import UnavailableError


def closed_error() -> UnavailableError:
    """Return what callers of a store that is closing get."""
    return UnavailableError("the session store is closing", reason="STORE_CLOSED", retry_after_s=1.0)
