"""Time as a parameter, so that a test or a replay can fix it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

from google.protobuf.timestamp_pb2 import Timestamp


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> datetime:
        """Return the wall clock's time, aware, in UTC."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds that only grow and go on while the machine sleeps (CLOCK_BOOTTIME)."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        """Return the wall clock's time in UTC."""
        return datetime.now(UTC)

    def monotonic_s(self) -> float:
        """Return CLOCK_BOOTTIME in seconds."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


def timestamp(instant: datetime) -> Timestamp:
    """Return an aware datetime as a protobuf Timestamp."""
    stamp = Timestamp()
    stamp.FromDatetime(instant)
    return stamp


def instant(stamp: Timestamp) -> datetime:
    """Return a protobuf Timestamp as an aware datetime in UTC."""
    return stamp.ToDatetime(tzinfo=UTC)
