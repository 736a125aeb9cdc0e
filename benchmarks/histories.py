"""Writes histories of any length into a store, as tool turns of a coordinator's shape; nobody is asked to run them."""

from __future__ import annotations

from collections.abc import Iterator

from harness.session_store import SessionStore
from tests.support.session_records import (
    Author,
    completed,
    final,
    items_of,
    new_session,
    operation,
    response,
    text_input,
    text_part,
    turn,
    waiting,
)
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

ITEMS_PER_TURN = 5
TEXT = "x" * 400
"""Of each input and each result: with its response a turn says about 1 KiB."""

TURNS_PER_COMMIT = 40


def tool_turn(
    session_id: str, number: int, like: item_pb2.Turn | None = None
) -> tuple[list[item_pb2.Item], list[operation_pb2.Operation]]:
    """Return input, turn, response with one call, and the call's two statuses; its operation is settled.

    Args:
        session_id: Whose turn it is.
        number: From 1.
        like: What the turn says beside its IDs; the first one follows upon it.
    """
    turn_id, call_id, operation_id = f"t{number}", f"c{number}", f"o{number}"
    begun = turn(turn_id, f"t{number - 1}" if number > 1 else "")
    if like is not None:
        begun.turn.MergeFrom(like)
        begun.turn.turn_id, begun.turn.previous_turn_id = turn_id, f"t{number - 1}" if number > 1 else like.turn_id
    items = [
        text_input(f"i{number}", TEXT),
        begun,
        response(turn_id, [call_id]),
        waiting(turn_id, call_id, operation_id),
        final(turn_id, call_id, operation_id, parts=[text_part(TEXT)]),
    ]
    return items, [completed(session_id, operation_id, call_id)]


def four_commits(author: Author, number: int) -> Iterator[tuple[list[item_pb2.Item], list[operation_pb2.Operation]]]:
    """Return what a coordinator commits in one quick tool turn: two model answers, four commits."""
    first, second, before = f"t{2 * number}", f"t{2 * number + 1}", f"t{2 * number - 1}" if number else ""
    call_id, operation_id = f"c{number}", f"o{number}"
    yield [text_input(f"i{number}", TEXT), turn(first, before)], []
    yield (
        [response(first, [call_id]), waiting(first, call_id, operation_id)],
        [operation(author.session_id, operation_id, call_id)],
    )
    yield (
        [final(first, call_id, operation_id, parts=[text_part(TEXT)]), turn(second, first)],
        [completed(author.session_id, operation_id, call_id)],
    )
    yield [response(second, text=TEXT)], []


async def write_history(store: SessionStore, session_id: str, items: int) -> Author:
    """Make a session with a history of so many items."""
    author = await new_session(store, session_id)
    await _write(author, items, None)
    return author


async def continue_history(store: SessionStore, session_id: str, items: int) -> None:
    """Write so many items to a session that a coordinator began and gave back, so that it can go on behind them."""
    request = store_pb2.GetSessionRequest(session_id=session_id)
    session = (await store.get_session(request)).session
    turns = [item.turn for item in await items_of(store, session_id) if item.HasField("turn")]
    await _write(Author(store, session_id, sequence=session.last_sequence), items, turns[-1])


async def _write(author: Author, items: int, like: item_pb2.Turn | None) -> None:
    turns = -(-items // ITEMS_PER_TURN)
    for first in range(1, turns + 1, TURNS_PER_COMMIT):
        numbers = range(first, min(first + TURNS_PER_COMMIT, turns + 1))
        batch = [tool_turn(author.session_id, number, like) for number in numbers]
        await author.commit(
            *(item for items_of_turn, _ in batch for item in items_of_turn),
            operations=[one for _, operations in batch for one in operations],
        )
