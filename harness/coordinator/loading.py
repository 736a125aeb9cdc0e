"""Reads a session into its durable state: by pages, through the same `apply` that lived through it."""

from __future__ import annotations

from harness.coordinator.apply import apply
from harness.coordinator.state import SessionState, initial_state
from harness.errors import DataLossError
from harness.session_store import SessionStore, records
from unreal_agent.session.v1 import session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

PAGE_ITEMS = 1000


async def load_state(store: SessionStore, session: session_pb2.Session) -> SessionState:
    """Return the state of a session at its latest item.

    Raises:
        DataLossError: A page claims more but does not advance, items have a gap or end early.
        UnsupportedError: A record has a version that this release does not know.
        FailedPreconditionError: UNKNOWN_FIELDS; a later release wrote a record.
    """
    state = initial_state(session)
    more = True
    while more:
        request = store_pb2.ListItemsRequest(
            session_id=session.session_id, after_sequence=state.last_sequence, page_size=PAGE_ITEMS
        )
        page = await store.list_items(request)
        for item in page.items:
            if item.sequence != state.last_sequence + 1:
                raise _damaged(session, f"item {item.sequence} follows {state.last_sequence}")
            # The store may be of a later release. What is not wholly understood must not be gone on with.
            records.check_stored_item(item, f"item {item.sequence} of session {session.session_id!r}")
            state = apply(state, item)
        if page.more and not page.items:
            raise _damaged(session, f"a page after {state.last_sequence} does not advance")
        more = page.more
    if state.last_sequence < session.last_sequence:
        raise _damaged(session, f"it ends at item {state.last_sequence}, its last is {session.last_sequence}")
    return await _with_operations(store, state)


async def _with_operations(store: SessionStore, state: SessionState) -> SessionState:
    page_token = ""
    while True:
        request = store_pb2.ListOperationsRequest(
            session_id=state.session_id,
            filter=store_pb2.OPERATION_FILTER_UNSETTLED,
            page_size=PAGE_ITEMS,
            page_token=page_token,
        )
        page = await store.list_operations(request)
        for operation in page.operations:
            place = f"operation {operation.operation_id!r} of session {state.session_id!r}"
            records.check_stored_operation(operation, place)
            state = apply(state, operation)
        page_token = page.next_page_token
        if not page_token:
            return state


def _damaged(session: session_pb2.Session, what: str) -> DataLossError:
    return DataLossError(f"history of session {session.session_id!r} is damaged: {what}", reason="HISTORY_DAMAGED")
