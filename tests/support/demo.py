"""The demo, run once for all tests that look at it: without a terminal and on two widths of one, at the same time."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pexpect

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "examples.demo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demo wrote, and how it ended."""

    plain: str
    terminals: Mapping[int, str]
    """What was written to a terminal of so many columns."""

    codes: Sequence[int]
    elapsed_s: float


def environment() -> dict[str, str]:
    """Return what a fresh machine has: a path, and no key."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "LANG": "C.UTF-8", "TERM": "xterm"}


@functools.cache
def run_demo() -> Demo:
    """Run it each way; the second call returns what the first saw."""
    begin_s = time.monotonic()
    with ThreadPoolExecutor() as pool:
        plain = pool.submit(_run_plain)
        terminals = {columns: pool.submit(_run_on_terminal, columns) for columns in (80, 120)}
    text, code = plain.result()
    written = {columns: future.result() for columns, future in terminals.items()}
    # A person may want to look at what it left behind; a test does not.
    for directory in set(re.findall(r"/\S*/agent-demo-\w+", text + "".join(told for told, _ in written.values()))):
        shutil.rmtree(directory, ignore_errors=True)
    return Demo(
        plain=text,
        terminals={columns: told for columns, (told, _) in written.items()},
        codes=[code, *(ended for _, ended in written.values())],
        elapsed_s=time.monotonic() - begin_s,
    )


def _run_plain() -> tuple[str, int]:
    done = subprocess.run(
        COMMAND,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment(),
        timeout=90,
    )
    return done.stdout.decode(), done.returncode


def _run_on_terminal(columns: int) -> tuple[str, int]:
    terminal = pexpect.spawn(
        COMMAND[0],
        COMMAND[1:],
        env=environment(),
        cwd=str(ROOT),
        dimensions=(50, columns),
        encoding="utf-8",
        timeout=90,
    )
    terminal.expect(pexpect.EOF)
    terminal.close()
    return str(terminal.before), terminal.exitstatus if terminal.exitstatus is not None else -1
