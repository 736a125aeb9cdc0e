"""Does one `run`: opens the coordinator, the session and a display, and ends with a code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from clients.cli.connection import Connection
from clients.cli.display import Display
from clients.cli.failures import EXIT_INTERRUPTED, CommandError, os_error_text
from clients.cli.interrupts import Interrupts
from clients.cli.isolation import IsolationOptions, is_isolation_asked
from clients.cli.jsonl_display import JsonlDisplay
from clients.cli.keyboard import restore_mode, typed_lines
from clients.cli.live_display import LiveDisplay
from clients.cli.model_providers import SCRIPT_LABEL, Providers, choose_model
from clients.cli.opened_session import Defaults, OpenedSession, open_session, seed_view
from clients.cli.opening import open_place
from clients.cli.place import Place
from clients.cli.plain_display import PlainDisplay
from clients.cli.request import RunRequest
from clients.cli.session_run import RunResult, SessionRun
from clients.cli.style import environment_style
from clients.cli.suspension import suspendable
from clients.cli.text import clip, one_line
from clients.cli.view import SessionView
from harness.coordinator import Coordinator
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import session_pb2

MAX_REASON_CELLS = 200
"""The run itself has shown the failure whole."""

_SHOW_CURSOR = "\x1b[?25h"
_PASTE_MODE_ON = "\x1b[?2004h"
_PASTE_MODE_OFF = "\x1b[?2004l"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    """What to run, where, and how to show it."""

    request: RunRequest
    script: str | None
    record: str | None
    place: Place
    is_jsonl: bool
    isolation: IsolationOptions


def run_job(job: RunJob) -> int:
    """Do a job and return the exit code.

    Raises:
        CommandError: Something that a person can put right.
        HarnessError: The coordinator refused something.
    """
    return asyncio.run(_run(job))


async def _run(job: RunJob) -> int:
    request = replace(job.request, workspace=_workspace(job.request, job.place))
    providers = Providers(os.environ, script=job.script, record=job.record)
    opening = _ServerOpening(job, request) if job.place.server else _OwnOpening(request, providers)
    opening.check()
    interrupts, connection = Interrupts(), Connection()
    with interrupts.handled():
        async with open_place(
            job.place,
            providers.open,
            on_trouble=interrupts.trouble,
            on_connection=connection.note,
            isolation=job.isolation,
            on_isolation=_tell_isolation if is_isolation_asked(job.isolation, os.environ) else None,
        ) as coordinator:
            with interrupts.left_in_trouble():
                session = await open_session(coordinator, request, opening.defaults, opening.check_settings)
                view = await seed_view(coordinator, session)
                result = await _follow(
                    coordinator, session, view, job.place, interrupts, connection, is_jsonl=job.is_jsonl, can_steer=True
                )
        return _exit_code(result)


def _tell_isolation(line: str) -> None:
    print(f"isolation: {line}", file=sys.stderr)


class _OwnOpening:
    """What a session gets that this process runs: its provider must be set up here."""

    def __init__(self, request: RunRequest, providers: Providers) -> None:
        self._request = request
        self._providers = providers

    def check(self) -> None:
        """Fail before anything is made where a new session could not be run."""
        if self._request.session_id is None:
            choose_model(self._providers, self._request.provider, self._request.model)

    def defaults(self) -> Defaults:
        chosen = choose_model(self._providers, self._request.provider, self._request.model)
        return Defaults(
            session_id=new_session_id(),
            provider=chosen.provider,
            model=chosen.model,
            workspace=os.getcwd(),
            labels={SCRIPT_LABEL: self._providers.script} if chosen.provider == "scripted" else {},
        )

    def check_settings(self, settings: session_pb2.SessionSettings) -> None:
        self._providers.check(settings)


class _ServerOpening:
    """What a session gets that a server runs: what is not asked for, the server fills in."""

    def __init__(self, job: RunJob, request: RunRequest) -> None:
        self._is_this_machine = job.place.is_this_machine
        self._script = Providers({}, script=job.script).script
        self._request = request

    def check(self) -> None:
        """Fail early where a script can't be played; everything else the server checks."""
        if self._script and self._is_this_machine:
            Providers({}, script=self._script).config("scripted")

    def defaults(self) -> Defaults:
        return Defaults(
            session_id=new_session_id(),
            provider="scripted" if self._script else "",
            model="",
            workspace=os.getcwd() if self._is_this_machine else "",
            labels={SCRIPT_LABEL: self._script} if self._script else {},
        )

    def check_settings(self, settings: session_pb2.SessionSettings) -> None:
        if self._script and settings.labels.get(SCRIPT_LABEL, self._script) != self._script:
            raise CommandError(
                f"the session plays another script ({settings.labels[SCRIPT_LABEL]})",
                "Leave --script out, or begin another session.",
            )


async def _follow(
    coordinator: Coordinator,
    session: OpenedSession,
    view: SessionView,
    place: Place,
    interrupts: Interrupts,
    connection: Connection,
    *,
    is_jsonl: bool,
    can_steer: bool,
) -> RunResult:
    """Show a session until it rests; where it can be steered, Ctrl-C stops it, else it leaves at once."""
    interrupts.resume_command = place.next_command(session.session_id)
    display, is_live = _display(view, connection, is_jsonl=is_jsonl)
    run = SessionRun(
        coordinator,
        session,
        view=view,
        display=display,
        write=_write,
        shows_deltas=is_live,
        next_command=interrupts.resume_command,
    )
    terminal = _terminal(run, interrupts, can_steer=can_steer) if is_live else contextlib.nullcontext()
    with interrupts.attached(run.stop if can_steer else None, run.abort), terminal:
        return await run.execute()


def new_session_id() -> str:
    """Return an ID that sorts by time and can be read aloud."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def _workspace(request: RunRequest, place: Place) -> str | None:
    if request.workspace is None or not place.is_this_machine:
        return request.workspace
    path = Path(request.workspace).expanduser()
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise CommandError(f"the workspace {what} ({request.workspace})", "Name a directory with --workspace.")
    return str(path.resolve())


def _display(view: SessionView, connection: Connection, *, is_jsonl: bool) -> tuple[Display, bool]:
    """Return what shows the run, and whether that is a live terminal."""
    if is_jsonl:
        return JsonlDisplay(view), False
    style = environment_style(sys.stdout.encoding, is_terminal=sys.stdout.isatty())
    if not style.has_escapes:
        return PlainDisplay(view, style, connection=connection), False
    return LiveDisplay(view, style, shutil.get_terminal_size, connection), True


def _write(text: str) -> None:
    try:
        sys.stdout.buffer.write(text.encode(sys.stdout.encoding, errors="replace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError as error:
        raise CommandError("the output was closed", "The session goes on with run --session.") from error
    except OSError as error:
        raise CommandError(f"the output can't be written ({os_error_text(error)})") from error


@contextlib.contextmanager
def _terminal(run: SessionRun, interrupts: Interrupts, *, can_steer: bool) -> Iterator[None]:
    """Let a person steer, where there is a keyboard; give the terminal back however this ends."""
    has_keyboard = can_steer and sys.stdin is not None and sys.stdin.isatty()
    descriptor = sys.stdin.fileno() if has_keyboard else None
    saved = termios.tcgetattr(descriptor) if descriptor is not None else None

    def give_back() -> None:
        if descriptor is not None and saved is not None:
            restore_mode(descriptor, saved)
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), f"{_SHOW_CURSOR}{_PASTE_MODE_OFF}\r\n".encode())

    def go_on() -> None:
        _write(_PASTE_MODE_ON)
        run.redraw()

    interrupts.on_leave = give_back
    try:
        if descriptor is None or saved is None:
            with suspendable(run.suspend, before=lambda: None):
                yield
            return
        run.show_typed("")
        _write(_PASTE_MODE_ON)
        suspended = suspendable(run.suspend, before=lambda: _lend(descriptor, saved))
        with typed_lines(descriptor, on_change=run.show_typed, on_line=run.steer, on_continue=go_on), suspended:
            yield
    finally:
        interrupts.on_leave = None
        _write(_SHOW_CURSOR + (_PASTE_MODE_OFF if descriptor is not None else ""))


def _lend(descriptor: int, saved: list[object]) -> None:
    restore_mode(descriptor, saved)
    _write(_PASTE_MODE_OFF)


def _exit_code(result: RunResult) -> int:
    if result.was_interrupted:
        print(f"unreal-agent: interrupted. Resume: {result.next_command}", file=sys.stderr)
        return EXIT_INTERRUPTED
    match result.rest.session_state:
        case session_pb2.SESSION_STATE_FAILED:
            reason = clip(one_line(result.rest.reason), MAX_REASON_CELLS)
            raise CommandError(f"the session failed ({reason})", f"Try again: {result.next_command}")
        case session_pb2.SESSION_STATE_STOPPED:
            reason = result.rest.reason or "asked for"
            if reason.startswith("LIMIT_") and not reason.startswith("LIMIT_TURNS"):
                raise CommandError(f"the session was stopped ({reason})", "Raise that limit (UpdateSettings) to go on.")
            raise CommandError(f"the session was stopped ({reason})", f"Go on: {result.next_command}")
        case _:
            return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchJob:
    """Which session to show from its beginning, and how."""

    session_id: str
    script: str | None
    place: Place
    is_jsonl: bool


def watch_job(job: WatchJob) -> int:
    """Show a session from its beginning until it rests, and return the exit code."""
    return asyncio.run(_watch(job))


async def _watch(job: WatchJob) -> int:
    providers = Providers(os.environ, script=job.script)
    interrupts, connection = Interrupts(), Connection()
    with interrupts.handled():
        async with open_place(
            job.place, providers.open, on_trouble=interrupts.trouble, on_connection=connection.note
        ) as coordinator:
            found = await coordinator.get_session(coordinator_pb2.GetSessionRequest(session_id=job.session_id))
            if not job.place.server and found.session.rest.state != session_pb2.REST_STATE_AT_REST:
                providers.check(found.settings)
            session = OpenedSession(
                session_id=job.session_id,
                settings=found.settings,
                is_resumed=False,
                after_sequence=0,
                after_revision=0,
            )
            await _follow(
                coordinator,
                session,
                SessionView(),
                job.place,
                interrupts,
                connection,
                is_jsonl=job.is_jsonl,
                can_steer=False,
            )
            return 0
