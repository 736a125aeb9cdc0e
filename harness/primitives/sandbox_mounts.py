"""What of the machine a command in a bubblewrap sandbox sees, as bubblewrap's arguments.

Of the system, what every user may read; the workspace, which alone may be written; and nothing else of the machine.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_SYSTEM = ("/usr", "/etc", "/opt", "/nix/store", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")

# Directories of the system or of the sandbox's own: none may be a workspace, nor lie in one.
_RESERVED = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run", "/sbin", "/sys")
_RESERVED_BUT_LOCAL = ("/usr",)

# A tmpfs of this size holds a directory and nothing else.
_EMPTY_BYTES = "4096"


class WorkspaceRefusedError(Exception):
    """Raised for a workspace that can't be the only thing that a command may write; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mounts:
    """The mounts that are the same for every command."""

    fixed: Sequence[tuple[str, Sequence[str]]]
    """Place and arguments."""

    hidden: Sequence[str]
    """Real paths."""

    shown: Sequence[str]
    """Real paths of the machine that are mounted; below them what is hidden must be covered."""

    @classmethod
    def of_this_host(
        cls, *, home: str, readable: Sequence[str], hidden: Sequence[str], has_network: bool, scratch_bytes: int
    ) -> Mounts:
        """Look at the machine.

        Args:
            home: The commands' HOME: a directory of their own there, gone with the command. Empty: none.
            readable: Further paths that may be read.
            hidden: Paths that may never be seen.
            has_network: Names are resolved then.
            scratch_bytes: Room of each of /tmp, /dev/shm and HOME, which are memory.
        """
        scratch = ("--size", str(scratch_bytes), "--perms", "1777", "--tmpfs")
        fixed: list[tuple[str, Sequence[str]]] = [
            ("/proc", ("--proc", "/proc")),
            ("/dev", ("--dev", "/dev")),
            ("/dev/shm", (*scratch, "/dev/shm")),
            ("/tmp", (*scratch, "/tmp")),
            ("/var/tmp", (*scratch, "/var/tmp")),
        ]
        shown = []
        for path in _SYSTEM:
            if os.path.islink(path):
                fixed.append((path, ("--symlink", os.readlink(path), path)))
            elif os.path.isdir(path):
                fixed.append((path, ("--ro-bind", path, path)))
                shown.append(path)
        fixed += [(path, _cover(path)) for path in _private_paths("/etc")]
        resolver = os.path.realpath("/etc/resolv.conf")
        if has_network and os.path.isfile(resolver) and not resolver.startswith("/etc/"):
            fixed.append((resolver, ("--ro-bind", resolver, resolver)))
        real_home = os.path.realpath(home) if os.path.isabs(home) else ""
        is_of_system = any(_is_below(real_home, path) or _is_below(path, real_home) for path in (*_SYSTEM, *_RESERVED))
        if real_home and not is_of_system and real_home not in ("/tmp", "/var/tmp"):
            fixed.append((real_home, ("--size", str(scratch_bytes), "--perms", "0700", "--tmpfs", real_home)))
        for path in map(os.path.realpath, readable):
            fixed.append((path, ("--ro-bind", path, path)))
            shown.append(path)
        return cls(fixed=fixed, hidden=[os.path.realpath(path) for path in hidden], shown=shown)

    def words(self, workspace: str) -> list[str]:
        """Return the arguments that make a command's view of the machine.

        Raises:
            WorkspaceRefusedError: See there.
        """
        real = os.path.realpath(workspace)
        self._check(workspace, real)
        mounts = [*self.fixed, (real, ("--bind", real, real))]
        shown = (*self.shown, real)
        covered = [path for path in self.hidden if any(_is_below(path, above) for above in shown)]
        mounts += [(path, _cover(path)) for path in covered if os.path.lexists(path)]
        # What lies above first: each later mount covers a part of an earlier one. In this order of one place: a
        # directory of our own, the workspace, what is hidden.
        mounts.sort(key=lambda mount: 0 if mount[0] == "/" else mount[0].count("/"))
        return [word for _, words in mounts for word in words]

    def _check(self, workspace: str, real: str) -> None:
        for path in (*_RESERVED, *_RESERVED_BUT_LOCAL):
            if _is_below(path, real) or (_is_below(real, path) and not real.startswith("/usr/local/")):
                raise WorkspaceRefusedError(f"the workspace {workspace!r} holds or is a part of the system ({path})")
        if real in ("/tmp", "/var/tmp"):
            raise WorkspaceRefusedError(f"the workspace {workspace!r} is where other programs keep their files")
        for path in self.hidden:
            if _is_below(real, path):
                raise WorkspaceRefusedError(f"the workspace {workspace!r} lies in {path!r}, which no command may see")


def _is_below(path: str, directory: str) -> bool:
    """Whether a path is a directory or lies in it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _cover(path: str) -> Sequence[str]:
    if os.path.isdir(path):
        return ("--size", _EMPTY_BYTES, "--perms", "0555", "--tmpfs", path, "--remount-ro", path)
    return ("--ro-bind", os.devnull, path)


def _private_paths(directory: str) -> Iterator[str]:
    """Yield what not every user may read: the sandbox's user may own it. Not the parts of what is closed whole."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IXOTH:
            yield from _private_paths(entry.path)
        elif stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and not mode & stat.S_IROTH):
            yield entry.path
