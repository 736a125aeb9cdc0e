"""One run of an opened session until it rests: shows it, steers it with what is typed, stops it.

Talks to the protocol `Coordinator` alone, so that it is the same for an embedded coordinator and for one elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime

from clients.cli.display import Display, Heading, Summary
from clients.cli.failures import CommandError
from clients.cli.opened_session import OpenedSession, external_input
from clients.cli.request import new_input_id
from clients.cli.view import SessionView
from harness.coordinator import Coordinator
from harness.errors import HarnessError, ResourceExhaustedError, UnavailableError
from harness.primitives.streams import closing
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

FRAME_S = 0.03
"""Shortest time between two writes: what comes in it is shown together."""

MAX_UNWRITTEN = 256
"""Messages of the watch that may wait for a slow reader of the output; then the watch waits too."""

SUSPENDED_S = 0.5
"""In this time after a stop of its own, a signal to go on says nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    rest: session_pb2.Rest
    was_interrupted: bool
    next_command: str
    """What to type to go on."""


class SessionRun:
    """Runs one opened session. `execute` is called once; the other methods from the same loop while it runs."""

    def __init__(
        self,
        coordinator: Coordinator,
        session: OpenedSession,
        *,
        view: SessionView,
        display: Display,
        write: Callable[[str], None],
        shows_deltas: bool,
        next_command: str,
    ) -> None:
        """Show on `display`, whose text goes to `write`, which may block; `next_command` is typed to go on."""
        self._coordinator = coordinator
        self._session = session
        self._view = view
        self._display = display
        self._write = write
        self._shows_deltas = shows_deltas
        self._next_command = next_command
        self._begin_s = time.monotonic()
        self._news = asyncio.Event()
        self._written = asyncio.Event()
        self._unwritten = 0
        self._is_over = False
        self._is_stopping = False
        self._typed = ""
        self._suspension: Callable[[], None] | None = None
        self._went_on_s = -SUSPENDED_S
        self._accepted_revision = 0
        self._work: set[asyncio.Task[None]] = set()
        self._group = asyncio.TaskGroup()

    async def execute(self) -> RunResult:
        """Run until the session rests. Cancelling leaves the session as it is, to be resumed.

        Raises:
            HarnessError: The coordinator refused something; alone or in an exception group.
            OSError: The output can't be written; likewise.
        """
        self._begin()
        async with self._group as group:
            group.create_task(self._write_frames())
            rest = await self._follow()
            self._end(rest)
        return RunResult(rest=rest, was_interrupted=self._is_stopping, next_command=self._next(rest))

    def steer(self, line: str) -> None:
        """Submit a line that was typed; it interrupts the request under way."""
        if self._is_over:
            # Recorded now it would wait for the next run, and this one would have said that all is done.
            self._tell(f"not sent, the run is over: {line}")
        elif self._is_stopping:
            self._tell("stopping: the line was not sent")
        else:
            self._start(self._submit(line))

    def show_typed(self, text: str | None) -> None:
        """Show what stands on the input line; None where there is none."""
        self._typed = text or ""
        self._display.set_typed(text)
        self._news.set()

    def redraw(self) -> None:
        """Draw anew where the cursor stands now; after `suspend` that is done already."""
        if time.monotonic() - self._went_on_s < SUSPENDED_S:
            return
        self._display.redraw()
        self._news.set()

    def suspend(self, stop: Callable[[], None]) -> None:
        """Clear the screen of what is not final and call `stop`; draw it again once that returns."""
        self._suspension = stop
        self._news.set()

    def stop(self) -> None:
        """Begin a HARD stop: request and commands are ended, and `execute` returns once all has settled."""
        self._is_stopping = True
        self._tell("stopping; Ctrl-C again leaves at once, and what runs now runs on")
        self._start(self._stop())

    def abort(self, error: HarnessError) -> None:
        """Let `execute` raise an error that came from elsewhere; the session stays as it is recorded."""
        if not self._is_over:
            self._start(_fail(error))

    def _begin(self) -> None:
        settings = self._session.settings
        self._display.begin(
            Heading(
                session_id=self._session.session_id,
                provider=settings.provider,
                model=settings.model,
                workspace=settings.workspace,
                is_resumed=self._session.is_resumed,
            )
        )
        for text in self._session.notices:
            self._tell(text)

    def _end(self, rest: session_pb2.Rest) -> None:
        state = rest.session_state
        words = {session_pb2.SESSION_STATE_STOPPED: "stopped", session_pb2.SESSION_STATE_FAILED: "failed"}
        is_done = state not in words
        if self._typed.strip():
            self._tell(f"not sent, the run is over: {self._typed}")
        self._display.end(
            Summary(
                word=words.get(state, "done"),
                turns=self._view.turns,
                tokens=self._view.input_tokens + self._view.output_tokens,
                elapsed_s=time.monotonic() - self._begin_s,
                session_id=self._session.session_id,
                next_command=self._next(rest),
                next_label="go on" if is_done else "resume",
            )
        )
        self._is_over = True
        self._news.set()

    def _next(self, rest: session_pb2.Rest) -> str:
        if rest.session_state == session_pb2.SESSION_STATE_STOPPED and rest.reason.startswith("LIMIT_TURNS"):
            # Under the same bound it would stop again at once.
            return f"{self._next_command} --max-turns N"
        is_unfinished = rest.session_state == session_pb2.SESSION_STATE_FAILED or (
            rest.session_state == session_pb2.SESSION_STATE_STOPPED and self._view.has_pending_work
        )
        return self._next_command if is_unfinished else f"{self._next_command} -p '…'"

    def _tell(self, text: str) -> None:
        self._display.notice(text)
        self._news.set()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = self._group.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _submit(self, line: str) -> None:
        entry = external_input(line, new_input_id())
        request = coordinator_pb2.SubmitInputRequest(session_id=self._session.session_id, input=entry)
        try:
            response = await self._coordinator.submit_input(request)
        except HarnessError as error:
            self._tell(f"the line was not sent: {error.message}")
            return
        self._accepted_revision = max(self._accepted_revision, response.revision)

    async def _stop(self) -> None:
        request = coordinator_pb2.StopSessionRequest(
            session_id=self._session.session_id,
            input_id=new_input_id(),
            mode=item_pb2.STOP_MODE_HARD,
            reason="interrupted from the keyboard",
        )
        response = await self._coordinator.stop_session(request)
        self._accepted_revision = max(self._accepted_revision, response.revision)

    async def _follow(self) -> session_pb2.Rest:
        """Show everything until the session rests and nothing that was sent meanwhile sets it going again."""
        while True:
            reached = await self._watch_until_rest()
            while self._work:
                await asyncio.wait(set(self._work))
            if reached is not None and reached.revision >= self._accepted_revision:
                return reached.rest

    async def _watch_until_rest(self) -> coordinator_pb2.RestReached | None:
        request = coordinator_pb2.WatchSessionRequest(
            session_id=self._session.session_id,
            after_revision=self._view.last_revision,
            include_deltas=self._shows_deltas,
            include_output=self._shows_deltas,
            until_idle=True,
        )
        reached: coordinator_pb2.RestReached | None = None
        try:
            # Closed at once, also when this task is cancelled: the watch holds a place at the coordinator.
            async with closing(self._coordinator.watch_session(request)) as responses:
                async for response in responses:
                    await self._receive(response)
                    if response.HasField("rest_reached"):
                        reached = response.rest_reached
                    elif response.change.is_deleted:
                        raise CommandError(f"the session was deleted while it ran ({self._session.session_id})")
        except ResourceExhaustedError as error:
            # A slow output let the watch fall behind: it goes on from the last revision, and only deltas are lost.
            if error.reason != "FELL_BEHIND":
                raise
            return None
        if reached is None:
            raise UnavailableError("the watch ended before the session rested", reason="WATCH_ENDED")
        return reached

    async def _receive(self, response: coordinator_pb2.WatchSessionResponse) -> None:
        self._display.receive(response)
        self._unwritten += 1
        self._news.set()
        if self._unwritten >= MAX_UNWRITTEN:
            self._written.clear()
            await self._written.wait()

    async def _write_frames(self) -> None:
        """Write what the display has, in a thread, so that a reader who stalls holds up nothing but the display."""
        while True:
            if self._suspension is not None:
                await self._suspend(self._suspension)
            is_last = self._is_over
            self._unwritten = 0
            self._news.clear()
            text = self._display.frame(datetime.now(UTC))
            if text:
                await asyncio.to_thread(self._write, text)
            self._written.set()
            if is_last and not self._news.is_set():
                return
            await asyncio.sleep(FRAME_S)  # a frame's length, not a wait for anything
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._display.tick_s):
                    await self._news.wait()

    async def _suspend(self, stop: Callable[[], None]) -> None:
        await asyncio.to_thread(self._write, self._display.erase())
        self._suspension = None
        stop()
        self._went_on_s = time.monotonic()


async def _fail(error: HarnessError) -> None:
    raise error
