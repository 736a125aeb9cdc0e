"""Frames between a manager and its launcher: a length of four bytes, big-endian, then JSON. Standard library only."""

from __future__ import annotations

import json
import struct
from typing import Literal, TypeAlias, TypedDict

LENGTH = struct.Struct(">I")


class Configure(TypedDict):
    """First request."""

    do: Literal["configure"]
    environment: dict[str, str]
    """The environment of every command, without its marker."""

    grace_s: float
    """Seconds between SIGTERM and SIGKILL."""

    file_size_limit_bytes: int
    """Of each file that a command writes, and of both its streams together; 0: none."""


class Start(TypedDict):
    """Start a command. Answered by started, refused or claim_lost."""

    do: Literal["start"]
    operation_id: str
    directory: str
    working_directory: str
    command: str
    timeout_s: float | None
    """Kept by the launcher only once its manager is gone; None: no limit."""

    sandbox: list[str]
    """Program that executes the command's bash, with its arguments; empty: none."""

    cgroups: list[str]
    """Files to write "0" to, by which the command joins control groups."""

    limits: list[str]
    """Within the sandbox: number of processes and KiB of address space; empty: none."""


class End(TypedDict):
    """End everything that an operation started. Answered by ending and ended."""

    do: Literal["end"]
    operation_id: str
    directory: str
    why: str
    """ "timeout", "cancel" or "output", recorded in the directory; or "leftovers", recorded nowhere."""

    supervisor_pid: int
    """Where another launcher started it: never signalled; its session and descendants are. 0: own, or none runs."""

    supervisor_start_ticks: int


class Started(TypedDict):
    """The process that becomes the command runs."""

    event: Literal["started"]
    operation_id: str
    pid: int


class Refused(TypedDict):
    """Nothing was started and no claim was taken."""

    event: Literal["refused"]
    operation_id: str
    reason: str
    message: str


class ClaimLost(TypedDict):
    """Somebody had the claim; nothing was started."""

    event: Literal["claim_lost"]
    operation_id: str


class Exited(TypedDict):
    """The supervisor of a command of this launcher ended. `ended` follows where leftovers are not 0."""

    event: Literal["exited"]
    operation_id: str
    status: int
    """Its exit code; negative: the signal that ended it."""

    stdout_bytes: int
    stderr_bytes: int
    leftovers: int
    """Processes that the command left running, being ended now."""

    strangers: int
    """Processes that it or another running command left without a marker; ended when the last of these ends."""


class Ending(TypedDict):
    """An `End` has begun, or the launcher ends a command whose output is too large."""

    event: Literal["ending"]
    operation_id: str
    leftovers: int


class Ended(TypedDict):
    """Nothing of the operation was found running any more."""

    event: Literal["ended"]
    operation_id: str
    survivors: int
    """Processes that SIGKILL did not end, for example in an uninterruptible wait."""


Request: TypeAlias = Configure | Start | End
Report: TypeAlias = Started | Refused | ClaimLost | Exited | Ending | Ended


def encode(frame: Request | Report) -> bytes:
    """Return a frame's bytes."""
    body = json.dumps(frame).encode()
    return LENGTH.pack(len(body)) + body
