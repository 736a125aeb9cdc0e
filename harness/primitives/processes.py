"""Commands as a primitive: starts, watches and stops them, and turns what becomes of them into events.

One object per manager. Commands outlive it; whatever it knows can be found again in their directories.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import time
from asyncio import TaskGroup
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar, assert_never

from harness import faults
from harness.errors import ResourceExhaustedError
from harness.primitives import launcher_protocol as protocol
from harness.primitives import process_records as records
from harness.primitives import process_table as table
from harness.primitives.descriptors import NO_DESCRIPTOR, no_descriptor_error
from harness.primitives.isolation import Isolation
from harness.primitives.launcher_client import LauncherClient
from harness.primitives.primitives import (
    Event,
    PrimitiveFailed,
    ProcessLost,
    ProcessNeverStarted,
    ProcessStarted,
    StartProcess,
    StopProcess,
    WatchProcess,
)
from harness.primitives.process_outcome import Ended, Outcome, lost, outcome
from harness.primitives.sandbox_mounts import WorkspaceRefusedError
from unreal_agent.operation.v1.operation_pb2 import CapturedOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

BEFORE_LAUNCH = faults.declare("primitives.launch.before", "a start is journalled, the launcher has not been told")
AFTER_LAUNCH = faults.declare("primitives.launch.after", "the launcher has been told to start a command")
BEFORE_COLLECT = faults.declare("primitives.collect.before", "a command exited, its records have not been read")
AFTER_COLLECT = faults.declare("primitives.collect.after", "a command's records were read, nobody has been told")

FIRST_RESTART_S = 0.1
LAST_RESTART_S = 5.0

RECORD_PAUSE_S = 0.02

PASSING = table.OUT_OF_RESOURCES | {errno.ENOSPC, errno.EDQUOT}
"""Errors of looking for a command that say nothing of it: it is looked for again until they have passed."""

PASSING_PAUSE_S = 0.2
DESCRIPTOR_PATIENCE_S = 5.0

STANDSTILL_S = 1.0
"""Time between two looks whether somebody stopped the launcher, or what it does not look after writes too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """How commands are run."""

    environment: Mapping[str, str]
    """The whole environment of every command, without its marker."""

    grace_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""

    file_size_limit_bytes: int = 8 << 30
    """Bound of every file that a command writes, and of both its streams together; 0: none."""

    launcher_log: Path
    isolation: Isolation = field(default_factory=Isolation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a command works."""

    workspace: str
    working_directory: str
    """In the workspace or elsewhere."""


@dataclass(slots=True)
class _Run:
    """What is known of a command until its end is reported."""

    operation_id: str
    directory: str
    max_output_chars: int
    timeout_s: float | None = None
    is_own: bool = True
    """Started by the present launcher."""

    supervisor: records.Claim | None = None
    """Known where it is not own."""

    pidfd: int | None = None
    timer: asyncio.TimerHandle | None = None
    is_ending: bool = False
    """A stop or a time limit: the end is reported when nothing of it runs any more."""

    is_lost: bool = False
    """Its end can't be known: reported when nothing of it runs any more."""

    loss: _Lost | None = None
    """Why, where that was found out by looking for it."""

    exit_status: int | None = None
    """What the launcher saw of the supervisor's exit."""

    has_exited: bool = False
    ended: Ended = Ended()
    is_reporting: bool = False


class Processes:
    """Every command of one manager."""

    def __init__(self, settings: ProcessSettings, report: Callable[[str, Event], None], tasks: TaskGroup) -> None:
        """Take the settings; `report(operation_id, event)` is called on the loop; `tasks` owns what runs."""
        self._settings = settings
        self._report = report
        self._tasks = tasks
        self._runs: dict[str, _Run] = {}
        self._launcher: LauncherClient | None = None
        self._waiting: list[protocol.Request] = []
        self._over_directories: list[str] = []
        self._is_closed = False

    @property
    def count(self) -> int:
        """Commands whose end has not been reported."""
        return len(self._runs)

    async def run(self) -> None:
        """Keep a launcher; ends by cancellation. A launcher that dies is replaced and its commands are found again."""
        async with TaskGroup() as group:
            keeper = group.create_task(self._keep_going(), name="keep the launcher going")
            await self._keep_launcher()
            keeper.cancel()

    async def _keep_going(self) -> None:
        """Let a launcher go on that somebody stopped: it would hold up every command, and no time limit would hold."""
        while True:
            await asyncio.sleep(STANDSTILL_S)
            pid = self._launcher.pid if self._launcher is not None and self._runs else 0
            entry = await _patiently(partial(asyncio.to_thread, table.read_entry, pid)) if pid else None
            if entry is not None and entry.state == "T":
                logger.warning("launcher was stopped")
                table.signal_process(entry, signal.SIGCONT)
            await self._end_runaways()
            await self._remove_groups()

    async def _remove_groups(self) -> None:
        """Remove the control groups of commands that are over; the last process of one may take a moment to go."""
        over, self._over_directories = self._over_directories, []
        for directory in over:
            if not await asyncio.to_thread(self._settings.isolation.cgroups.remove, directory):
                self._over_directories.append(directory)

    async def _end_runaways(self) -> None:
        """End found commands that have written too much: the launcher that started them may be gone."""
        limit_bytes = self._settings.file_size_limit_bytes
        for run in [run for run in self._runs.values() if run.supervisor is not None]:
            is_full = await asyncio.to_thread(records.is_output_full, run.directory, limit_bytes)
            if is_full and not (run.has_exited or run.is_ending or run.is_lost or self._is_closed):
                run.is_ending = True
                self._end(run, "output")

    async def _keep_launcher(self) -> None:
        pause_s = FIRST_RESTART_S
        while True:
            configuration: protocol.Configure = {
                "do": "configure",
                "environment": dict(self._settings.environment),
                "grace_s": self._settings.grace_s,
                "file_size_limit_bytes": self._settings.file_size_limit_bytes,
            }
            started_s = time.monotonic()
            try:
                self._launcher = await LauncherClient.start(configuration, self._settings.launcher_log)
                waiting, self._waiting = self._waiting, []
                for request in waiting:
                    self._launcher.send(request)
                async for report in self._launcher.reports():
                    self._take(report)
            except OSError:
                logger.exception("launcher could not be started")
            if self._is_closed:
                return
            await self._lose_launcher()
            if time.monotonic() - started_s > LAST_RESTART_S:
                pause_s = FIRST_RESTART_S
            logger.warning("launcher ended", extra={"restart_in_s": pause_s})
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_RESTART_S)

    async def aclose(self) -> None:
        """Leave the commands to themselves. May be called twice."""
        self._is_closed = True
        launcher, self._launcher = self._launcher, None
        for run in self._runs.values():
            self._release(run)
        if launcher is not None:
            await launcher.aclose(is_idle=not self._runs)
        await self._remove_groups()

    # --- dispatches ---

    def start(self, operation_id: str, directory: str, place: Place, dispatch: StartProcess) -> None:
        """Start a command with its files in `directory`, which exists and was used by no earlier attempt."""
        try:
            sandbox = self._settings.isolation.sandbox(place.workspace, directory)
        except WorkspaceRefusedError as error:
            self._refuse(operation_id, "WORKSPACE_NOT_ISOLATED", str(error))
            return
        except OSError as error:
            self._refuse(operation_id, "CANNOT_START", f"the command's control group can't be made: {error}")
            return
        request: protocol.Start = {
            "do": "start",
            "operation_id": operation_id,
            "directory": directory,
            "working_directory": place.working_directory,
            "command": dispatch.command,
            "timeout_s": dispatch.timeout_s,
            "sandbox": list(sandbox.words),
            "cgroups": list(sandbox.cgroups),
            "limits": list(sandbox.limits),
        }
        self._runs[operation_id] = _Run(
            operation_id=operation_id,
            directory=directory,
            max_output_chars=dispatch.max_output_chars,
            timeout_s=dispatch.timeout_s,
        )
        faults.reach(BEFORE_LAUNCH)
        self._send(request)
        faults.reach(AFTER_LAUNCH)

    def _refuse(self, operation_id: str, reason: str, message: str) -> None:
        # Not at once: the caller is in the middle of its dispatches.
        event = PrimitiveFailed(reason=reason, message=message)
        asyncio.get_running_loop().call_soon(self._report, operation_id, event)

    def watch(self, operation_id: str, directory: str, boot_id: str, dispatch: WatchProcess) -> None:
        """Find a command again whose start was dispatched in boot `boot_id`."""
        run = _Run(
            operation_id=operation_id,
            directory=directory,
            max_output_chars=dispatch.max_output_chars,
            timeout_s=dispatch.timeout_s,
            is_own=False,
        )
        self._runs[operation_id] = run
        self._tasks.create_task(self._find(run, boot_id), name=f"find {operation_id}")

    def stop(self, operation_id: str, directory: str, boot_id: str, dispatch: StopProcess) -> None:
        """End a command, whether it is known here or has to be found first."""
        run = self._runs.get(operation_id)
        if run is None:
            self.watch(
                operation_id,
                directory,
                boot_id,
                WatchProcess(timeout_s=None, max_output_chars=dispatch.max_output_chars),
            )
            self._runs[operation_id].is_ending = True
        elif not run.is_ending:
            run.is_ending = True
            if run.is_own or run.supervisor is not None:
                self._end(run, "cancel")

    # --- the launcher ---

    def _send(self, request: protocol.Request) -> None:
        if self._launcher is None:
            self._waiting.append(request)
        else:
            self._launcher.send(request)

    def _end(self, run: _Run, why: str) -> None:
        supervisor = run.supervisor
        self._send(
            {
                "do": "end",
                "operation_id": run.operation_id,
                "directory": run.directory,
                "why": why,
                "supervisor_pid": supervisor.pid if supervisor else 0,
                "supervisor_start_ticks": supervisor.start_ticks if supervisor else 0,
            }
        )

    def _take(self, report: protocol.Report) -> None:
        run = self._runs.get(report["operation_id"])
        if run is None:
            return
        match report["event"]:
            case "started":
                self._running(run, report["pid"])
            case "refused":
                self._finish(run, PrimitiveFailed(reason=report["reason"], message=report["message"]))
            case "claim_lost":
                run.is_own = False
                self._tasks.create_task(self._find(run, table.boot_id()), name=f"find {run.operation_id}")
            case "exited":
                run.has_exited = True
                run.exit_status = report["status"]
                run.ended = Ended(
                    leftovers=report["leftovers"],
                    strangers=report["strangers"],
                    stdout_bytes=report["stdout_bytes"],
                    stderr_bytes=report["stderr_bytes"],
                )
                # A supervisor that was killed leaves the command itself behind: the end is told when that is gone too.
                run.is_lost = report["status"] < 0 and report["leftovers"] > 0
                if not run.is_ending and not run.is_lost:
                    self._collect(run)
            case "ending":
                if run.has_exited and not run.is_own and not run.is_ending and not run.is_lost:
                    run.ended = Ended(leftovers=report["leftovers"])
                    self._collect(run)
                elif not run.has_exited:
                    # Perhaps of the launcher's own accord.
                    run.is_ending = True
            case "ended":
                if run.has_exited:
                    run.ended = run.ended.with_survivors(report["survivors"])
                    self._collect(run)
            case _:
                assert_never(report["event"])

    async def _lose_launcher(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is None:
            return
        await launcher.aclose(is_idle=True)
        for run in self._runs.values():
            if run.is_own and not run.is_reporting:
                run.is_own = False
                run.has_exited = False
                self._tasks.create_task(self._find(run, table.boot_id()), name=f"find {run.operation_id}")
            elif run.has_exited or run.is_ending:
                self._end(run, "leftovers")

    # --- commands that another launcher started ---

    async def _find(self, run: _Run, boot_id: str) -> None:
        await _patiently(lambda: self._look_for(run, boot_id))

    async def _look_for(self, run: _Run, boot_id: str) -> None:
        found = await asyncio.to_thread(_look, run.directory, boot_id)
        if self._is_closed:
            return
        match found:
            case ProcessNeverStarted() | PrimitiveFailed():
                self._finish(run, found)
            case _Lost():
                if found.is_reboot:
                    event = await asyncio.to_thread(
                        lost, run.directory, run.max_output_chars, found.reason, found.message
                    )
                    self._finish(run, event)
                else:
                    run.is_lost = True
                    run.loss = found
                    self._over(run)
            case _Exited():
                self._over(run)
            case _Attached():
                self._attach(run, found)
            case _:
                assert_never(found)

    def _attach(self, run: _Run, found: _Attached) -> None:
        run.supervisor = found.claim
        run.pidfd = table.open_pidfd(found.claim.pid, found.claim.start_ticks)
        if run.pidfd is None:
            # It ended since it was looked at.
            self._over(run)
            return
        # Stopped by somebody it would never record an exit.
        signal.pidfd_send_signal(run.pidfd, signal.SIGCONT)
        asyncio.get_running_loop().add_reader(run.pidfd, self._over, run)
        self._limit_time(run)
        if run.is_ending:
            self._end(run, "cancel")
        self._tasks.create_task(self._tell_started(run), name=f"find the process of {run.operation_id}")

    async def _tell_started(self, run: _Run) -> None:
        """Tell of the command's process, which records itself within milliseconds of its supervisor's claim."""
        while run.pidfd is not None and not self._is_closed:
            started = await _patiently(lambda: asyncio.to_thread(records.read_started, run.directory))
            if started is not None:
                self._report(run.operation_id, ProcessStarted(process_id=started.pid))
                return
            await asyncio.sleep(RECORD_PAUSE_S)

    def _over(self, run: _Run) -> None:
        """The supervisor is gone: end what is left, then report."""
        self._release(run)
        run.has_exited = True
        self._end(run, "leftovers")

    # --- events ---

    def _running(self, run: _Run, pid: int) -> None:
        self._report(run.operation_id, ProcessStarted(process_id=pid))
        self._limit_time(run)

    def _limit_time(self, run: _Run) -> None:
        if run.timeout_s is None or run.timer is not None:
            return
        age_s = 0.0
        if run.supervisor is not None:
            now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            age_s = now_s - run.supervisor.start_ticks / table.TICKS_PER_S
        loop = asyncio.get_running_loop()
        run.timer = loop.call_later(max(0.0, run.timeout_s - age_s), self._time_out, run)

    def _time_out(self, run: _Run) -> None:
        if not run.has_exited and not run.is_ending:
            run.is_ending = True
            self._end(run, "timeout")

    def _collect(self, run: _Run) -> None:
        if not run.is_reporting:
            run.is_reporting = True
            self._tasks.create_task(self._read(run), name=f"collect {run.operation_id}")

    async def _read(self, run: _Run) -> None:
        faults.reach(BEFORE_COLLECT)
        over = Outcome(
            directory=run.directory,
            max_output_chars=run.max_output_chars,
            status=run.exit_status,
            ended=run.ended,
            is_ending=run.is_ending,
            grace_s=self._settings.grace_s,
            output_limit_bytes=self._settings.file_size_limit_bytes,
        )
        event: Event
        try:
            if run.loss is None:
                event = await _patiently(lambda: asyncio.to_thread(outcome, over))
            else:
                # Whatever was recorded since is the end that it was brought to now.
                loss = run.loss
                event = await _patiently(
                    lambda: asyncio.to_thread(lost, run.directory, run.max_output_chars, loss.reason, loss.message)
                )
        except ResourceExhaustedError:
            raise
        # Records that anybody may have spoilt are this operation's trouble and no other's.
        except Exception:
            logger.exception("records of a command could not be read", extra={"operation_id": run.operation_id})
            message = f"the records in {run.directory} can't be read"
            event = ProcessLost(
                reason="RECORDS_UNREADABLE", message=message, stdout=CapturedOutput(), stderr=CapturedOutput()
            )
        faults.reach(AFTER_COLLECT)
        self._finish(run, event)

    def _finish(self, run: _Run, event: Event) -> None:
        self._release(run)
        if self._runs.get(run.operation_id) is run:
            del self._runs[run.operation_id]
            self._over_directories.append(run.directory)
        if not self._is_closed:
            self._report(run.operation_id, event)

    @staticmethod
    def _release(run: _Run) -> None:
        if run.timer is not None:
            run.timer.cancel()
        if run.pidfd is not None:
            asyncio.get_running_loop().remove_reader(run.pidfd)
            os.close(run.pidfd)
            run.pidfd = None


def _settled_claim(directory: str) -> tuple[records.Claim | None, bool]:
    """Return a command's claim, taken where it was free, and whether it was."""
    # Looked for first: what is there is found on a full disk too.
    claim = records.read_claim(directory)
    if claim is not None:
        return claim, False
    is_taken = records.take_claim(directory, records.own_claim())
    return records.read_claim(directory), is_taken


async def _patiently(look: Callable[[], Awaitable[T]]) -> T:
    """Return what a look says, once there is nothing passing in its way: it would take what runs for lost.

    Raises:
        ResourceExhaustedError: TOO_MANY_OPEN_FILES, for so long that the manager is better ended: nothing is lost by
            that, and the next one finds every command again.
    """
    until_s = time.monotonic() + DESCRIPTOR_PATIENCE_S
    while True:
        try:
            return await look()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            if error.errno in NO_DESCRIPTOR and time.monotonic() >= until_s:
                raise no_descriptor_error("the records of a command") from error
            logger.warning("commands can't be looked at", extra={"error": str(error)})
        await asyncio.sleep(PASSING_PAUSE_S)


@dataclass(frozen=True, slots=True)
class _Lost:
    reason: str
    message: str
    is_reboot: bool


@dataclass(frozen=True, slots=True)
class _Exited:
    pass


@dataclass(frozen=True, slots=True)
class _Attached:
    claim: records.Claim


def _look(directory: str, boot_id: str) -> _Lost | _Exited | _Attached | ProcessNeverStarted | PrimitiveFailed:
    """Find out what became of a command; takes the claim where it is free. Blocks.

    Raises:
        OSError: PASSING: nothing is known yet.
    """
    is_same_boot = boot_id == table.boot_id()
    if records.read_exit(directory) is not None:
        return _Exited()
    try:
        claim, is_taken = _settled_claim(directory)
    except FileNotFoundError:
        return _Lost("OPERATION_DIRECTORY_MISSING", f"the operation's directory {directory} was deleted", False)
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise
        return _Lost("CLAIM_UNREADABLE", f"the claim in {directory} can't be read: {error}", False)
    if claim is not None and not claim.is_supervisor:
        has_started = records.has_started(directory)
        if is_same_boot and has_started:
            return _Lost("CLAIM_MISSING", f"the command was started, and its claim in {directory} deleted", False)
        # After a crash of the machine a claim that was free may be one that was lost; one that was taken is true.
        if is_same_boot or not (is_taken or has_started):
            return ProcessNeverStarted()
    if not is_same_boot or claim is None or not claim.is_of_this_world():
        return _Lost("MACHINE_RESTARTED", "the machine or its container was restarted while the command ran", True)
    if not table.is_running(claim.pid, claim.start_ticks):
        # It may have written its record since it was looked for.
        if records.read_exit(directory) is not None:
            return _Exited()
        if records.is_unstarted(directory):
            return ProcessNeverStarted()
        return _Lost("SUPERVISOR_LOST", "the command's supervisor was killed: how it ended is not known", False)
    return _Attached(claim=claim)
