"""Opens files of a workspace. What was opened decides whether it lies inside, never the text of the path.

A path is opened without effect (O_PATH: no device is touched, no FIFO waits), the kernel is asked where the opened
thing really lies and what it is, and only then is that very thing opened for reading. So a file that is swapped for a
link in between changes nothing. Whoever may read the manager's files can do better than this; it confines paths that a
model or a repository chose.

Blocking: call it from a thread or a worker process. Linux only (needs /proc).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from harness.errors import (
    FailedPreconditionError,
    HarnessError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
)
from harness.primitives.descriptors import NO_DESCRIPTOR, no_descriptor_error

_READ_CHUNK_BYTES = 1024 * 1024

_SPECIAL_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfinedFile:
    """A regular file of a workspace, open for reading."""

    descriptor: int
    """Belongs to the context manager that gave it."""

    path: str
    """Where it really lies, relative to the workspace; links are resolved."""

    size_bytes: int
    """Size when it was opened."""


@contextmanager
def open_directory(path: str) -> Iterator[int]:
    """Give a descriptor of a directory, following links: the root that paths are confined to.

    Raises:
        NotFoundError: WORKSPACE_NOT_FOUND, it is missing or no directory.
        PermissionDeniedError: WORKSPACE_NOT_PERMITTED.
        ResourceExhaustedError: TOO_MANY_OPEN_FILES.
        InvalidArgumentError: PATH_INVALID.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except ValueError as error:
        raise InvalidArgumentError(f"{path!r} can't be a path: {error}", reason="PATH_INVALID") from error
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            message = f"workspace {path!r} can't be opened: permission denied"
            raise PermissionDeniedError(message, reason="WORKSPACE_NOT_PERMITTED") from error
        if error.errno in NO_DESCRIPTOR:
            raise no_descriptor_error(f"workspace {path!r}") from error
        message = f"workspace {path!r} is not a directory: {os.strerror(error.errno or 0)}"
        raise NotFoundError(message, reason="WORKSPACE_NOT_FOUND") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_file(root: int, path: str) -> Iterator[ConfinedFile]:
    """Open a regular file inside a root for reading; never waits for a FIFO or a device.

    Args:
        root: Descriptor of `open_directory`.
        path: Relative to the root, or absolute. Links and ".." are followed as long as the file lies inside.

    Raises:
        NotFoundError: FILE_NOT_FOUND.
        PermissionDeniedError: FILE_OUTSIDE_WORKSPACE, FILE_NOT_PERMITTED.
        FailedPreconditionError: FILE_IS_DIRECTORY, FILE_NOT_REGULAR, FILE_LINK_LOOP, FILE_UNREADABLE.
        InvalidArgumentError: PATH_INVALID (empty, NUL, too long).
    """
    with _open_path(root, path) as (found, inside):
        _check_kind(path, os.fstat(found).st_mode)
        try:
            descriptor = os.open(_link(found), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            raise _open_error(root, path, error) from error
    try:
        yield ConfinedFile(descriptor=descriptor, path=inside, size_bytes=os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def read_file(root: int, path: str, *, max_bytes: int) -> bytes:
    """Return a confined file's whole content; see `open_file`.

    Args:
        root: Descriptor of `open_directory`.
        path: Relative to the root, or absolute.
        max_bytes: Larger files are refused before anything is read.

    Raises:
        ResourceExhaustedError: FILE_TOO_LARGE.
        FailedPreconditionError: FILE_EMPTY; FILE_CHANGED where it was written to meanwhile; what `open_file` raises.
    """
    with open_file(root, path) as file:
        before = os.fstat(file.descriptor)
        if before.st_size > max_bytes:
            message = f"file {path!r} has {before.st_size:,} bytes; at most {max_bytes:,} are read"
            raise ResourceExhaustedError(message, reason="FILE_TOO_LARGE")
        try:
            content = _read_at_most(file.descriptor, before.st_size + 1)
        except OSError as error:
            raise _unreadable(path, error) from error
        after = os.fstat(file.descriptor)
        if len(content) != before.st_size or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise FailedPreconditionError(
                f"file {path!r} was written to while it was read; try again when it is complete", reason="FILE_CHANGED"
            )
    if not content:
        raise FailedPreconditionError(f"file {path!r} is empty", reason="FILE_EMPTY")
    return content


def list_directory(root: int, path: str) -> Sequence[str]:
    """Return the names in a directory inside a root, sorted.

    Raises:
        NotFoundError: FILE_NOT_FOUND.
        FailedPreconditionError: FILE_NOT_DIRECTORY, or as `open_file`.
        PermissionDeniedError: As `open_file`.
    """
    with _open_path(root, path) as (found, _):
        if not stat.S_ISDIR(os.fstat(found).st_mode):
            raise FailedPreconditionError(f"{path!r} is not a directory", reason="FILE_NOT_DIRECTORY")
        try:
            return sorted(os.listdir(_link(found)))
        except OSError as error:
            raise _open_error(root, path, error) from error


def real_path(descriptor: int) -> str:
    """Return where an opened file or directory lies now, by the kernel."""
    return os.readlink(_link(descriptor))


@contextmanager
def _open_path(root: int, path: str) -> Iterator[tuple[int, str]]:
    """Open a path without effect and give its descriptor and its place below the root."""
    if not path:
        raise InvalidArgumentError("the path is empty", reason="PATH_INVALID")
    try:
        found = os.open(path, os.O_PATH | os.O_CLOEXEC, dir_fd=root)
    except ValueError as error:
        raise InvalidArgumentError(f"{path!r} can't be a path: {error}", reason="PATH_INVALID") from error
    except OSError as error:
        raise _open_error(root, path, error) from error
    try:
        inside = _path_inside(root, found)
        if inside is None:
            raise _outside(path)
        yield found, inside
    finally:
        os.close(found)


def _link(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _path_inside(root: int, found: int) -> str | None:
    """Return the path below the root of what was opened; "" for the root itself, None outside."""
    if os.path.samestat(os.fstat(root), os.fstat(found)):
        return ""
    root_path = real_path(root)
    prefix = root_path if root_path.endswith("/") else f"{root_path}/"
    path = real_path(found)
    return path[len(prefix) :] if path.startswith(prefix) else None


def _check_kind(path: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise FailedPreconditionError(f"{path!r} is a directory, not a file", reason="FILE_IS_DIRECTORY")
    kind = _SPECIAL_KINDS.get(stat.S_IFMT(mode), "a special file")
    raise FailedPreconditionError(f"{path!r} is {kind}, not a regular file", reason="FILE_NOT_REGULAR")


def _read_at_most(descriptor: int, count: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < count:
        piece = os.read(descriptor, min(_READ_CHUNK_BYTES, count - len(pieces)))
        if not piece:
            break
        pieces += piece
    return bytes(pieces)


def _open_error(root: int, path: str, error: OSError) -> HarnessError:
    """Say why a path could not be opened. What is missing or closed outside the root is only called outside."""
    if error.errno in NO_DESCRIPTOR:
        return no_descriptor_error(f"file {path!r}")
    if error.errno == errno.ENAMETOOLONG:
        return InvalidArgumentError("the path is too long for the file system", reason="PATH_INVALID")
    if error.errno == errno.ELOOP:
        return FailedPreconditionError(f"{path!r} is a link that leads back to itself", reason="FILE_LINK_LOOP")
    if _leads_outside(root, path):
        return _outside(path)
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return NotFoundError(f"file {path!r} does not exist", reason="FILE_NOT_FOUND")
    if error.errno in (errno.EACCES, errno.EPERM):
        return PermissionDeniedError(f"file {path!r} can't be read: permission denied", reason="FILE_NOT_PERMITTED")
    return _unreadable(path, error)


def _leads_outside(root: int, path: str) -> bool:
    """Return whether the longest part of a path that can be opened lies outside the root."""
    parts = path.rstrip("/").split("/")
    for length in range(len(parts) - 1, -1, -1):
        ancestor = "/".join(parts[:length]) or ("/" if path.startswith("/") else ".")
        try:
            found = os.open(ancestor, os.O_PATH | os.O_CLOEXEC, dir_fd=root)
        except OSError:
            continue
        try:
            return _path_inside(root, found) is None
        finally:
            os.close(found)
    return path.startswith("/")


def _outside(path: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{path!r} lies outside the workspace; only files inside it can be read", reason="FILE_OUTSIDE_WORKSPACE"
    )


def _unreadable(path: str, error: OSError) -> FailedPreconditionError:
    message = f"file {path!r} can't be read: {os.strerror(error.errno or 0)}"
    return FailedPreconditionError(message, reason="FILE_UNREADABLE")
