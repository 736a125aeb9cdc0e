"""Finds and ends everything that a command started. Standard library only: part of the launcher.

Found is what descends from the supervisor, what is in its session, what carries the operation's marker, and, once
every command that could have started it is over, what was orphaned without a marker.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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


class Snapshot:
    """The processes at one moment, looked at once for all commands that are over or being ended."""

    def __init__(
        self, pids: Iterable[int], launcher_pid: int, running: Mapping[int, ProcessEntry], targets: Sequence[Target]
    ) -> None:
        """Read what the targets need; supervisors and the launcher itself are left out.

        Args:
            pids: Whom to look at.
            launcher_pid: This launcher.
            running: The supervisors of this launcher's commands that run, by pid.
            targets: Whom to look for.
        """
        supervisors = {target.supervisor.pid for target in targets if target.supervisor is not None}
        self.launcher_pid = launcher_pid
        self.running = running
        self.entries = table.read_entries(
            pid for pid in pids if pid != launcher_pid and pid not in running and pid not in supervisors
        )
        self.children: defaultdict[int, list[int]] = defaultdict(list)
        self.sessions: defaultdict[int, list[int]] = defaultdict(list)
        self.marked: defaultdict[str, list[int]] = defaultdict(list)
        self.unmarked: set[int] = set()
        for pid, entry in self.entries.items():
            self.children[entry.parent_pid].append(pid)
            self.sessions[entry.session].append(pid)
            # In the session of a running command it is that command's: its environment, dear to read, tells nothing.
            if entry.session not in running:
                marker = table.marker_of(pid)
                if marker is None:
                    self.unmarked.add(pid)
                else:
                    self.marked[marker].append(pid)

    def family(self, pids: Iterable[int]) -> dict[int, ProcessEntry]:
        """Return processes and all that descends from them, by pid."""
        found: dict[int, ProcessEntry] = {}
        waiting = list(pids)
        while waiting:
            pid = waiting.pop()
            if pid not in found and pid in self.entries:
                found[pid] = self.entries[pid]
                waiting += self.children.get(pid, ())
        return found


def take_snapshot(targets: Sequence[Target], launcher_pid: int, running: Mapping[int, ProcessEntry]) -> Snapshot:
    """Look at every process that can be a target's."""
    first_pid = min((target.first_pid() for target in targets), default=0)
    pids = (pid for pid in table.list_pids() if pid > first_pid)
    return Snapshot(pids, launcher_pid, running, targets)


@dataclass(slots=True)
class Target:
    """One operation's processes."""

    operation_id: str
    supervisor: ProcessEntry | None
    """Never asked to end. None where it is gone and was another launcher's."""

    is_foreign: bool
    """Started by another launcher: its orphans are not our children."""

    def first_pid(self) -> int:
        """Return a pid below which no process of it can be; 0 where that can't be said."""
        if self.is_foreign or self.supervisor is None:
            return 0
        limit_s = LONG_AGE_S if table.pid_max() >= LARGE_PID_MAX else SHORT_AGE_S
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - self.supervisor.start_ticks / table.TICKS_PER_S
        is_wrapped = age_s > limit_s or table.last_pid() < self.supervisor.pid
        return 0 if is_wrapped else self.supervisor.pid

    def _supervisor_pid(self) -> int:
        """The supervisor's pid, which is its session's ID too; -1 where that number may mean others by now."""
        if self.supervisor is None:
            return -1
        holder = table.read_entry(self.supervisor.pid)
        is_taken = holder is not None and holder.start_ticks != self.supervisor.start_ticks
        return -1 if is_taken else self.supervisor.pid

    def find(self, snapshot: Snapshot) -> tuple[list[ProcessEntry], list[ProcessEntry]]:
        """Return what is surely the operation's, and strangers that may also be of commands that run."""
        pid = self._supervisor_pid()
        seeds = [
            *snapshot.sessions.get(pid, ()),
            *snapshot.children.get(pid, ()),
            *snapshot.marked.get(self.operation_id, ()),
        ]
        own = snapshot.family(seeds)
        if self.is_foreign:
            return list(own.values()), []
        orphans = snapshot.family(snapshot.children.get(snapshot.launcher_pid, ()))
        strangers = [entry for pid, entry in orphans.items() if pid in snapshot.unmarked and pid not in own]
        if strangers:
            others = [entry.start_ticks for other, entry in snapshot.running.items() if other != pid]
            oldest = min(others, default=None)
            # Whoever could have started it is over.
            surely = [entry for entry in strangers if oldest is None or entry.start_ticks < oldest]
            strangers = [entry for entry in strangers if entry not in surely]
            own.update((entry.pid, entry) for entry in surely)
        return list(own.values()), strangers


@dataclass(slots=True)
class Ending:
    """SIGTERM, grace, SIGKILL, until nothing is found any more."""

    target: Target
    grace_s: float
    found: int = 0
    """How many processes there were at the beginning, without those of a sandbox itself."""

    survivors: int = 0
    next_look_s: float = 0.0
    _interval_s: float = FIRST_LOOK_S
    _kill_from_s: float = 0.0
    _known: dict[int, ProcessEntry] = field(default_factory=dict)

    def begin(self, entries: Sequence[ProcessEntry]) -> None:
        """Ask the processes to end."""
        now_s = time.monotonic()
        self.found = sum(not entry.is_sandbox for entry in entries)
        self._kill_from_s = now_s + self.grace_s
        self.next_look_s = now_s + FIRST_LOOK_S
        self._terminate(entries)

    def _terminate(self, entries: Sequence[ProcessEntry]) -> None:
        # Parents first: a shell whose child is gone before it is asked itself may exit without its trap.
        for entry in sorted(entries, key=lambda entry: (entry.start_ticks, entry.pid)):
            # A sandbox that is asked to end is gone at once, and with it the exit of a command that still tidies up.
            if not entry.is_sandbox and table.signal_process(entry, signal.SIGTERM):
                # A stopped process takes the signal once it goes on.
                table.signal_process(entry, signal.SIGCONT)
            self._known[entry.pid] = entry

    def needs_snapshot(self) -> bool:
        """Whether to look for its processes afresh: it may be the end, or the time to kill. That costs milliseconds."""
        is_killing = time.monotonic() >= self._kill_from_s
        return is_killing or not any(table.is_running(each.pid, each.start_ticks) for each in self._known.values())

    def wait(self) -> None:
        """Look again a little later than the last time."""
        self._interval_s = min(2 * self._interval_s, LAST_LOOK_S)
        self.next_look_s = time.monotonic() + self._interval_s

    def look(self, snapshot: Snapshot) -> bool:
        """Go on; return whether it is over."""
        now_s = time.monotonic()
        alive, _ = self.target.find(snapshot)
        self.wait()
        if not alive:
            return not self._supervisor_runs(snapshot)
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

    def _supervisor_runs(self, snapshot: Snapshot) -> bool:
        """Whether the supervisor has still to write its record, or its exit has still to be told of before this end."""
        supervisor = self.target.supervisor
        if supervisor is None:
            return False
        # Stopped by somebody it would never write.
        table.signal_process(supervisor, signal.SIGCONT)
        return supervisor.pid in snapshot.running or table.is_running(supervisor.pid, supervisor.start_ticks)
