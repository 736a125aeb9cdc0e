"""The demo, run once in a process for all tests that look at it: without a terminal, and on one at the same time."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pexpect

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(ROOT / "examples" / "demo.py")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demo wrote, and how it ended."""

    plain: str
    plain_code: int
    terminal: str
    terminal_code: int
    elapsed_s: float


def environment() -> dict[str, str]:
    """Return what a fresh machine has: a path, and no key."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "LANG": "C.UTF-8", "TERM": "xterm"}


@functools.cache
def run_demo() -> Demo:
    """Run it both ways; the second call returns what the first saw."""
    begin_s = time.monotonic()
    with subprocess.Popen(
        COMMAND, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, env=environment()
    ) as plain:
        terminal = pexpect.spawn(
            COMMAND[0],
            COMMAND[1:],
            env=environment(),
            cwd=str(ROOT),
            dimensions=(50, 100),
            encoding="utf-8",
            timeout=80,
        )
        terminal.expect(pexpect.EOF)
        terminal.close()
        assert plain.stdout is not None
        text = plain.stdout.read().decode()
    # A person may want to look at what it left behind; a test does not.
    for directory in set(re.findall(r"\S*/agent-demo-\w+", f"{text} {terminal.before}")):
        shutil.rmtree(directory, ignore_errors=True)
    return Demo(
        plain=text,
        plain_code=plain.returncode,
        terminal=str(terminal.before),
        terminal_code=terminal.exitstatus if terminal.exitstatus is not None else -1,
        elapsed_s=time.monotonic() - begin_s,
    )
