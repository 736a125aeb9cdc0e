"""Waits in tests for what another task, thread or process does. The only place in the tests that sleeps."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


@overload
async def eventually(check: Callable[[], Awaitable[T | None]], within_s: float = ...) -> T: ...
@overload
async def eventually(check: Callable[[], T | None], within_s: float = ...) -> T: ...
async def eventually(check: Callable[[], Any], within_s: float = 5.0) -> Any:
    """Call `check` until it returns something true, and return that.

    A check fails by returning something false or by an AssertionError; every other exception goes to the caller at
    once. It is called at least once more after the time is over, so a stalled machine fails no test.

    Raises:
        AssertionError: `check` still failed after `within_s`; its own, or one that shows what it returned last.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    pause_s = _FIRST_PAUSE_S
    while True:
        is_last = loop.time() >= deadline
        try:
            result = check()
            value = await result if inspect.isawaitable(result) else result
        except AssertionError:
            if is_last:
                raise
        else:
            if value:
                return value
            if is_last:
                raise AssertionError(f"not within {within_s} s; the check returned {value!r} last")
        await asyncio.sleep(min(pause_s, max(deadline - loop.time(), 0)))
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
