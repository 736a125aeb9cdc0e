"""Reads how a command ended out of its directory and puts it into words. Blocks."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from harness.primitives import process_records as records
from harness.primitives.output_capture import capture
from harness.primitives.primitives import PrimitiveFailed, ProcessExited, ProcessLost, ProcessNeverStarted
from unreal_agent.operation.v1 import operation_pb2

# What the supervisor's shell exits with where it could not become the command.
NOT_EXECUTED = 126


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What the launcher saw when the command was over."""

    leftovers: int = 0
    strangers: int = 0
    survivors: int = 0
    stdout_bytes: int | None = None
    """Sizes at that moment; None: not known, the present ones count."""

    stderr_bytes: int | None = None

    def with_survivors(self, survivors: int) -> Ended:
        """Return a copy that tells how many processes could not be ended."""
        return replace(self, survivors=survivors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A command that is over."""

    directory: str
    max_output_chars: int
    status: int | None
    """The supervisor's exit code where the launcher saw it, negative for a signal."""

    ended: Ended
    is_ending: bool
    """The harness ended it."""

    grace_s: float
    output_limit_bytes: int
    """Of each stream and of both together; 0: none."""


def outcome(over: Outcome) -> ProcessExited | ProcessLost | ProcessNeverStarted | PrimitiveFailed:
    """Return the event that says how it ended."""
    if not os.path.isdir(over.directory):
        return lost(
            over.directory,
            over.max_output_chars,
            "OPERATION_DIRECTORY_MISSING",
            f"the operation's directory {over.directory} was deleted while the command ran",
        )
    record = records.read_exit(over.directory)
    if record is None and over.status is not None and over.status >= 0:
        # The record could not be written, for example on a full disk; the supervisor's exit code is the command's.
        record = records.ExitRecord(exit_code=over.status, signal_name="")
    if record is None and records.is_unstarted(over.directory):
        return ProcessNeverStarted()
    if record is None:
        message = "the command's supervisor was killed: how the command ended is not known"
        return lost(over.directory, over.max_output_chars, "SUPERVISOR_LOST", message)
    if record.exit_code == NOT_EXECUTED and records.read_started(over.directory) is None:
        message = "the working directory or the control group vanished before the command started, or the disk is full"
        return PrimitiveFailed(reason="CANNOT_START", message=message)
    complaint = "" if record.signal_name or record.exit_code != 1 else records.sandbox_failure(over.directory)
    if complaint:
        return PrimitiveFailed(reason="SANDBOX_FAILED", message=f"the command's sandbox could not be made: {complaint}")
    why = records.read_ending(over.directory)
    return ProcessExited(
        exit_code=record.exit_code,
        signal=record.signal_name,
        is_timed_out=why == "timeout",
        is_stopped=why == "cancel",
        stdout=_capture(over.directory, records.STDOUT, over.max_output_chars, over.ended.stdout_bytes),
        stderr=_capture(over.directory, records.STDERR, over.max_output_chars, over.ended.stderr_bytes),
        leftover_note=_note(over, why),
    )


def lost(directory: str, max_output_chars: int, reason: str, message: str) -> ProcessLost:
    """Return the event for a command whose end can't be known, with what it wrote."""
    return ProcessLost(
        reason=reason,
        message=message,
        stdout=_capture(directory, records.STDOUT, max_output_chars, None),
        stderr=_capture(directory, records.STDERR, max_output_chars, None),
    )


def _capture(directory: str, name: str, max_chars: int, frozen: int | None) -> operation_pb2.CapturedOutput:
    return capture(os.path.join(directory, name), max_chars, frozen)


def _note(over: Outcome, why: str) -> str:
    ended = over.ended
    sentences = []
    if why == "output":
        sentences.append(
            f"The command was ended because its output reached the limit of {over.output_limit_bytes:,} bytes; "
            "what it tried to write beyond is lost."
        )
    elif full := [name for name in (records.STDOUT, records.STDERR) if _is_full(over, name)]:
        sentences.append(
            f"std{' and std'.join(full)} reached the limit of {over.output_limit_bytes:,} bytes; "
            "what was written beyond is lost."
        )
    sentences += [
        _emptied(name) for name in (records.STDOUT, records.STDERR) if records.was_emptied(over.directory, name)
    ]
    if ended.leftovers and not over.is_ending:
        sentences.append(
            f"{_processes(ended.leftovers)} left running by the command when its shell exited "
            f"{_is(ended.leftovers)} ended now (SIGTERM, after {over.grace_s:g} s SIGKILL)."
        )
    if ended.survivors:
        sentences.append(f"{_processes(ended.survivors)} of the command could not be ended.")
    if ended.strangers:
        sentences.append(
            f"{_processes(ended.strangers)} without a trace of origin may have escaped from this command; "
            "they are ended when the commands that run beside it are over."
        )
    return " ".join(sentences)


def _is_full(over: Outcome, name: str) -> bool:
    # The shell counts the limit in whole KiB.
    limit_bytes = over.output_limit_bytes // 1024 * 1024
    return 0 < limit_bytes <= records.output_bytes(over.directory, name)


def _emptied(name: str) -> str:
    advice = ">&2" if name == records.STDERR else "no redirection"
    return (
        f"std{name} was opened anew for writing, as `> /dev/std{name}` does, which empties it: what was written to it "
        f"before is lost ({advice} keeps it)."
    )


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"
