"""What the commands about sessions do, over the protocol `Coordinator`; each prints, and returns the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TextIO

from google.protobuf import json_format

from clients.cli.call_text import content_text
from clients.cli.context_report import print_context_report
from clients.cli.display import model_words
from clients.cli.failures import CommandError, os_error_text
from clients.cli.jsonl_display import json_line
from clients.cli.opened_session import all_items, all_operations, external_input
from clients.cli.opening import open_place
from clients.cli.place import Place
from clients.cli.plain_display import PlainDisplay
from clients.cli.request import new_input_id
from clients.cli.style import environment_style
from clients.cli.tables import ago, print_facts, print_table
from clients.cli.text import clean, enum_word, one_line, plural, size
from clients.cli.view import SessionView
from harness.coordinator import Coordinator
from harness.errors import DataLossError, FailedPreconditionError
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.server.v1 import server_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

Action = Callable[[Coordinator], Awaitable[int]]

STOP_TIMEOUT_S = 60.0


def read(place: Place, action: Action) -> int:
    """Do something that needs recorded facts alone."""
    return asyncio.run(_with_coordinator(place, action, has_manager=False))


def act(place: Place, action: Action) -> int:
    """Do something that reaches operations too. No model is asked."""
    return asyncio.run(_with_coordinator(place, action, has_manager=True))


async def _with_coordinator(place: Place, action: Action, *, has_manager: bool) -> int:
    async with open_place(place, None, has_manager=has_manager) as coordinator:
        return await action(coordinator)


async def list_sessions(coordinator: Coordinator, output: str) -> int:
    """Print the sessions."""
    found = [session async for session in all_sessions(coordinator)]
    if output == "jsonl":
        for session in found:
            print(json_line(session))
        return 0
    if not found:
        print("No sessions yet. Begin one: unreal-agent run -p PROMPT")
        return 0
    now = datetime.now(UTC)
    server = (await coordinator.get_server_info(coordinator_pb2.GetServerInfoRequest())).info
    rows = [
        (
            session.session_id,
            standing(session, server),
            ago(session.update_time, now),
            str(session.last_sequence),
            model_words(session.initial_settings.provider, session.initial_settings.model),
            session.initial_settings.workspace,
        )
        for session in found
    ]
    print_table(("session", "state", "changed", "items", "model", "workspace"), rows)
    return 0


async def all_sessions(coordinator: Coordinator) -> AsyncIterator[session_pb2.Session]:
    """Yield every session, page by page."""
    token = ""
    while True:
        page = await coordinator.list_sessions(coordinator_pb2.ListSessionsRequest(page_token=token))
        for session in page.sessions:
            yield session
        token = page.next_page_token
        if not token:
            return


def state_word(rest: session_pb2.Rest) -> str:
    """Return a session's state as a person says it."""
    word = enum_word(session_pb2.SessionState.DESCRIPTOR, rest.session_state)
    return "new" if word == "unspecified" else word


def standing(session: session_pb2.Session, server: server_pb2.ServerInfo) -> str:
    """Return a session's state; one that has work in hand while nobody runs it is "interrupted"."""
    owner = session.owner
    # The store may not have noticed yet that the process before this one is gone.
    is_gone = owner.name == server.name and owner.incarnation_id != server.instance_id
    if session.rest.state == session_pb2.REST_STATE_WORKING and (is_gone or not owner.incarnation_id):
        return "interrupted"
    return state_word(session.rest)


async def show_session(coordinator: Coordinator, session_id: str, output: str) -> int:
    """Print a session's facts and history."""
    if output == "jsonl":
        await coordinator.get_session(coordinator_pb2.GetSessionRequest(session_id=session_id))
        async for item in all_items(coordinator, session_id, after=0):
            print(json_line(item))
        return 0
    found = await coordinator.get_session(coordinator_pb2.GetSessionRequest(session_id=session_id))
    session, settings = found.session, found.settings
    server = (await coordinator.get_server_info(coordinator_pb2.GetServerInfoRequest())).info
    now = datetime.now(UTC)
    reason = f": {one_line(session.rest.reason)}" if session.rest.reason else ""
    cached = f", {found.usage.cached_input_tokens:,} of them cached" if found.usage.cached_input_tokens else ""
    tokens = f"{found.usage.input_tokens:,} tokens in{cached}, {found.usage.output_tokens:,} out"
    print_facts(
        ("session", session.session_id),
        ("state", f"{standing(session, server)}{reason}"),
        ("model", f"{model_words(settings.provider, settings.model)} {settings.effort}"),
        ("workspace", settings.workspace),
        ("tools", ", ".join(settings.enabled_tools)),
        ("forked from", ", ".join(f"{o.parent_session_id} at {o.cut_sequence}" for o in session.ancestry[:1])),
        ("made", ago(session.create_time, now)),
        ("changed", ago(session.update_time, now)),
        (
            "used",
            f"{plural(found.turns, 'turn')}, {tokens}",
        ),
    )
    display = PlainDisplay(
        SessionView(), environment_style(sys.stdout.encoding, is_terminal=sys.stdout.isatty()), shows_history=True
    )
    wish = store_pb2.ListOperationsRequest(session_id=session_id)
    operations = [op async for op in all_operations(coordinator, wish)]
    display.receive(_history(operations=operations))
    print()
    async for item in all_items(coordinator, session_id, after=0):
        display.receive(_history(items=[item]))
        sys.stdout.write(display.frame(now))
    return 0


def _history(**changes: object) -> coordinator_pb2.WatchSessionResponse:
    change = store_pb2.WatchSessionResponse(**changes)  # type: ignore[arg-type]  # items or operations
    return coordinator_pb2.WatchSessionResponse(change=change)


async def show_context(coordinator: Coordinator, session_id: str, *, is_full: bool, output: str) -> int:
    """Print what the model would be sent."""
    context = await coordinator.build_context(coordinator_pb2.BuildContextRequest(session_id=session_id))
    if output == "jsonl":
        print(json_line(context))
        return 0
    style = environment_style(sys.stdout.encoding, is_terminal=sys.stdout.isatty())
    print_context_report(context, style, columns=shutil.get_terminal_size().columns)
    if is_full:
        _print_full_context(context)
    return 0


def _print_full_context(context: coordinator_pb2.BuildContextResponse) -> None:
    print(f"\n--- prompt\n{clean(context.prompt.system_text)}")
    for entry in context.entries:
        match entry.WhichOneof("entry"):
            case "user":
                print(f"\n--- user (item {entry.source_sequence})\n{clean(content_text(entry.user.parts))}")
            case "assistant":
                print(f"\n--- assistant (item {entry.source_sequence})\n{clean(_said(entry.assistant))}")
            case "tool_result":
                result = entry.tool_result
                head = f"\n--- result of {one_line(result.tool_name)} {one_line(result.call_id)}"
                print(f"{head} (item {entry.source_sequence})\n{clean(content_text(result.parts))}")
            case None:
                pass


def _said(message: llm_pb2.AssistantMessage) -> str:
    lines = []
    for item in message.items:
        match item.WhichOneof("item"):
            case "message":
                lines.append(item.message.text)
            case "tool_call":
                lines.append(f"[call {item.tool_call.call_id}] {item.tool_call.name} {item.tool_call.arguments_json}")
            case "reasoning":
                lines.append(f"[reasoning] {item.reasoning.summary}")
            case None:
                pass
    return "\n".join(lines)


async def fork_session(
    coordinator: Coordinator, session_id: str, sequence: int, new_id: str | None, place: Place
) -> int:
    """Make a fork."""
    response = await coordinator.fork_session(
        coordinator_pb2.ForkSessionRequest(
            request_id=new_input_id(), parent_session_id=session_id, session_id=new_id or "", cut_sequence=sequence
        )
    )
    child = response.session
    print(f"session {child.session_id}, forked from {session_id} at item {child.ancestry[0].cut_sequence}")
    print(f"go on: {place.next_command(child.session_id)} -p '…'")
    return 0


async def stop_session(coordinator: Coordinator, session_id: str, reason: str) -> int:
    """Stop a session and wait until it has stopped."""
    await coordinator.stop_session(
        coordinator_pb2.StopSessionRequest(
            session_id=session_id, input_id=new_input_id(), mode=item_pb2.STOP_MODE_HARD, reason=reason
        )
    )
    watch = coordinator_pb2.WatchSessionRequest(session_id=session_id, until_idle=True)
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            async for response in coordinator.watch_session(watch):
                if response.HasField("rest_reached"):
                    print(f"session {session_id} is {state_word(response.rest_reached.rest)}")
    except TimeoutError as error:
        raise CommandError(
            f"the session has not stopped after {STOP_TIMEOUT_S:.0f} s ({session_id})",
            "See what still runs: unreal-agent operations list SESSION.",
        ) from error
    return 0


async def delete_session(coordinator: Coordinator, session_id: str, is_forced: bool) -> int:
    """Delete a session."""
    found = coordinator_pb2.GetSessionResponse()
    try:
        wish = coordinator_pb2.GetSessionRequest(session_id=session_id, with_storage=True)
        found = await coordinator.get_session(wish)
    except DataLossError as error:
        if not is_forced:
            raise CommandError(error.message, "Delete it with --force all the same.") from error
    if not is_forced and found.session.rest.state in (
        session_pb2.REST_STATE_WORKING,
        session_pb2.REST_STATE_WAITING_UNTIL,
    ):
        raise FailedPreconditionError(
            f"session {session_id!r} is {state_word(found.session.rest)}", reason="SESSION_NOT_AT_REST"
        )
    await coordinator.delete_session(coordinator_pb2.DeleteSessionRequest(session_id=session_id, force=is_forced))
    print(f"session {session_id} is deleted; what it stored is removed piece by piece")
    storage = found.storage
    if storage.forks:
        verb = "shows" if storage.forks == 1 else "show"
        print(f"{plural(storage.forks, 'fork')} of it still {verb} {plural(storage.shared_items, 'item')}: these stay")
    if storage.output_files:
        files = plural(storage.output_files, "file")
        print(f"{files} with output of its commands ({size(storage.output_bytes)}) go within 7 days, by age")
    return 0


async def send_input(coordinator: Coordinator, session_id: str, text: str, input_id: str | None, place: Place) -> int:
    """Record an input."""
    if not text.strip():
        raise CommandError("the text is blank", "Say something.")
    # A submission would make no session: an unknown one is told of before.
    await coordinator.get_session(coordinator_pb2.GetSessionRequest(session_id=session_id))
    entry = external_input(text, input_id or new_input_id())
    accepted = await coordinator.submit_input(coordinator_pb2.SubmitInputRequest(session_id=session_id, input=entry))
    word = "was accepted before" if accepted.duplicate else "accepted"
    print(f"input {entry.input_id} {word} (item {accepted.sequence})")
    # Behind an address the session runs by itself; here nobody runs it.
    follows = f"see the answer: {place.watch_command(session_id)}" if place.server else ""
    print(follows or f"answer it: {place.next_command(session_id)}")
    return 0


async def export_session(coordinator: Coordinator, session_id: str, path: str | None) -> int:
    """Write an export; a file appears whole or not at all."""
    records = coordinator.export_session(coordinator_pb2.ExportSessionRequest(session_id=session_id))
    if path is None:
        async for response in records:
            sys.stdout.write(_lines(response))
        return 0
    partial = _Partial(path)
    try:
        partial.begin()
        async for response in records:
            partial.write(_lines(response))
        partial.finish()
    except OSError as error:
        raise CommandError(f"the export can't be written ({path}: {os_error_text(error)})") from error
    finally:
        partial.discard()
    print(f"session {session_id} is in {path}")
    return 0


def _lines(response: coordinator_pb2.ExportSessionResponse) -> str:
    return "".join(f"{json_line(record)}\n" for record in response.records)


class _Partial:
    """A file under another name until it is whole."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._partial_path = f"{path}.{os.getpid()}.partial"
        self._file: TextIO | None = None

    def begin(self) -> None:
        self._file = open(self._partial_path, "x", encoding="utf-8")  # noqa: SIM115 - closed by finish or discard

    def write(self, text: str) -> None:
        assert self._file is not None
        self._file.write(text)

    def finish(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._partial_path, self._path)

    def discard(self) -> None:
        """Close the file and remove what is not whole."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(self._partial_path)


async def import_session(coordinator: Coordinator, path: str, new_id: str | None, place: Place) -> int:
    """Make a session from an export."""

    async def requests() -> AsyncIterator[coordinator_pb2.ImportSessionRequest]:
        first = new_id or ""
        for record in _records(path):
            yield coordinator_pb2.ImportSessionRequest(session_id=first, records=[record])
            first = ""

    response = await coordinator.import_session(requests())
    print(f"session {response.session.session_id}, {plural(response.session.last_sequence, 'item')}")
    print(f"go on: {place.next_command(response.session.session_id)} -p '…'")
    return 0


def _records(path: str) -> Sequence[store_pb2.ExportRecord]:
    try:
        with contextlib.ExitStack() as stack:
            file = sys.stdin if path == "-" else stack.enter_context(open(path, encoding="utf-8"))
            return [_record(line, f"{path}, line {number}") for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise CommandError(f"the export can't be read ({path}: {os_error_text(error)})") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"the export is not UTF-8 ({path})") from error


def _record(line: str, place: str) -> store_pb2.ExportRecord:
    try:
        return json_format.Parse(line, store_pb2.ExportRecord())
    except json_format.ParseError as error:
        raise CommandError(
            f"the export can't be read ({place}: {one_line(str(error))[:200]})",
            "Export the session again with this release.",
        ) from error
