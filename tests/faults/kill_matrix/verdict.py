"""What a check of one system found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.faults.kill_matrix.fire import Kill

INPUTS: Final = "inputs"
RESULTS: Final = "results"
EFFECTS: Final = "effects"
WATCHES: Final = "watches"
OTHERS: Final = "others"
AREAS: Final = {
    INPUTS: "lost or repeated inputs",
    RESULTS: "lost or repeated results",
    EFFECTS: "repeated effects",
    WATCHES: "gaps or repeats in watches",
    OTHERS: "other violations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that must not be."""

    area: str
    text: str
    session_id: str = ""
    """Empty: not that of one session."""


@dataclass(slots=True)
class Verdict:
    """What was counted, and what is wrong."""

    sessions: int = 0
    inputs: int = 0
    calls: int = 0
    changes: int = 0
    unknown: int = 0
    """Operations whose outcome is unknown."""

    violations: list[Violation] = field(default_factory=list)
    lives: dict[str, tuple[float, float]] = field(default_factory=dict)
    """From when to when a client knew of each session; monotonic."""

    def note(self, area: str, text: str, session_id: str = "") -> None:
        """Note a violation."""
        self.violations.append(Violation(area=area, session_id=session_id, text=f"{session_id}: {text}"))

    def suspected(self, area: str, kills: Sequence[Kill]) -> int:
        """Return how many violations of an area are in sessions that lived through one of some kills."""
        count = 0
        for violation in self.violations:
            begin_s, end_s = self.lives.get(violation.session_id, (-math.inf, math.inf))
            count += violation.area == area and any(begin_s <= kill.at_s <= end_s for kill in kills)
        return count
