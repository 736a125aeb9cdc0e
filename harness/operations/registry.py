"""The step machines that a manager runs, by type and version. A constant table; does no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from harness.operations.operations import StepMachine
from harness.primitives.primitives import Dispatch, Event

Machine: TypeAlias = StepMachine[Event, Dispatch]
"""A step machine over the events and dispatches of `harness.primitives.primitives`."""


class StepMachines:
    """Finds the machine of an operation."""

    def __init__(self, machines: Iterable[Machine]) -> None:
        """Take machines; two of one type and version are a programming error (ValueError)."""
        self._machines: dict[tuple[str, int], Machine] = {}
        for machine in machines:
            key = (machine.operation_type, machine.type_version)
            if key in self._machines:
                raise ValueError(f"two step machines for {key[0]}/{key[1]}")
            self._machines[key] = machine

    def find(self, operation_type: str, type_version: int) -> Machine | None:
        """Return the machine, or None where this release has none."""
        return self._machines.get((operation_type, type_version))

    def __iter__(self) -> Iterator[Machine]:
        """Iterate by type and version."""
        return iter(machine for _, machine in sorted(self._machines.items()))
