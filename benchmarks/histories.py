"""Writes histories of any length into a store, as tool turns of a coordinator's shape; nobody is asked to run them."""

from __future__ import annotations

from collections.abc import Iterator

from harness.session_store import SessionStore
from tests.support.session_records import (
    Author,
    completed,
    final,
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

ITEMS_PER_TURN = 5
TEXT = "x" * 400
"""Of each input and each result: with its response a turn says about 1 KiB."""

TURNS_PER_COMMIT = 40


def tool_turn(session_id: str, number: int) -> tuple[list[item_pb2.Item], list[operation_pb2.Operation]]:
    """Return input, turn, response with one call, and the call's two statuses; its operation is settled."""
    turn_id, call_id, operation_id = f"t{number}", f"c{number}", f"o{number}"
    items = [
        text_input(f"i{number}", TEXT),
        turn(turn_id, f"t{number - 1}" if number > 1 else ""),
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
    turns = -(-items // ITEMS_PER_TURN)
    for first in range(1, turns + 1, TURNS_PER_COMMIT):
        batch = [tool_turn(session_id, number) for number in range(first, min(first + TURNS_PER_COMMIT, turns + 1))]
        await author.commit(
            *(item for items_of_turn, _ in batch for item in items_of_turn),
            operations=[one for _, operations in batch for one in operations],
        )
    return author
