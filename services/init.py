"""Runs a container's one service: `python -m services.init MODULE ARGUMENTS`. Reaps orphans and restarts the service.

A manager that dies is started again beside its commands, which go on: they end with the container alone. Imports no
gRPC and starts no thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Final

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0

SETTLED_S: Final = 10.0
"""A service that lived for so long began well: the next pause is short again."""

EXIT_USAGE: Final = 2

_PR_SET_CHILD_SUBREAPER: Final = 36
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGNALS: Final = {signal.SIGCHLD, *_ENDING}


def main(arguments: list[str]) -> int:
    """Run the service until a signal ends it, and return its last exit code."""
    if not arguments:
        print("usage: python -m services.init MODULE [ARGUMENT ...]", file=sys.stderr)  # noqa: T201  # for the starter
        return EXIT_USAGE
    # Pid 1 inherits orphans anyway; elsewhere this does it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    pause_s = FIRST_PAUSE_S
    while True:
        began = time.monotonic()
        code, is_asked = _run_once(arguments)
        # A setting that can't be used is none tomorrow either; what starts the container shall see it.
        if is_asked or code == EXIT_USAGE:
            return code
        pause_s = FIRST_PAUSE_S if time.monotonic() - began >= SETTLED_S else min(2 * pause_s, LONGEST_PAUSE_S)
        print(f"init: {arguments[0]} ended with {code}; it starts again in {pause_s:g} s", flush=True)  # noqa: T201
        if _is_ended_while_waiting(pause_s):
            return code


def _run_once(arguments: list[str]) -> tuple[int, bool]:
    """Run the service once; return its exit code and whether a signal had asked for its end."""
    pid = os.posix_spawn(sys.executable, [sys.executable, "-m", *arguments], os.environ, setsigmask=())
    is_asked = False
    while True:
        number = signal.sigwait(_SIGNALS)
        if number == signal.SIGCHLD:
            code = _reap(pid)
            if code is not None:
                return code, is_asked
        else:
            is_asked = True
            os.kill(pid, number)


def _is_ended_while_waiting(pause_s: float) -> bool:
    end = time.monotonic() + pause_s
    while (left_s := end - time.monotonic()) > 0:
        received = signal.sigtimedwait(_SIGNALS, left_s)
        if received is not None and received.si_signo != signal.SIGCHLD:
            return True
        _reap(0)
    return False


def _reap(service: int) -> int | None:
    """Take leave of every child that has ended; return the service's exit code if it is one of them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == service:
            code = os.waitstatus_to_exitcode(status)
            # As a shell says it.
            found = code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
