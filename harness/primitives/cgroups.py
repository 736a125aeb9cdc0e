"""Control groups in which a command's memory and processes are bounded, where this process may make some.

Version 2 where its controllers are handed down to us (systemd: `Delegate=yes` with `DelegateSubgroup=`), version 1
where its directories may be written. Blocks; one group per command, in each hierarchy that is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids")

_PREFIX = "unreal-agent-"

# A group without processes that is younger may be one that its command is about to join.
_YOUNG_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroups:
    """Where groups are made. Nothing is held open."""

    memory: Path | None = None
    """The directory in which groups with a memory limit are made; None: there is none."""

    pids: Path | None = None
    version: int = 2

    def make(self, directory: str, *, max_memory_bytes: int, max_processes: int) -> Sequence[str]:
        """Make the group of a command and return the files by which a process joins it, "0" written to each.

        Args:
            directory: The command's own directory, from which the group gets its name.
            max_memory_bytes: 0: no limit.
            max_processes: Threads count too.

        Raises:
            OSError: It can't be made.
        """
        name = _name(directory)
        limits: list[tuple[Path | None, str, int]] = [(self.pids, "pids.max", max_processes)]
        if max_memory_bytes:
            limits.append((self.memory, "memory.max" if self.version == 2 else _V1_MEMORY, max_memory_bytes))
        groups = []
        for parent, file, limit in limits:
            if parent is None:
                continue
            group = parent / name
            group.mkdir(exist_ok=True)
            (group / file).write_text(str(limit))
            if file == "memory.max":
                with contextlib.suppress(OSError):  # a kernel without swap has no such file
                    (group / "memory.swap.max").write_text("0")
            groups.append(str(group / "cgroup.procs"))
        return list(dict.fromkeys(groups))

    def remove(self, directory: str) -> bool:
        """Remove the group of a command that is over; return False while something is still in it."""
        name = _name(directory)
        removed = [_is_removed(parent / name) for parent in self._parents()]
        return all(removed)

    def sweep(self) -> None:
        """Remove groups that nobody is in and nobody is about to join: their manager was killed."""
        for parent in self._parents():
            with contextlib.suppress(OSError):
                for group in parent.glob(f"{_PREFIX}*"):
                    if time.time() - group.stat().st_mtime > _YOUNG_S:
                        _is_removed(group)

    def _parents(self) -> Iterator[Path]:
        yield from {parent for parent in (self.memory, self.pids) if parent is not None}


_V1_MEMORY = "memory.limit_in_bytes"


def _name(directory: str) -> str:
    return _PREFIX + hashlib.sha256(os.fsencode(directory)).hexdigest()[:24]


def _is_removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def find_cgroups(proc: Path = Path("/proc/self")) -> Cgroups:
    """Return where this process may make groups.

    Args:
        proc: The directory of the process that asks.
    """
    try:
        own = dict(_own_paths((proc / "cgroup").read_text()))
        mounts = list(_mounts((proc / "mountinfo").read_text()))
    except OSError:
        return Cgroups()
    for kind, _, root, place in mounts:
        if kind == "cgroup2" and "" in own:
            parent = _delegated(_place(own[""], root, place), Path(place))
            if parent is not None:
                return Cgroups(memory=parent, pids=parent)
    found: dict[str, Path] = {}
    for kind, names, root, place in mounts:
        for controller in CONTROLLERS:
            if kind == "cgroup" and controller in names and controller in own:
                parent = _place(own[controller], root, place)
                if os.access(parent, os.W_OK):
                    found[controller] = parent
    return Cgroups(memory=found.get("memory"), pids=found.get("pids"), version=1)


def _own_paths(text: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each controller, "" for version 2."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _mounts(text: str) -> Iterator[tuple[str, Sequence[str], str, str]]:
    """Yield type, options of the file system, root and place of each mount of control groups."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(kinds) >= 3 and kinds[0] in ("cgroup", "cgroup2"):
            yield kinds[0], kinds[2].split(","), fields[3], fields[4]


def _place(path: str, root: str, place: str) -> Path:
    """Return where a group lies: in a container the mount begins at the container's own group."""
    below = path.removeprefix(root.rstrip("/")) if path.startswith(root.rstrip("/") + "/") or path == root else path
    return Path(place) / below.lstrip("/")


def _delegated(own: Path, top: Path) -> Path | None:
    """Return our group or the one above, if it hands memory and pids down and may be written.

    A group that has processes hands nothing down, so the one above is the rule: see `DelegateSubgroup=` of systemd.
    """
    for group in (own, own.parent):
        if not group.is_relative_to(top):
            break
        try:
            handed = (group / "cgroup.subtree_control").read_text().split()
            offered = (group / "cgroup.controllers").read_text().split()
        except OSError:
            continue
        if not (os.access(group, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK)):
            continue
        wanted = [controller for controller in CONTROLLERS if controller not in handed]
        if any(controller not in offered for controller in wanted):
            continue
        with contextlib.suppress(OSError):
            if wanted:
                (group / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in wanted))
            return group
    return None


def describe(groups: Cgroups) -> Mapping[str, str]:
    """Return what bounds each of `CONTROLLERS`, as "cgroup v1"; empty where nothing does."""
    places = {"memory": groups.memory, "pids": groups.pids}
    return {name: f"cgroup v{groups.version}" if place else "" for name, place in places.items()}
