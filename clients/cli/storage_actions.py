"""What `sessions storage` prints: what sessions take up, by kind, and what goes with them or stays."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from clients.cli.jsonl_display import json_line
from clients.cli.session_actions import all_sessions
from clients.cli.tables import print_facts, print_table
from clients.cli.text import plural, size
from harness.coordinator import Coordinator
from harness.errors import HarnessError
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import session_pb2


async def show_storage(coordinator: Coordinator, session_id: str, output: str) -> int:
    """Print what one session takes up, or what each does."""
    if session_id:
        storage = await _storage(coordinator, session_id)
        if output == "jsonl":
            print(json_line(storage))
        else:
            _print_one(session_id, storage)
        return 0
    return await _show_all(coordinator, output)


async def _storage(coordinator: Coordinator, session_id: str) -> session_pb2.SessionStorage:
    request = coordinator_pb2.GetSessionRequest(session_id=session_id, with_storage=True)
    return (await coordinator.get_session(request)).storage


async def _show_all(coordinator: Coordinator, output: str) -> int:
    rows, damaged = [], []
    total = 0
    async for session in all_sessions(coordinator):
        try:
            storage = await _storage(coordinator, session.session_id)
        except HarnessError as error:
            # One that can't be read does not hide the others.
            damaged.append(error.message)
            continue
        if output == "jsonl":
            print(json_line(coordinator_pb2.GetSessionResponse(session=session, storage=storage)))
            continue
        total += _stored_bytes(storage)
        rows.append((session.session_id, _stored_bytes(storage), storage))
    if rows:
        rows.sort(key=lambda row: -row[1])
        heads = ("session", "stored", "items", "operations", "blobs", "shared with forks", "output files")
        print_table(heads, [_cells(*row) for row in rows], right_aligned=range(1, len(heads)))
        print(f"\n{plural(len(rows), 'session')}, {size(total)} stored")
    elif output != "jsonl" and not damaged:
        print("No sessions yet. Begin one: unreal-agent run -p PROMPT")
    for message in damaged:
        print(f"not counted: {message}", file=sys.stderr)
    return 1 if damaged else 0


def _cells(session_id: str, stored: int, storage: session_pb2.SessionStorage) -> tuple[str, ...]:
    return (
        session_id,
        size(stored),
        size(_bytes(storage.items)),
        size(_bytes(storage.operations)),
        size(storage.blob_bytes),
        size(storage.shared_bytes),
        size(storage.output_bytes),
    )


def _print_one(session_id: str, storage: session_pb2.SessionStorage) -> None:
    rows = [
        *(("items", amount.kind.replace("_", " "), amount) for amount in storage.items),
        *(("operations", amount.kind, amount) for amount in storage.operations),
    ]
    cells = [(part, kind, f"{amount.count:,}", size(amount.bytes)) for part, kind, amount in rows]
    if storage.blobs:
        cells.append(("blobs", "", f"{storage.blobs:,}", size(storage.blob_bytes)))
    if cells:
        print_table(("stored", "kind", "count", "size"), cells, right_aligned=(2, 3))
        print()
    unnamed = plural(storage.unnamed_blobs, "blob")
    print_facts(
        ("session", session_id),
        ("stored", f"{size(_stored_bytes(storage))}, and what indexes take"),
        ("unnamed", f"{unnamed} in no input yet; go after 24 hours" if storage.unnamed_blobs else ""),
        ("inherited", _inherited(storage)),
        ("shared", _shared(storage)),
        ("output files", _outputs(storage)),
    )


def _inherited(storage: session_pb2.SessionStorage) -> str:
    if not storage.inherited_items:
        return ""
    items = plural(storage.inherited_items, "item")
    return f"{items}, {size(storage.inherited_item_bytes)}, stored with the sessions that it was forked from"


def _shared(storage: session_pb2.SessionStorage) -> str:
    if not storage.forks:
        return "with nobody"
    items = plural(storage.shared_items, "item")
    return f"{items}, {size(storage.shared_bytes)}, stay for {plural(storage.forks, 'fork')} when it is deleted"


def _outputs(storage: session_pb2.SessionStorage) -> str:
    if not storage.output_files:
        return "none"
    files = plural(storage.output_files, "file")
    return f"{files}, {size(storage.output_bytes)} when written, at the operation manager; go after 7 days at most"


def _stored_bytes(storage: session_pb2.SessionStorage) -> int:
    return _bytes(storage.items) + _bytes(storage.operations) + storage.blob_bytes


def _bytes(amounts: Iterable[session_pb2.StoredAmount]) -> int:
    return sum(amount.bytes for amount in amounts)
