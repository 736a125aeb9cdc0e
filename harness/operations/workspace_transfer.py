"""Copies files into and out of a workspace, addressed by content. Writes nothing outside it, follows no link in it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import islice

from harness.errors import FailedPreconditionError, InvalidArgumentError
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

PIECE_BYTES = 512 * 1024
ENTRIES_PER_MESSAGE = 256
MAX_ENTRIES = 1_000_000
MAX_PATH_BYTES = 4_096

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DIGEST = re.compile(r"[0-9a-f]{64}")


def split_path(path: str) -> list[str]:
    """Return the components of a relative path.

    Raises:
        InvalidArgumentError: INVALID_PATH, it is absolute, empty, too long, or has "." or ".." in it.
    """
    names = path.split("/")
    is_long = len(path.encode()) > MAX_PATH_BYTES
    if is_long or "\0" in path or any(name in ("", ".", "..") for name in names):
        raise InvalidArgumentError(f"{path[:200]!r} is no path within a workspace", reason="INVALID_PATH")
    return names


@contextlib.contextmanager
def open_parent(root: int, path: str, *, is_made: bool) -> Iterator[tuple[int, str]]:
    """Open the directory that holds a path, from the workspace's descriptor down; yield it and the last name.

    Raises:
        FailedPreconditionError: PATH_LEAVES_WORKSPACE, a component is a link or a file.
    """
    *parents, last = split_path(path)
    current = os.dup(root)
    try:
        for name in parents:
            if is_made:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=current)
            try:
                deeper = os.open(name, _DIRECTORY, dir_fd=current)
            except OSError as error:
                raise FailedPreconditionError(
                    f"{name!r} in {path!r} is not a directory of the workspace: {error.strerror}",
                    reason="PATH_LEAVES_WORKSPACE",
                ) from error
            os.close(current)
            current = deeper
        yield current, last
    finally:
        os.close(current)


def _open_workspace(workspace: str, *, is_made: bool) -> int:
    if not workspace.startswith("/") or "\0" in workspace:
        raise InvalidArgumentError("workspace must be an absolute path", reason="INVALID_WORKSPACE")
    try:
        if is_made:
            os.makedirs(workspace, exist_ok=True)
        return os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise FailedPreconditionError(
            f"the workspace {workspace!r} can't be opened: {error.strerror}", reason="WORKSPACE_UNAVAILABLE"
        ) from error


def _digest_of(directory: int, name: str) -> str | None:
    """Return the digest of a regular file, or None where there is none."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(slots=True)
class _Content:
    """A content that is being received."""

    paths: list[manager_pb2.WorkspaceEntry] = field(default_factory=list)
    temporary: str = ""
    received: int = 0
    hash: hashlib._Hash = field(default_factory=hashlib.sha256)


class _Upload:
    """One upload; every method blocks."""

    def __init__(self, workspace: str) -> None:
        self.root = _open_workspace(workspace, is_made=True)
        self.completed_entries = 0
        self.completed_bytes = 0
        self._entries = 0
        self._wanted: dict[str, _Content] = {}

    def close(self) -> None:
        for content in self._wanted.values():
            if content.temporary:
                self._remove_temporary(content)
        os.close(self.root)

    def place(self, entries: list[manager_pb2.WorkspaceEntry]) -> list[str]:
        """Put entries in place as far as that is possible; return the contents that are missing."""
        missing = []
        for entry in entries:
            self._entries += 1
            if self._entries > MAX_ENTRIES:
                raise InvalidArgumentError(f"more than {MAX_ENTRIES} entries", reason="TOO_MANY_ENTRIES")
            with open_parent(self.root, entry.path, is_made=True) as (directory, name):
                match entry.WhichOneof("kind"):
                    case "directory":
                        with contextlib.suppress(FileExistsError):
                            os.mkdir(name, 0o700, dir_fd=directory)
                        descriptor = os.open(name, _DIRECTORY, dir_fd=directory)
                        os.fchmod(descriptor, (entry.mode or 0o755) & 0o777)
                        os.close(descriptor)
                        self.completed_entries += 1
                    case "symlink_target":
                        temporary = _temporary_name()
                        os.symlink(entry.symlink_target, temporary, dir_fd=directory)
                        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
                        self.completed_entries += 1
                    case "file":
                        missing += self._place_file(entry, directory, name)
                    case _:
                        raise InvalidArgumentError(f"{entry.path!r} has no kind", reason="INVALID_ENTRY")
        return missing

    def _place_file(self, entry: manager_pb2.WorkspaceEntry, directory: int, name: str) -> list[str]:
        digest = entry.file.digest
        if _DIGEST.fullmatch(digest) is None:
            raise InvalidArgumentError(f"the digest of {entry.path!r} is no SHA-256", reason="INVALID_ENTRY")
        if _digest_of(directory, name) == digest:
            os.chmod(name, (entry.mode or 0o644) & 0o777, dir_fd=directory)
            self.completed_entries += 1
            return []
        if digest not in self._wanted:
            self._wanted[digest] = _Content(paths=[entry])
            if entry.file.size_bytes == 0:
                self.write(manager_pb2.WorkspaceChunk(digest=digest), size=0)
                return []
            return [digest]
        self._wanted[digest].paths.append(entry)
        return []

    def write(self, chunk: manager_pb2.WorkspaceChunk, *, size: int | None = None) -> None:
        """Take a piece; once its content is whole, put the files in place that have it."""
        content = self._wanted.get(chunk.digest)
        if content is None:
            return
        if chunk.offset != content.received:
            raise InvalidArgumentError(
                f"content {chunk.digest} continues at {content.received}, not {chunk.offset}", reason="WRONG_OFFSET"
            )
        entry = content.paths[0]
        with open_parent(self.root, entry.path, is_made=True) as (directory, _):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            content.temporary = content.temporary or _temporary_name()
            with open(os.open(content.temporary, flags, 0o600, dir_fd=directory), "wb") as file:
                file.write(chunk.data)
        content.received += len(chunk.data)
        content.hash.update(chunk.data)
        self.completed_bytes += len(chunk.data)
        if content.received >= (entry.file.size_bytes if size is None else size):
            self._finish(chunk.digest, content)

    def _finish(self, digest: str, content: _Content) -> None:
        if content.hash.hexdigest() != digest:
            raise InvalidArgumentError(f"what came as {digest} has another digest", reason="DIGEST_MISMATCH")
        first, *others = content.paths
        for other in others:
            with (
                open_parent(self.root, first.path, is_made=False) as (source, _),
                open_parent(self.root, other.path, is_made=True) as (directory, name),
            ):
                temporary = _temporary_name()
                _copy(source, content.temporary, directory, temporary)
                self._move(directory, temporary, name, other.mode)
        with open_parent(self.root, first.path, is_made=False) as (directory, name):
            self._move(directory, content.temporary, name, first.mode)
        del self._wanted[digest]

    def _move(self, directory: int, temporary: str, name: str, mode: int) -> None:
        os.chmod(temporary, (mode or 0o644) & 0o777, dir_fd=directory)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        self.completed_entries += 1

    def _remove_temporary(self, content: _Content) -> None:
        with (
            contextlib.suppress(OSError, FailedPreconditionError),
            open_parent(self.root, content.paths[0].path, is_made=False) as (directory, _),
        ):
            os.unlink(content.temporary, dir_fd=directory)

    def progress(self, missing: list[str]) -> manager_pb2.UploadWorkspaceResponse:
        return manager_pb2.UploadWorkspaceResponse(
            missing_digests=missing, completed_entries=self.completed_entries, completed_bytes=self.completed_bytes
        )


def _temporary_name() -> str:
    return f".upload-{secrets.token_hex(8)}"


def _copy(source: int, source_name: str, target: int, target_name: str) -> None:
    reading = os.open(source_name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
    writing = os.open(target_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
    with open(reading, "rb") as file, open(writing, "wb") as copy:
        while piece := file.read(PIECE_BYTES):
            copy.write(piece)


async def upload(
    requests: AsyncIterator[manager_pb2.UploadWorkspaceRequest],
) -> AsyncIterator[manager_pb2.UploadWorkspaceResponse]:
    """Put files into a workspace; each request is answered with the progress.

    Raises:
        InvalidArgumentError: INVALID_WORKSPACE, INVALID_PATH, INVALID_ENTRY, WRONG_OFFSET, DIGEST_MISMATCH.
        FailedPreconditionError: WORKSPACE_UNAVAILABLE, PATH_LEAVES_WORKSPACE, UPLOAD_FAILED.
    """
    receiver: _Upload | None = None
    try:
        async for request in requests:
            if receiver is None:
                receiver = await asyncio.to_thread(_Upload, request.workspace)
            try:
                missing = await asyncio.to_thread(receiver.place, list(request.entries))
                if request.HasField("chunk"):
                    await asyncio.to_thread(receiver.write, request.chunk)
            except OSError as error:
                raise FailedPreconditionError(
                    f"the workspace can't take the files: {error.strerror}", reason="UPLOAD_FAILED"
                ) from error
            yield receiver.progress(missing)
    finally:
        if receiver is not None:
            await asyncio.to_thread(receiver.close)


def _walk(root: int, prefix: str) -> Iterator[manager_pb2.WorkspaceEntry]:
    """Yield everything below a directory, a directory before what is in it."""
    for name in sorted(os.listdir(root)):
        path = f"{prefix}{name}"
        try:
            facts = os.stat(name, dir_fd=root, follow_symlinks=False)
            mode = stat.S_IMODE(facts.st_mode) & 0o777
            if stat.S_ISLNK(facts.st_mode):
                target = os.readlink(name, dir_fd=root)
                yield manager_pb2.WorkspaceEntry(path=path, mode=mode, symlink_target=target)
            elif stat.S_ISREG(facts.st_mode):
                digest = _digest_of(root, name)
                if digest is not None:
                    ref = llm_pb2.BlobRef(digest=digest, size_bytes=facts.st_size)
                    yield manager_pb2.WorkspaceEntry(path=path, mode=mode, file=ref)
            elif stat.S_ISDIR(facts.st_mode):
                yield manager_pb2.WorkspaceEntry(path=path, mode=mode, directory=manager_pb2.Directory())
                deeper = os.open(name, _DIRECTORY, dir_fd=root)
                try:
                    yield from _walk(deeper, f"{path}/")
                finally:
                    os.close(deeper)
        except FileNotFoundError:
            # Removed since the directory was listed.
            continue


def _take(entries: Iterator[manager_pb2.WorkspaceEntry]) -> list[manager_pb2.WorkspaceEntry]:
    return list(islice(entries, ENTRIES_PER_MESSAGE))


def _read(root: int, path: str, offset: int) -> bytes:
    with open_parent(root, path, is_made=False) as (directory, name):
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        with open(descriptor, "rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)


async def download(
    request: manager_pb2.DownloadWorkspaceRequest,
) -> AsyncIterator[manager_pb2.DownloadWorkspaceResponse]:
    """Yield the entries of a workspace, each batch followed by the contents that the caller lacks.

    Raises:
        InvalidArgumentError: INVALID_WORKSPACE, INVALID_PATH.
        FailedPreconditionError: WORKSPACE_UNAVAILABLE, PATH_LEAVES_WORKSPACE, FILE_CHANGED.
    """
    root = await asyncio.to_thread(_open_workspace, request.workspace, is_made=False)
    start = root
    known = set(request.known_digests)
    try:
        if request.path:
            with open_parent(root, f"{request.path}/any", is_made=False) as (below, _):
                start = os.dup(below)
        entries = _walk(start, f"{request.path}/" if request.path else "")
        while batch := await asyncio.to_thread(_take, entries):
            yield manager_pb2.DownloadWorkspaceResponse(entries=batch)
            for entry in batch:
                if entry.WhichOneof("kind") == "file" and entry.file.digest not in known:
                    known.add(entry.file.digest)
                    async for chunk in _content(root, entry):
                        yield manager_pb2.DownloadWorkspaceResponse(chunk=chunk)
    finally:
        if start != root:
            os.close(start)
        os.close(root)


async def _content(root: int, entry: manager_pb2.WorkspaceEntry) -> AsyncIterator[manager_pb2.WorkspaceChunk]:
    found = hashlib.sha256()
    offset = 0
    while offset < entry.file.size_bytes:
        try:
            data = await asyncio.to_thread(_read, root, entry.path, offset)
        except OSError:
            data = b""
        if not data:
            break
        found.update(data)
        yield manager_pb2.WorkspaceChunk(digest=entry.file.digest, offset=offset, data=data)
        offset += len(data)
    if found.hexdigest() != entry.file.digest:
        raise FailedPreconditionError(f"{entry.path!r} changed while it was read", reason="FILE_CHANGED")
