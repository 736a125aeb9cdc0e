"""A history kept with the session store alone: no coordinator, no model, no tools; only the store's service and client.

Start one, and name its address:

    .venv/bin/python -m services.session_store --listen unix:/tmp/store.sock --state-dir /tmp/store
    .venv/bin/python -m examples.session_store_alone unix:/tmp/store.sock
"""

from __future__ import annotations

import asyncio
import sys

from clients.session_store import RemoteSessionStore
from harness.primitives.streams import closing
from harness.session_store import SessionStore
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

AT_REST = session_pb2.Rest(state=session_pb2.REST_STATE_AT_REST, session_state=session_pb2.SESSION_STATE_IDLE)


def note(number: int, text: str) -> item_pb2.Item:
    content = item_pb2.Content(parts=[llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))])
    kind = item_pb2.INPUT_KIND_EXTERNAL
    message = item_pb2.Input(schema_version=1, input_id=f"note-{number}", kind=kind, content=content)
    return item_pb2.Item(schema_version=1, input=message)


async def keep_history(store: SessionStore) -> None:
    session = (await store.create_session(store_pb2.CreateSessionRequest())).session
    # An epoch of 0: nobody holds a lease. The same commit_id again, after a lost answer, writes nothing.
    commit = store_pb2.CommitRequest(session_id=session.session_id, commit_id="c1", rest=AT_REST)
    commit.items.extend(note(number, f"note {number}") for number in range(1, 6))
    await store.commit(commit)

    page = store_pb2.ListItemsResponse(more=True)
    while page.more:
        request = store_pb2.ListItemsRequest(
            session_id=session.session_id, after_sequence=page.next_after_sequence, page_size=2
        )
        page = await store.list_items(request)
        print("page:", *(item.input.content.parts[0].text.text for item in page.items), sep="\n  ")

    async with closing(store.watch_session(store_pb2.WatchSessionRequest(session_id=session.session_id))) as changes:
        async for change in changes:
            print(f"watched up to revision {change.revision}: {len(change.items)} items")
            if change.is_current:
                return


async def main(address: str) -> None:
    async with RemoteSessionStore(address) as store:
        await keep_history(store)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
