"""Runs a service as a child of `python -m services`, which drains when its parent dies. Arguments: see `main`."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Bind this process's life to its parent's and become the service: LOCK PARENT_PID MODULE ITS_ARGUMENTS."""
    lock, parent_pid, module, *rest = arguments
    # Held for life by this process alone: a command that outlives it must not keep the state directory locked.
    os.set_inheritable(int(lock), False)
    signal.signal(signal.SIGUSR1, _end_once)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != int(parent_pid):
        return  # it died before the line above
    sys.argv[1:] = rest
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_once(number: int, frame: object) -> None:
    # The kernel sends one signal for each of the parent's threads, and a second SIGTERM would not let this one drain.
    signal.signal(number, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
