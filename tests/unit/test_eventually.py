"""The waiting that other tests rely on must fail when it should."""

from __future__ import annotations

import pytest

from tests.support.eventually import eventually


async def test_returns_the_first_true_value() -> None:
    values = iter([0, None, "", "ready", "later"])
    assert await eventually(lambda: next(values)) == "ready"


async def test_awaits_an_asynchronous_check() -> None:
    values = iter([False, True])

    async def check() -> bool:
        return next(values)

    assert await eventually(check) is True


async def test_an_assertion_that_holds_later_passes() -> None:
    values = iter([1, 2, 3])

    def check() -> int:
        value = next(values)
        assert value == 3
        return value

    assert await eventually(check) == 3


async def test_shows_what_was_returned_last_when_time_is_over() -> None:
    with pytest.raises(AssertionError, match=r"not within 0.01 s; the check returned \[\] last"):
        await eventually(list, within_s=0.01)


async def test_raises_the_checks_own_assertion_when_time_is_over() -> None:
    def check() -> bool:
        raise AssertionError("two commands run")

    with pytest.raises(AssertionError, match="two commands run"):
        await eventually(check, within_s=0.01)


async def test_another_exception_ends_the_wait_at_once() -> None:
    calls: list[int] = []

    def check() -> bool:
        calls.append(1)
        raise LookupError("gone")

    with pytest.raises(LookupError):
        await eventually(check, within_s=60)
    assert calls == [1]


async def test_checks_once_even_with_no_time() -> None:
    assert await eventually(lambda: "ready", within_s=0) == "ready"
