"""Opens the session that a run is about: made, or found and brought up to what was asked. Then submits the inputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from clients.cli.failures import CommandError
from clients.cli.request import Message, RunRequest, new_input_id
from clients.cli.view import SessionView
from harness.coordinator import Coordinator
from harness.errors import NotFoundError, PermissionDeniedError
from harness.inbox import validate_input
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

HISTORY_ITEMS = 256
"""Items before a run that are read again, so that calls which still run have their names."""

INPUT_SCHEMA_VERSION = 1

CONTINUE_TEXT = "Go on where you were stopped."
"""What a session is told that was stopped in the middle of something and is run again without a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A session that a run follows."""

    session_id: str
    settings: session_pb2.SessionSettings
    is_resumed: bool
    after_sequence: int
    """The run's own items come behind this one."""

    after_revision: int
    """The run's own changes come behind this one."""

    notices: tuple[str, ...] = field(default=())
    """What a person should know before anything happens; one line each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a new session gets where the request says nothing."""

    session_id: str
    provider: str
    model: str
    workspace: str
    labels: Mapping[str, str]


def external_input(text: str, input_id: str) -> item_pb2.Input:
    """Return a user's input."""
    part = llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))
    return item_pb2.Input(
        schema_version=INPUT_SCHEMA_VERSION,
        input_id=input_id,
        kind=item_pb2.INPUT_KIND_EXTERNAL,
        content=item_pb2.Content(parts=[part]),
    )


async def open_session(
    coordinator: Coordinator,
    request: RunRequest,
    defaults: Callable[[], Defaults],
    check_settings: Callable[[session_pb2.SessionSettings], None],
) -> OpenedSession:
    """Return the session of a request, made where it is new; its inputs are durable, or what was left is under way.

    Every step may be repeated after a crash: a session that exists is found, an input that was accepted is a duplicate.
    `defaults` is asked where a session is made; `check_settings` raises where one that exists can't be run here, before
    anything is changed.

    Raises:
        CommandError: The request does not fit the session.
        InvalidArgumentError: An input is one that no session takes.
        NotFoundError: No such session, and nothing to begin one with.
    """
    for message in request.messages:
        # Before anything is made: a session without its first input is of no use to anybody.
        validate_input(external_input(message.content, message.input_id))
    found = await _find(coordinator, request)
    if found is None:
        created = await _create(coordinator, _create_request(request, defaults()), is_id_free=not request.session_id)
        session, settings = created.session, created.session.initial_settings
        return await _submit(coordinator, request.messages, session, settings, is_resumed=False)
    check_settings(found.settings)
    await _update_settings(coordinator, request, found)
    if request.messages:
        return await _submit(coordinator, request.messages, found.session, found.settings, is_resumed=True)
    return await _go_on(coordinator, found)


async def seed_view(coordinator: Coordinator, opened: OpenedSession) -> SessionView:
    """Return a view that knows what lies just before the run: the names of calls, and which of them still run."""
    view = SessionView()
    if opened.after_sequence:
        await read_history(coordinator, opened.session_id, view, through=opened.after_sequence)
    view.begin_run(opened.after_sequence, opened.after_revision)
    return view


async def read_history(coordinator: Coordinator, session_id: str, view: SessionView, *, through: int) -> None:
    """Feed the last items up to `through`, and the unsettled operations, to a view."""
    wish = store_pb2.ListOperationsRequest(session_id=session_id, filter=store_pb2.OPERATION_FILTER_UNSETTLED)
    operations = [op async for op in all_operations(coordinator, wish)]
    view.feed_changes([], operations, None)
    after = max(0, through - HISTORY_ITEMS)
    async for item in all_items(coordinator, session_id, after=after):
        if item.sequence > through:
            return
        view.feed_changes([item], [], None)


async def all_items(coordinator: Coordinator, session_id: str, *, after: int) -> AsyncIterator[item_pb2.Item]:
    """Yield a session's items behind a sequence, page by page."""
    while True:
        wish = store_pb2.ListItemsRequest(session_id=session_id, after_sequence=after)
        page = (await coordinator.list_items(coordinator_pb2.ListItemsRequest(request=wish))).page
        for item in page.items:
            yield item
        if not page.more:
            return
        after = page.next_after_sequence


async def all_operations(
    coordinator: Coordinator, wish: store_pb2.ListOperationsRequest
) -> AsyncIterator[operation_pb2.Operation]:
    """Yield the operations that a request asks for, page by page."""
    while True:
        page = (await coordinator.list_operations(coordinator_pb2.ListOperationsRequest(request=wish))).page
        for operation in page.operations:
            yield operation
        if not page.next_page_token:
            return
        following = store_pb2.ListOperationsRequest()
        following.CopyFrom(wish)
        following.page_token = page.next_page_token
        wish = following


async def _find(coordinator: Coordinator, request: RunRequest) -> coordinator_pb2.GetSessionResponse | None:
    if request.session_id is None:
        return None
    try:
        return await coordinator.get_session(coordinator_pb2.GetSessionRequest(session_id=request.session_id))
    except NotFoundError:
        # A prompt may begin a session under an ID of the caller's choice; without one there is nothing to go on with.
        if request.messages:
            return None
        raise


async def _create(
    coordinator: Coordinator, wish: coordinator_pb2.CreateSessionRequest, *, is_id_free: bool
) -> coordinator_pb2.CreateSessionResponse:
    try:
        return await coordinator.create_session(wish)
    except PermissionDeniedError as error:
        prefix = error.metadata.get("session_prefix", "")
        if not (is_id_free and prefix):
            raise
        # The token is for IDs that begin so; the person did not ask for one.
        wish.session_id = f"{prefix}{wish.session_id}"
        return await coordinator.create_session(wish)


def _create_request(request: RunRequest, defaults: Defaults) -> coordinator_pb2.CreateSessionRequest:
    settings = session_pb2.SessionSettings(
        provider=request.provider or defaults.provider,
        model=request.model or defaults.model,
        effort=request.effort or "",
        system_prompt=request.system_prompt or "",
        enabled_tools=request.tools or (),
        workspace=request.workspace or defaults.workspace,
        labels=defaults.labels,
    )
    if request.manager is not None:
        settings.manager_name = request.manager
    if request.max_turns is not None:
        settings.limits.max_turns = request.max_turns
    return coordinator_pb2.CreateSessionRequest(session_id=request.session_id or defaults.session_id, settings=settings)


async def _update_settings(
    coordinator: Coordinator, request: RunRequest, found: coordinator_pb2.GetSessionResponse
) -> None:
    """Record what the request says and the session has otherwise."""
    settings = found.settings
    if request.workspace is not None and request.workspace != settings.workspace:
        raise CommandError(
            f"a session stays in its workspace ({found.session.session_id}: {settings.workspace})",
            "Leave --workspace out, or begin another session.",
        )
    if request.manager is not None and request.manager != settings.manager_name:
        raise CommandError(
            f"a session stays with its operation manager ({found.session.session_id}: {settings.manager_name})",
            "Leave --manager out, or begin another session.",
        )
    patch = session_pb2.SettingsPatch()
    for name in ("provider", "model", "effort", "system_prompt"):
        value = getattr(request, name)
        if value is not None and value != getattr(settings, name):
            setattr(patch, name, value)
    if request.tools is not None and list(request.tools) != list(settings.enabled_tools):
        patch.enabled_tools.names.extend(request.tools)
    if request.max_turns is not None:
        # The bound counts from the session's beginning; a person means this run.
        patch.limits.CopyFrom(settings.limits)
        patch.limits.max_turns = found.turns + request.max_turns
    if patch == session_pb2.SettingsPatch():
        return
    await coordinator.update_settings(
        coordinator_pb2.UpdateSettingsRequest(session_id=found.session.session_id, input_id=new_input_id(), patch=patch)
    )


async def _submit(
    coordinator: Coordinator,
    messages: Sequence[Message],
    session: session_pb2.Session,
    settings: session_pb2.SessionSettings,
    *,
    is_resumed: bool,
) -> OpenedSession:
    """Submit inputs; a run that repeats one shows what came of it then."""
    after_sequence, after_revision = session.last_sequence, session.revision
    notices = []
    for message in messages:
        accepted = await coordinator.submit_input(
            coordinator_pb2.SubmitInputRequest(
                session_id=session.session_id, input=external_input(message.content, message.input_id)
            )
        )
        if accepted.duplicate:
            notices.append(f"input {message.input_id} was accepted before (item {accepted.sequence}): no second turn")
            after_sequence = min(after_sequence, accepted.sequence - 1)
            after_revision = min(after_revision, await _revision_before(coordinator, session.session_id, message))
    return OpenedSession(
        session_id=session.session_id,
        settings=settings,
        is_resumed=is_resumed,
        after_sequence=after_sequence,
        after_revision=after_revision,
        notices=tuple(notices),
    )


async def _revision_before(coordinator: Coordinator, session_id: str, message: Message) -> int:
    """Return the revision just before the commit that holds an input, so that what came of it is shown."""
    wish = store_pb2.ListItemsRequest(session_id=session_id, input_id=message.input_id)
    page = (await coordinator.list_items(coordinator_pb2.ListItemsRequest(request=wish))).page
    return page.items[0].revision - 1


async def _go_on(coordinator: Coordinator, found: coordinator_pb2.GetSessionResponse) -> OpenedSession:
    """Set a session going again that has something unfinished; one that is under way goes on by itself."""
    session = found.session
    notices: tuple[str, ...] = ()
    match session.rest.session_state:
        case session_pb2.SESSION_STATE_FAILED:
            await coordinator.retry_turn(
                coordinator_pb2.RetryTurnRequest(session_id=session.session_id, input_id=new_input_id())
            )
        case session_pb2.SESSION_STATE_STOPPING | session_pb2.SESSION_STATE_STOPPED if await _has_pending_work(
            coordinator, session
        ):
            # Only an input starts it again, once the stop is complete. One ID for each stop: repeated after a crash, it
            # is a duplicate.
            message = Message(content=CONTINUE_TEXT, input_id=f"continue/{session.last_sequence}")
            return await _submit(coordinator, [message], session, found.settings, is_resumed=True)
        case session_pb2.SESSION_STATE_IDLE | session_pb2.SESSION_STATE_STOPPED:
            notices = ("nothing is unfinished; give a prompt with -p",)
        case _:
            pass
    return OpenedSession(
        session_id=session.session_id,
        settings=found.settings,
        is_resumed=True,
        after_sequence=session.last_sequence,
        after_revision=session.revision,
        notices=notices,
    )


async def _has_pending_work(coordinator: Coordinator, session: session_pb2.Session) -> bool:
    view = SessionView()
    await read_history(coordinator, session.session_id, view, through=session.last_sequence)
    return view.has_pending_work
