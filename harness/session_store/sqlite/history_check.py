"""Checks whole histories against the rules that every commit passed, and the file's indexes against the histories.

Reads only. For a doctor and for tests: costs the length of the histories, which nothing else here does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from harness.errors import HarnessError
from harness.session_store.invariants import (
    CallFacts,
    CommitPlan,
    Facts,
    Head,
    SeenInput,
    TurnFacts,
    plan_import,
)
from harness.session_store.sql import rows
from harness.session_store.sql.facts import find_blob
from harness.session_store.sql.reads import decode_item, stored_items
from unreal_agent.session.v1 import item_pb2


@dataclass(slots=True)
class _Replay:
    """A history as far as it was read."""

    head: Head = field(default_factory=lambda: Head(last_sequence=0, latest_turn_id="", is_turn_open=False))
    turns: dict[str, TurnFacts] = field(default_factory=dict)
    calls: dict[str, CallFacts] = field(default_factory=dict)
    inputs: dict[str, SeenInput] = field(default_factory=dict)
    blobs: set[str] = field(default_factory=set)

    def add(self, items: list[item_pb2.Item]) -> None:
        """Take in the items of one commit, or refuse them."""
        facts = Facts(turns=self.turns, calls=self.calls, inputs=self.inputs)
        plan = plan_import(self.head, facts, items)
        self.head = plan.head
        self._keep(plan, items)

    def _keep(self, plan: CommitPlan, items: list[item_pb2.Item]) -> None:
        for turn_id, (_, kind) in plan.new_turns.items():
            self.turns[turn_id] = TurnFacts(kind=kind, is_answered=False)
        for turn_id in plan.answered_turns:
            self.turns[turn_id] = TurnFacts(kind=self.turns[turn_id].kind, is_answered=True)
        for call in plan.calls.values():
            self.calls[call.call_id] = CallFacts(
                turn_id=call.turn_id, operation_ids=tuple(call.operation_ids), is_final=call.final_sequence > 0
            )
        for item in items:
            if item.HasField("input"):
                # An ID that occurs twice is refused whatever the content: it need not be held.
                self.inputs[item.input.input_id] = SeenInput(sequence=item.sequence, message=item_pb2.Input())
        self.blobs.update(plan.blob_references)


def wrong_history(connection: sqlite3.Connection, row: rows.SessionRow) -> Iterator[str]:
    """Yield what is not sound in a session that can be seen, one line each. Holds its keys, not its contents."""
    try:
        rows.read_record(connection, row)
        rows.rest_of(row)
        yield from _wrong_history(connection, row)
    except HarnessError as error:
        yield f"session {row.session_id!r}: {error.message}"


def _wrong_history(connection: sqlite3.Connection, row: rows.SessionRow) -> Iterator[str]:
    replay = _Replay()
    items = (decode_item(row, stored) for stored in stored_items(connection, row, 0))
    for _, commit in groupby(items, key=lambda item: item.revision):
        replay.add(list(commit))
    name = f"session {row.session_id!r}"
    if replay.head.last_sequence != row.last_sequence:
        yield f"{name} ends at item {replay.head.last_sequence}, its row says {row.last_sequence}"
    if replay.head.latest_turn_id != row.latest_turn_id:
        yield f"{name} ends with turn {replay.head.latest_turn_id!r}, its row says {row.latest_turn_id!r}"
    yield from _wrong_indexes(connection, row, replay)
    yield from _wrong_references(connection, row, replay)


def _wrong_indexes(connection: sqlite3.Connection, row: rows.SessionRow, replay: _Replay) -> Iterator[str]:
    """Yield own inputs and calls whose index does not say what the history says."""
    name = f"session {row.session_id!r}"
    indexed = dict(
        connection.execute("SELECT input_id, sequence FROM inputs WHERE session_key = ?", (row.session_key,))
    )
    own = {one: seen.sequence for one, seen in replay.inputs.items() if seen.sequence > row.base_sequence}
    for input_id in sorted(indexed.keys() ^ own.keys()):
        yield f"{name} and its index disagree about input {input_id!r}"
    calls = connection.execute(
        "SELECT call_id, turn_id, final_sequence > 0 FROM calls WHERE session_key = ?", (row.session_key,)
    )
    for call_id, turn_id, is_final in calls:
        call = replay.calls.get(call_id)
        if call is None or (call.turn_id, call.is_final) != (turn_id, bool(is_final)):
            yield f"{name} and its index disagree about call {call_id!r}"


def _wrong_references(connection: sqlite3.Connection, row: rows.SessionRow, replay: _Replay) -> Iterator[str]:
    """Yield what the history names and the file does not hold."""
    name = f"session {row.session_id!r}"
    for digest in sorted(replay.blobs):
        if find_blob(connection, row.session_key, digest) is None:
            yield f"{name} names blob {digest}, which is missing"
    own_calls = connection.execute(
        "SELECT call_id, operation_ids FROM calls WHERE session_key = ?", (row.session_key,)
    ).fetchall()
    for call_id, operation_ids in own_calls:
        for operation_id in operation_ids.split():
            found = connection.execute(
                "SELECT call_id FROM operations WHERE session_key = ? AND operation_id = ?",
                (row.session_key, operation_id),
            ).fetchone()
            # An imported fork names operations that stayed with its parent.
            if found is not None and found[0] != call_id:
                yield f"{name} names operation {operation_id!r} for call {call_id!r}, it is of {found[0]!r}"
            if found is None and not replay.calls[call_id].is_final:
                yield f"{name} waits for operation {operation_id!r}, which is missing"
