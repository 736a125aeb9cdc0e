"""Makes items, operations and commits for tests of session stores, and writes them to a store of any kind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from harness.session_store import SessionStore, put_blob_bytes
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.server.v1 import server_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

VERSIONS = server_pb2.ReaderVersions(session_format=1, item=1, operation=1)
SETTINGS = session_pb2.SessionSettings(provider="scripted", model="demo")


def at_rest() -> session_pb2.Rest:
    return session_pb2.Rest(state=session_pb2.REST_STATE_AT_REST, session_state=session_pb2.SESSION_STATE_IDLE)


def working() -> session_pb2.Rest:
    return session_pb2.Rest(state=session_pb2.REST_STATE_WORKING, session_state=session_pb2.SESSION_STATE_RUNNING)


def text_part(text: str) -> llm_pb2.ContentPart:
    return llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))


def blob_part(blob: llm_pb2.BlobRef) -> llm_pb2.ContentPart:
    return llm_pb2.ContentPart(image=llm_pb2.ImagePart(blob=blob, media_type=blob.media_type))


def text_input(input_id: str, text: str = "hi", *more: llm_pb2.ContentPart) -> item_pb2.Item:
    message = item_pb2.Input(
        schema_version=1,
        input_id=input_id,
        kind=item_pb2.INPUT_KIND_EXTERNAL,
        delivery=item_pb2.DELIVERY_INTERRUPT,
        content=item_pb2.Content(parts=[text_part(text), *more]),
    )
    return item_pb2.Item(schema_version=1, input=message)


def turn(
    turn_id: str, previous: str = "", kind: item_pb2.TurnKind.ValueType = item_pb2.TURN_KIND_REGULAR
) -> item_pb2.Item:
    return item_pb2.Item(
        schema_version=1, turn=item_pb2.Turn(turn_id=turn_id, previous_turn_id=previous, kind=kind, model="demo")
    )


def response(turn_id: str, calls: Iterable[str] = (), text: str = "done") -> item_pb2.Item:
    items = [llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text=text))]
    items += [
        llm_pb2.OutputItem(tool_call=llm_pb2.ToolCall(call_id=call_id, name="bash", arguments_json="{}"))
        for call_id in calls
    ]
    output = llm_pb2.ModelOutput(stop_reason=llm_pb2.STOP_REASON_COMPLETE, items=items)
    return item_pb2.Item(schema_version=1, model_response=item_pb2.ModelResponse(turn_id=turn_id, output=output))


def failure(turn_id: str) -> item_pb2.Item:
    failed = item_pb2.TurnFailure(
        turn_id=turn_id, failure=llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_OVERLOAD, message="busy")
    )
    return item_pb2.Item(schema_version=1, turn_failure=failed)


def waiting(turn_id: str, call_id: str, *operation_ids: str) -> item_pb2.Item:
    status = item_pb2.ToolCallStatus(turn_id=turn_id, call_id=call_id, operation_ids=operation_ids)
    return item_pb2.Item(schema_version=1, tool_call_status=status)


def final(
    turn_id: str,
    call_id: str,
    *operation_ids: str,
    parts: Sequence[llm_pb2.ContentPart] = (),
    outcome: item_pb2.CallOutcome.ValueType = item_pb2.CALL_OUTCOME_COMPLETED,
) -> item_pb2.Item:
    result = item_pb2.CallResult(outcome=outcome, parts=parts or [text_part(f"result of {call_id}")])
    status = item_pb2.ToolCallStatus(turn_id=turn_id, call_id=call_id, operation_ids=operation_ids, result=result)
    return item_pb2.Item(schema_version=1, tool_call_status=status)


def operation(
    session_id: str,
    operation_id: str,
    call_id: str = "",
    *,
    step: int = 1,
    status: operation_pb2.OperationStatus.ValueType = operation_pb2.OPERATION_STATUS_READY,
    instance_id: str = "",
) -> operation_pb2.Operation:
    return operation_pb2.Operation(
        schema_version=1,
        operation_id=operation_id,
        session_id=session_id,
        type="bash",
        type_version=1,
        status=status,
        step=step,
        effect_class=operation_pb2.EFFECT_CLASS_AT_MOST_ONCE,
        call_id=call_id,
        instance_id=instance_id,
        bash=operation_pb2.BashState(command="true"),
    )


def completed(session_id: str, operation_id: str, call_id: str = "", *, step: int = 9) -> operation_pb2.Operation:
    status = operation_pb2.OPERATION_STATUS_COMPLETED
    return operation(session_id, operation_id, call_id, step=step, status=status)


def blob_of(data: bytes, media_type: str = "image/png") -> llm_pb2.BlobRef:
    return llm_pb2.BlobRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data), media_type=media_type)


def incarnation(name: str, number: int = 1) -> session_pb2.Incarnation:
    return session_pb2.Incarnation(name=name, incarnation_id=f"{name}-{number}", address=f"{name}.example:1")


class Author:
    """Writes to one session as a coordinator does: knows its sequence, numbers its commits."""

    def __init__(self, store: SessionStore, session_id: str, *, epoch: int = 0, sequence: int = 0) -> None:
        self.store = store
        self.session_id = session_id
        self.epoch = epoch
        self.sequence = sequence
        self.commits = 0

    def request(
        self,
        *items: item_pb2.Item,
        operations: Iterable[operation_pb2.Operation] = (),
        blobs: Iterable[llm_pb2.BlobRef] = (),
        rest: session_pb2.Rest | None = None,
        commit_id: str = "",
    ) -> store_pb2.CommitRequest:
        """Return the next commit without sending it."""
        self.commits += 1
        return store_pb2.CommitRequest(
            session_id=self.session_id,
            commit_id=commit_id or f"{self.epoch}-{self.sequence}-{self.commits}",
            epoch=self.epoch,
            expected_sequence=self.sequence,
            items=items,
            operations=operations,
            blobs=blobs,
            rest=rest or at_rest(),
        )

    async def send(self, request: store_pb2.CommitRequest) -> store_pb2.CommitResponse:
        """Send a commit and go on behind it."""
        answer = await self.store.commit(request)
        self.sequence = answer.last_sequence
        return answer

    async def commit(
        self,
        *items: item_pb2.Item,
        operations: Iterable[operation_pb2.Operation] = (),
        blobs: Iterable[llm_pb2.BlobRef] = (),
        rest: session_pb2.Rest | None = None,
    ) -> store_pb2.CommitResponse:
        """Make and send a commit."""
        return await self.send(self.request(*items, operations=operations, blobs=blobs, rest=rest))

    async def put(self, data: bytes, media_type: str = "image/png") -> llm_pb2.BlobRef:
        """Store a blob and return its reference."""
        blob = blob_of(data, media_type)
        await put_blob_bytes(self.store, self.session_id, blob, data)
        return blob


async def new_session(store: SessionStore, session_id: str = "s") -> Author:
    """Make a session and return somebody who writes to it."""
    request = store_pb2.CreateSessionRequest(
        session_id=session_id, requested_settings=SETTINGS, initial_settings=SETTINGS
    )
    await store.create_session(request)
    return Author(store, session_id)


async def session_of(store: SessionStore, session_id: str) -> session_pb2.Session:
    return (await store.get_session(store_pb2.GetSessionRequest(session_id=session_id))).session


async def items_of(store: SessionStore, session_id: str, page_size: int = 0) -> list[item_pb2.Item]:
    """Return a session's whole history, page by page."""
    items: list[item_pb2.Item] = []
    after_sequence, more = 0, True
    while more:
        request = store_pb2.ListItemsRequest(session_id=session_id, after_sequence=after_sequence, page_size=page_size)
        page = await store.list_items(request)
        items.extend(page.items)
        after_sequence, more = page.next_after_sequence, page.more
    return items


async def operations_of(
    store: SessionStore,
    session_id: str,
    filter_: store_pb2.OperationFilter.ValueType = store_pb2.OPERATION_FILTER_UNSPECIFIED,
) -> list[operation_pb2.Operation]:
    """Return a session's operations, page by page."""
    operations: list[operation_pb2.Operation] = []
    token, more = "", True
    while more:
        page = await store.list_operations(
            store_pb2.ListOperationsRequest(session_id=session_id, filter=filter_, page_token=token)
        )
        operations.extend(page.operations)
        token, more = page.next_page_token, bool(page.next_page_token)
    return operations


async def write_tool_turn(author: Author, number: int = 1, *, is_finished: bool = True) -> None:
    """Write an input, a turn, a response with one call, and, if wished, the call's end."""
    turn_id, call_id, operation_id = f"t{number}", f"c{number}", f"o{number}"
    previous = f"t{number - 1}" if number > 1 else ""
    await author.commit(text_input(f"i{number}"), turn(turn_id, previous), rest=working())
    await author.commit(
        response(turn_id, [call_id]),
        waiting(turn_id, call_id, operation_id),
        operations=[operation(author.session_id, operation_id, call_id)],
        rest=working(),
    )
    if is_finished:
        await author.commit(
            final(turn_id, call_id, operation_id), operations=[completed(author.session_id, operation_id, call_id)]
        )
