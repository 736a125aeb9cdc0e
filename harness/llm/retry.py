"""How long to wait and when to try again: bounds, back-off, and every legal form of Retry-After. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from random import Random

MAX_RETRY_AFTER_S = 30 * 24 * 3600.0
"""A provider's wish beyond this is cut to it: a month, the longest period of a quota."""

_IN_MESSAGE = re.compile(
    r"(?:try again|retry|wait)(?: again)? (?:in|after|for) ((?:\d+(?:\.\d+)?\s*(?:ms|h|m|s)[a-z]*\s*)+)"
)
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|h|m|s)")
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|h|m|s))+")
_RATE_LIMIT = re.compile(r"(?:x-|anthropic-)?ratelimit-")
_RESET = re.compile(r"\breset\b")
_EPOCH_FROM = 1e9
"""A reset beyond it is a time since 1970, not a number of seconds to wait."""

_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds of one attempt, in seconds."""

    connect_s: float = 10.0
    first_byte_s: float = 300.0
    """From sending to the first byte of the body; connecting included."""

    idle_s: float = 120.0
    """Between two chunks, a provider's keep-alive comments included."""

    trailer_s: float = 5.0
    """For what may follow an answer that is whole (usage): after it the answer stands without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how fast an adapter itself tries again."""

    attempts: int = 5
    first_delay_s: float = 2.0
    max_delay_s: float = 30.0
    """Longest single wait. A provider that asks for more makes the request fail, so that the session waits durably."""

    jitter: float = 0.2
    """Up to this share is taken off a delay, so that sessions that failed together do not come back together."""

    def delay_s(self, attempt: int, retry_after_s: float | None, random: Random) -> float | None:
        """Return the wait after the failed `attempt` (from 1), or None where the adapter gives up.

        The provider's wish is kept exactly where it is the larger one.
        """
        if attempt >= self.attempts or (retry_after_s is not None and retry_after_s > self.max_delay_s):
            return None
        delay_s = self._back_off_s(attempt)
        if retry_after_s is not None and retry_after_s >= delay_s:
            return retry_after_s
        return max(retry_after_s or 0.0, delay_s * (1 - self.jitter * random.random()))

    def durable_wait_s(self, attempt: int, retry_after_s: float | None) -> float:
        """Return how long a session should wait after the adapter gave up: the provider's time, else a guess."""
        return retry_after_s if retry_after_s is not None else self._back_off_s(attempt)

    def _back_off_s(self, attempt: int) -> float:
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** min(attempt - 1, 32))


def retry_after_s(headers: Mapping[str, str], now: datetime, status: int = 0) -> float | None:
    """Return the wait in seconds that response headers ask for; None if none.

    Milliseconds, seconds or an HTTP date in Retry-After; without one, and only with status 429, the reset times of the
    limits that have nothing left.

    Args:
        headers: Looked up in lower case.
        now: The wall clock's time, for dates.
        status: The response's; 0: not known.
    """
    milliseconds = _number(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return _bounded(milliseconds / 1000)
    text = headers.get("retry-after", "").strip()
    seconds = _number(text)
    if seconds is None and text:
        seconds = _until_http_date(text, now)
    if seconds is not None:
        return _bounded(seconds)
    return _until_reset_s(headers, now) if status == HTTPStatus.TOO_MANY_REQUESTS else None


def _until_http_date(text: str, now: datetime) -> float | None:
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, IndexError, TypeError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - now).total_seconds()


def _until_reset_s(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the time until the last of the used-up limits is there again; without any count, of all limits."""
    used_up: list[float] = []
    uncounted: list[float] = []
    for name, value in headers.items():
        remaining_name = _RESET.sub("remaining", name.lower(), count=1)
        if not _RATE_LIMIT.match(name.lower()) or remaining_name == name.lower():
            continue
        wait_s = _reset_s(value.strip(), now)
        if wait_s is None:
            continue
        remaining = _number(headers.get(remaining_name, ""))
        if remaining is None:
            uncounted.append(wait_s)
        elif remaining <= 0:
            used_up.append(wait_s)
    waits = used_up or uncounted
    return _bounded(max(waits)) if waits else None


def _reset_s(value: str, now: datetime) -> float | None:
    """Return the seconds until a reset: "1m30.5s", seconds, a time since 1970 in seconds or ms, or an ISO date."""
    number = _number(value)
    if number is not None:
        if number < _EPOCH_FROM:
            return number
        return (number / 1000 if number >= _EPOCH_FROM * 1000 else number) - now.timestamp()
    if _DURATION.fullmatch(value):
        return sum(float(amount) * _UNIT_S[unit] for amount, unit in _AMOUNT.findall(value))
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - now).total_seconds()


def retry_after_in_message_s(message: str) -> float | None:
    """Return the wait in seconds that a sentence names ("Please try again in 1m2.5s"); None if it names none."""
    found = _IN_MESSAGE.search(message.lower())
    if found is None:
        return None
    return _bounded(sum(float(amount) * _UNIT_S[unit] for amount, unit in _AMOUNT.findall(found.group(1))))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
