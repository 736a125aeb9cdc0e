"""The state directory: where embedded sessions live. Open in one process, which holds a lock on it for life."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clients.cli.failures import NO_ROOM, CommandError, os_error_text

STATE_DIR_VARIABLE = "UNREAL_AGENT_STATE_DIR"

_LOCK_NAME = "lock"
_SERVER_NAME = "server.json"

# A socket's path has at most 107 bytes (unix(7)); the longest name here is "/operation-manager.sock".
_MAX_SOCKET_DIRECTORY_BYTES = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDirectory:
    """A place on disk and what lies where in it."""

    path: Path
    is_default: bool
    """False where an option named it; then the command that goes on must name it too."""

    @property
    def sessions_path(self) -> Path:
        """The session store's file."""
        return self.path / "sessions.db"

    @property
    def operations_path(self) -> Path:
        """The operation manager's directory."""
        return self.path / "operations"

    @property
    def log_path(self) -> Path:
        """Where the library's warnings go."""
        return self.path / "unreal-agent.log"

    @property
    def lock_path(self) -> Path:
        """The file that the one process which uses the directory locks; holds its pid."""
        return self.path / _LOCK_NAME

    def socket_directory(self) -> Path:
        """Return where services listen: here, or where this path is too long for a socket, a short place of its own.

        Raises:
            CommandError: Somebody else made that place.
        """
        if len(os.fsencode(self.path)) <= _MAX_SOCKET_DIRECTORY_BYTES:
            return self.path
        import hashlib
        import tempfile

        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        place = Path(tempfile.gettempdir()) / f"unreal-agent-{os.getuid()}-{name}"
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise CommandError(
                f"the directory for sockets is not this user's alone ({place})",
                "Remove it, or use a shorter path with --state-dir.",
            )
        return place

    @contextlib.contextmanager
    def hold(self) -> Iterator[int]:
        """Make the directory where it is missing, and keep every other process out until the end of the block.

        Yields the lock's descriptor: a child that inherits it holds the directory too.

        Raises:
            CommandError: It can't be used, or another process uses it.
        """
        descriptor = self._lock()
        try:
            yield descriptor
        finally:
            # The file stays: removing it would let two processes lock two files of the same name.
            os.close(descriptor)

    @contextlib.contextmanager
    def hold_store(self) -> Iterator[None]:
        """Keep a session store that was started alone off the directory until the end of the block.

        Raises:
            CommandError: One serves it.
        """
        # The name of the lock is the store's own: it holds it as long as it has the file open.
        try:
            descriptor = os.open(f"{self.sessions_path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CommandError(
                    f"a session store serves the state directory ({self.path})",
                    "Work with its coordinator by --server, or use another place with --state-dir.",
                ) from error
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def served_at(self, address: str) -> Iterator[None]:
        """Say where the coordinator of a held directory listens, so that commands on it become its clients."""
        path = self.path / _SERVER_NAME
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"pid": os.getpid(), "coordinator": address}), encoding="utf-8")
        os.replace(partial, path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def server_address(self) -> str | None:
        """Return where the coordinator of a directory that is served listens; None where it isn't."""
        try:
            told = json.loads((self.path / _SERVER_NAME).read_text(encoding="utf-8"))
            address, pid = str(told["coordinator"]), int(told["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        # One that was killed leaves its file behind: what it says holds as long as it holds the lock.
        return address if self.holder() == pid else None

    def holder(self) -> int | None:
        """Return the pid of the process that uses the directory; None where nobody does. Takes nothing."""
        try:
            descriptor = os.open(self.lock_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_pid(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return None

    def _lock(self) -> int:
        choose = f"Choose another with --state-dir, or with {STATE_DIR_VARIABLE}."
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileExistsError, NotADirectoryError) as error:
            raise CommandError(f"the state directory is not a directory ({self.path})", choose) from error
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            pid = _read_pid(descriptor)
            os.close(descriptor)
            raise CommandError(
                f"the state directory is in use by another unreal-agent ({self.path}, pid {pid or 'unknown'})",
                "Wait for it or stop it, use another place with --state-dir, or share one: unreal-agent serve all.",
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise self._unusable(error) from error
        return descriptor

    def _unusable(self, error: OSError) -> CommandError:
        if error.errno in NO_ROOM:
            return CommandError(f"the disk is full ({self.path})", "Make room, or use another place with --state-dir.")
        return CommandError(
            f"the state directory can't be written ({self.path}: {os_error_text(error)})",
            f"Choose another with --state-dir, or with {STATE_DIR_VARIABLE}.",
        )


def state_directory(option: str | None, environ: Mapping[str, str]) -> StateDirectory:
    """Return the state directory that an option or the environment names."""
    if option is not None:
        return StateDirectory(path=Path(option).expanduser().absolute(), is_default=False)
    if named := environ.get(STATE_DIR_VARIABLE):
        return StateDirectory(path=Path(named).expanduser().absolute(), is_default=True)
    home = environ.get("XDG_STATE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    base = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"
    return StateDirectory(path=base / "unreal-agent", is_default=True)


def _read_pid(descriptor: int) -> int | None:
    # The holder writes its pid just after it has the lock: for a moment there may be none.
    text = os.pread(descriptor, 32, 0).decode("ascii", errors="replace").strip()
    return int(text) if text.isdigit() else None
