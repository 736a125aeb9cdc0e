from __future__ import annotations

from datetime import UTC, datetime
from random import Random

import pytest

from harness.llm.retry import MAX_RETRY_AFTER_S, RetryPolicy, retry_after_in_message_s, retry_after_s

NOW = datetime(1994, 11, 6, 8, 49, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}, 37.0),
        ({"retry-after": "Sunday, 06-Nov-94 08:49:37 GMT"}, 37.0),
        ({"retry-after": "Sun Nov  6 08:49:37 1994"}, 37.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:00:00 GMT"}, 0.0),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "99999999999"}, MAX_RETRY_AFTER_S),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, MAX_RETRY_AFTER_S),
        ({"retry-after": "Mon, 99 Foo 2026 99:99:99 GMT"}, None),
    ],
)
def test_retry_after_is_read_in_every_form(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers, NOW) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0.5s"}, 360.5),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "250ms"}, 0.25),
        (
            {
                "x-ratelimit-remaining-requests": "12",
                "x-ratelimit-reset-requests": "1h",
                "x-ratelimit-remaining-tokens": "0",
                "x-ratelimit-reset-tokens": "2s",
            },
            2.0,
        ),
        ({"x-ratelimit-remaining-requests": "12", "x-ratelimit-reset-requests": "1h"}, None),
        (
            {
                "anthropic-ratelimit-input-tokens-remaining": "0",
                "anthropic-ratelimit-input-tokens-reset": "1994-11-06T08:49:37Z",
                "anthropic-ratelimit-requests-remaining": "40",
                "anthropic-ratelimit-requests-reset": "1994-11-06T09:49:37Z",
            },
            37.0,
        ),
        ({"x-ratelimit-reset": "20"}, 20.0),
        ({"ratelimit-reset": "20"}, 20.0),
        ({"x-ratelimit-reset-requests": "soon"}, None),
        ({"x-ratelimit-limit-requests": "60"}, None),
        ({"retry-after": "3", "x-ratelimit-remaining": "0", "x-ratelimit-reset": "20"}, 3.0),
    ],
)
def test_used_up_limits_name_their_time(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers, NOW, 429) == (pytest.approx(expected) if expected is not None else None)
    assert retry_after_s(headers, NOW, 500) == (3.0 if "retry-after" in headers else None)


@pytest.mark.parametrize("scale", [1, 1000])
def test_a_reset_since_1970_is_read_in_seconds_and_milliseconds(scale: int) -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    assert retry_after_s({"x-ratelimit-reset": str(int((now.timestamp() + 9) * scale))}, now, 429) == pytest.approx(9)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Rate limit reached. Please try again in 1.898s. Visit the console.", 1.898),
        ("Please try again in 20ms.", 0.02),
        ("Please try again in 6m0s.", 360.0),
        ("Please try again in 1h2m3s", 3723.0),
        ("please retry after 12 seconds", 12.0),
        ("Please wait for 2 minutes", 120.0),
        ("You sent 3 messages in 5s", None),
        ("", None),
    ],
)
def test_a_wait_named_in_the_message_is_read(message: str, expected: float | None) -> None:
    assert retry_after_in_message_s(message) == (pytest.approx(expected) if expected is not None else None)


def test_back_off_doubles_to_its_bound_with_at_most_a_fifth_taken_off() -> None:
    policy = RetryPolicy(attempts=9)
    random = Random(3)
    delays = [policy.delay_s(attempt, None, random) for attempt in range(1, 9)]
    for delay, full in zip(delays, [2, 4, 8, 16, 30, 30, 30, 30], strict=True):
        assert delay is not None
        assert full * 0.8 <= delay <= full
    assert policy.delay_s(9, None, random) is None


@pytest.mark.parametrize(("asked", "expected"), [(7.0, 7.0), (30.0, 30.0), (30.1, None), (0.0, None)])
def test_the_providers_wish_is_kept_up_to_the_longest_wait(asked: float, expected: float | None) -> None:
    delay = RetryPolicy().delay_s(1, asked, Random(1))
    if asked == 0.0:
        assert delay is not None
        assert 1.6 <= delay <= 2.0
    else:
        assert delay == expected
