"""What the doctor finds, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How a finding matters."""

    GOOD = "good"
    HINT = "hint"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's."""

    level: Level
    subject: str
    text: str
    what_to_type: str = ""
    """Empty where nothing need be done."""
