"""Finds and ends everything that a command started. Standard library only: part of the launcher.

Found is what descends from the supervisor, what is in its session, what carries the operation's marker, and, once
every command that could have started it is over, what was orphaned without a marker.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.primitives import process_table as table
from harness.primitives.process_table import ProcessEntry

# Polling while something is being ended: 1 ms doubling to 50 ms, as the original does.
FIRST_LOOK_S = 0.001
LAST_LOOK_S = 0.05

# Time after SIGKILL when what still stands is given up as unkillable.
KILL_PATIENCE_S = 5.0

# Only younger pids can be descendants, unless pids wrapped around meanwhile: impossible within these ages.
SHORT_AGE_S = 5.0
LONG_AGE_S = 300.0
LARGE_PID_MAX = 1 << 20


@dataclass(slots=True)
class Target:
    """One operation's processes."""

    operation_id: str
    supervisor: ProcessEntry | None
    """Never signalled. None where it is gone and was another launcher's."""

    launcher_pid: int
    is_foreign: bool
    """Started by another launcher: its orphans are not our children."""

    def _candidates(self) -> Iterable[int]:
        pids = table.list_pids()
        if self.is_foreign or self.supervisor is None:
            return pids
        limit_s = LONG_AGE_S if table.pid_max() >= LARGE_PID_MAX else SHORT_AGE_S
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - self.supervisor.start_ticks / table.TICKS_PER_S
        if age_s > limit_s or table.last_pid() < self.supervisor.pid:
            return pids
        return [pid for pid in pids if pid > self.supervisor.pid]

    def _supervisor_pid(self) -> int:
        """The supervisor's pid, which is its session's ID too; -1 where that number may mean others by now."""
        if self.supervisor is None:
            return -1
        holder = table.read_entry(self.supervisor.pid)
        is_taken = holder is not None and holder.start_ticks != self.supervisor.start_ticks
        return -1 if is_taken else self.supervisor.pid

    def find(self, others: Sequence[ProcessEntry]) -> tuple[list[ProcessEntry], list[ProcessEntry]]:
        """Return what is surely the operation's, and strangers that may also be of `others`' operations.

        Args:
            others: Supervisors of this launcher's other commands that run.
        """
        supervisor_pid = self._supervisor_pid()
        excluded = {self.launcher_pid, supervisor_pid, *(other.pid for other in others)}
        entries = table.read_entries(pid for pid in self._candidates() if pid not in excluded)
        own = {pid: entry for pid, entry in entries.items() if self._is_own(entry, supervisor_pid)}
        other_pids = {other.pid for other in others}
        strangers = {}
        for pid, entry in entries.items():
            if pid in own:
                continue
            if table.descends_from(entry, own.keys() | {supervisor_pid}, entries):
                own[pid] = entry
            elif self._is_orphan(entry, entries, other_pids):
                strangers[pid] = entry
        if self.supervisor is not None:
            oldest = min((other.start_ticks for other in others), default=None)
            for pid, entry in list(strangers.items()):
                if oldest is None or entry.start_ticks < oldest:
                    own[pid] = strangers.pop(pid)
        return list(own.values()), list(strangers.values())

    def _is_own(self, entry: ProcessEntry, supervisor_pid: int) -> bool:
        return entry.session == supervisor_pid or table.carries_marker(entry.pid, self.operation_id)

    def _is_orphan(self, entry: ProcessEntry, entries: dict[int, ProcessEntry], others: set[int]) -> bool:
        """Whether an orphan of an unknown command, or below one: not in another's session and without a marker."""
        if self.is_foreign or entry.session in others or not table.descends_from(entry, {self.launcher_pid}, entries):
            return False
        return table.marker_of(entry.pid) is None


@dataclass(slots=True)
class Ending:
    """SIGTERM, grace, SIGKILL, until nothing is found any more."""

    target: Target
    grace_s: float
    found: int = 0
    """How many processes there were at the beginning."""

    survivors: int = 0
    next_look_s: float = 0.0
    _interval_s: float = FIRST_LOOK_S
    _kill_from_s: float = 0.0
    _known: dict[int, ProcessEntry] = field(default_factory=dict)

    def begin(self, entries: Sequence[ProcessEntry]) -> None:
        """Ask the processes to end."""
        now_s = time.monotonic()
        self.found = len(entries)
        self._kill_from_s = now_s + self.grace_s
        self.next_look_s = now_s + FIRST_LOOK_S
        self._terminate(entries)

    def _terminate(self, entries: Sequence[ProcessEntry]) -> None:
        for entry in entries:
            if table.signal_process(entry, signal.SIGTERM):
                # A stopped process takes the signal once it goes on.
                table.signal_process(entry, signal.SIGCONT)
            self._known[entry.pid] = entry

    def look(self, others: Sequence[ProcessEntry]) -> bool:
        """Go on; return whether it is over."""
        now_s = time.monotonic()
        alive = [entry for entry in self._known.values() if table.is_running(entry.pid, entry.start_ticks)]
        if not alive or now_s >= self._kill_from_s:
            # Looked for afresh only where it may be the end: a full look costs milliseconds.
            alive, _ = self.target.find(others)
        self._interval_s = min(2 * self._interval_s, LAST_LOOK_S)
        self.next_look_s = now_s + self._interval_s
        if not alive:
            return not self._supervisor_runs()
        if now_s >= self._kill_from_s + KILL_PATIENCE_S:
            self.survivors = len(alive)
            return True
        if now_s >= self._kill_from_s:
            for entry in alive:
                table.signal_process(entry, signal.SIGKILL)
                self._known[entry.pid] = entry
        else:
            self._terminate([entry for entry in alive if entry.pid not in self._known])
        return False

    def _supervisor_runs(self) -> bool:
        """Whether the supervisor still has to write its record; it ends by itself once its child is gone."""
        supervisor = self.target.supervisor
        return supervisor is not None and table.is_running(supervisor.pid, supervisor.start_ticks)
