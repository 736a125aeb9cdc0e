"""Marks an output file so that it shows later whether somebody emptied it. Standard library only. Linux.

A command that opens its own output anew (`> /dev/stdout`, `tee /dev/stderr`) empties the file, as it would any other:
nothing prevents that without privileges, and nobody sees it happen. So a block is reserved far beyond the end of the
file, which changes neither its size nor its content. Emptying a file frees what is reserved, appending does not.

Works where the file system can reserve and tell (ext4, XFS, Btrfs, and overlays of them); elsewhere nothing is told.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import struct

_KEEP_SIZE = 1
_FIEMAP = 0xC020660B
_HEADER = struct.Struct("=QQLLLL")
_EXTENT_BYTES = 56

PLACE_BYTES = 1 << 40
"""Where the block is: beyond any output, within what every such file system allows."""

_BLOCK_BYTES = 4096

_LINE = re.compile(rb"^marked (\d+)\n", re.MULTILINE)


def mark(descriptor: int) -> bytes:
    """Mark a new, empty file; return a line to keep with it, empty where it can't be marked."""
    ctypes.CDLL(None).fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(PLACE_BYTES), ctypes.c_int64(_BLOCK_BYTES))
    return b"marked %d\n" % os.fstat(descriptor).st_ino if _is_reserved(descriptor) else b""


def was_emptied(path: str, lines: bytes) -> bool:
    """Return whether a file was marked, as `lines` say, and has lost its mark since; False where that can't be said."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # A copy is another file, and was never marked.
        marked = {int(number) for number in _LINE.findall(lines)}
        return os.fstat(descriptor).st_ino in marked and _is_reserved(descriptor) is False
    finally:
        os.close(descriptor)


def _is_reserved(descriptor: int) -> bool | None:
    """Return whether the block is there; None where the file system does not tell."""
    request = bytearray(_HEADER.size + _EXTENT_BYTES)
    _HEADER.pack_into(request, 0, PLACE_BYTES, _BLOCK_BYTES, 0, 0, 1, 0)
    try:
        fcntl.ioctl(descriptor, _FIEMAP, request)
    except OSError:
        return None
    extents: int = _HEADER.unpack_from(request)[3]
    return extents > 0
