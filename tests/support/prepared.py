"""Starts programs under limits of their own; not by `preexec_fn`, which forks a process that gRPC's threads are in."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def prepared(command: Sequence[str], first: str) -> list[str]:
    """Return a command that does `first`, Python that may use os, resource and ctypes, and becomes another command."""
    program = f"import ctypes, os, resource, sys\n{first}\nos.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-I", "-S", "-c", program, *command]


def few_files(count: int) -> str:
    """Return what bounds the open files of a program."""
    return f"resource.setrlimit(resource.RLIMIT_NOFILE, ({count}, {count}))"


def small_files(size_bytes: int) -> str:
    """Return what bounds the files that a program writes, as a full disk does."""
    return f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size_bytes}, {size_bytes}))"
