"""Whether the coordinator can be reached, for those who show it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Connection:
    """Begins connected; so it stays where the coordinator is in this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin connected; `clock` gives seconds."""
        self._clock = clock
        self._lost_s: float | None = None

    def note(self, is_there: bool) -> None:
        """Take in that the connection was lost, or is back."""
        if is_there:
            self._lost_s = None
        elif self._lost_s is None:
            self._lost_s = self._clock()

    @property
    def lost_for_s(self) -> float:
        """How long it has been lost; 0 where it is there."""
        return 0.0 if self._lost_s is None else self._clock() - self._lost_s
