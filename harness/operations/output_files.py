"""The files that operations leave: reads them for callers, removes old ones. Blocks, except `read_file`."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from harness.errors import InvalidArgumentError, NotFoundError, OutOfRangeError
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

PIECE_BYTES = 512 * 1024

# A live tail looks at the file's size this often, and only while somebody reads.
FOLLOW_S = 0.2

ORPHAN_AGE = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """How long files of acknowledged operations are kept."""

    max_age: timedelta = timedelta(days=7)
    max_total_bytes: int = 10 << 30
    interval_s: float = 86_400.0
    """Time between two sweeps; there is one at the start."""


def find_attachments(operation: operation_pb2.Operation, directory: Path) -> list[llm_pb2.BlobRef]:
    """Return the attachments that a state names and that are there."""
    state = operation.WhichOneof("state")
    if state is None:
        return []
    refs = [value for _, value in getattr(operation, state).ListFields() if isinstance(value, llm_pb2.BlobRef)]
    return [ref for ref in refs if (directory / ref.digest).is_file()]


def read_piece(path: Path, offset: int, size: int) -> bytes:
    """Return up to `size` bytes of a file from an offset.

    Raises:
        NotFoundError: OUTPUT_EXPIRED, there is no such file (any more).
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError as error:
        raise NotFoundError(f"{path} is not there (any more)", reason="OUTPUT_EXPIRED") from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise NotFoundError(f"{path} is not there (any more)", reason="OUTPUT_EXPIRED") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file to read, which may still grow."""

    path: Path
    is_growing: Callable[[], bool]
    frozen_bytes: Callable[[], int | None]
    """Size that counts once it does not grow; None: the file's."""


async def read_file(
    output: OutputFile, request: manager_pb2.ReadOutputRequest
) -> AsyncIterator[manager_pb2.ReadOutputResponse]:
    """Yield a file as asked for; the last message has `is_end`."""
    if request.tail_bytes > 0 or (request.tail_bytes < 0 and request.offset):
        raise InvalidArgumentError("tail_bytes must be negative and excludes offset", reason="INVALID_TAIL")
    size = await _readable(output)
    offset = max(0, size + request.tail_bytes) if request.tail_bytes else request.offset
    if offset > size:
        raise OutOfRangeError(
            f"offset {offset} is past the end at {size}",
            reason="OFFSET_PAST_END",
            metadata={"size_bytes": str(size)},
        )
    stop = offset + request.limit_bytes if request.limit_bytes else None
    while True:
        # Asked before reading: what was written before the end is read.
        is_last_look = not (request.follow and output.is_growing())
        size = await _readable(output)
        end = size if stop is None else min(size, stop)
        while offset < end:
            data = await asyncio.to_thread(read_piece, output.path, offset, min(PIECE_BYTES, end - offset))
            if not data:
                break
            yield manager_pb2.ReadOutputResponse(offset=offset, data=data)
            offset += len(data)
        if is_last_look or (stop is not None and offset >= stop):
            yield manager_pb2.ReadOutputResponse(offset=offset, is_end=True)
            return
        await asyncio.sleep(FOLLOW_S)


async def _readable(output: OutputFile) -> int:
    if output.is_growing() and not output.path.exists():
        # The launcher has not made it yet.
        return 0
    size = await asyncio.to_thread(_size, output.path)
    frozen = None if output.is_growing() else output.frozen_bytes()
    return size if frozen is None else min(size, frozen)


def sweep(
    root: Path,
    kept: Sequence[tuple[str, datetime]],
    known: Callable[[str], bool],
    now: datetime,
    limits: RetentionSettings,
) -> list[str]:
    """Remove what is too old or too much; return the operations whose files are gone.

    Args:
        root: Directory of the operations' directories.
        kept: Acknowledged operations that have files, and when they were acknowledged; the oldest first.
        known: Whether an operation of this ID was ever accepted.
        now: The time.
        limits: Age and total size.
    """
    removed = []
    sizes = [(operation_id, time, tree_bytes(root / operation_id)) for operation_id, time in kept]
    total = sum(size for _, _, size in sizes)
    for operation_id, time, size in sizes:
        if now - time > limits.max_age or total > limits.max_total_bytes:
            shutil.rmtree(root / operation_id, ignore_errors=True)
            removed.append(operation_id)
            total -= size
    for entry in os.scandir(root):
        # Made for an acceptance that was never journalled.
        age = now.timestamp() - entry.stat(follow_symlinks=False).st_mtime
        if age > ORPHAN_AGE.total_seconds() and not known(entry.name):
            shutil.rmtree(entry.path, ignore_errors=True)
    return removed


def tree_bytes(directory: Path) -> int:
    """Return what the files below a directory take up on the disk; those that go meanwhile are not counted."""
    total = 0
    for place, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total
