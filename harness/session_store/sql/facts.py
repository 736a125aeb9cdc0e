"""Reads the facts that a commit's check needs, by index, inside the writing transaction.

An inherited row counts where its sequence lies at or before the cut of the ancestor that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, cast

from harness.errors import DataLossError
from harness.session_store import records
from harness.session_store.invariants import CallFacts, Facts, Needs, OperationFacts, SeenInput, TurnFacts
from harness.session_store.sql.sql import Connection
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

T = TypeVar("T")

_OWN_TURN: Final = "SELECT kind, answer_sequence > 0 FROM turns WHERE session_key = ? AND turn_id = ?"
_INHERITED_TURN: Final = (
    "SELECT kind, answer_sequence BETWEEN 1 AND through_sequence FROM ancestors JOIN turns"
    " ON turns.session_key = ancestor_key AND sequence <= through_sequence"
    " WHERE ancestors.session_key = ? AND turn_id = ?"
)
_OWN_CALL: Final = "SELECT turn_id, operation_ids, final_sequence > 0 FROM calls WHERE session_key = ? AND call_id = ?"
_INHERITED_CALL: Final = (
    "SELECT turn_id, '', 1 FROM ancestors JOIN calls"
    " ON calls.session_key = ancestor_key AND response_sequence <= through_sequence"
    " WHERE ancestors.session_key = ? AND call_id = ?"
)
_OPERATION: Final = (
    "SELECT type, type_version, status, step, call_id FROM operations WHERE session_key = ? AND operation_id = ?"
)
_OWN_INPUT: Final = "SELECT session_key, sequence FROM inputs WHERE session_key = ? AND input_id = ?"
_INHERITED_INPUT: Final = (
    "SELECT inputs.session_key, sequence FROM ancestors JOIN inputs"
    " ON inputs.session_key = ancestor_key AND sequence <= through_sequence"
    " WHERE ancestors.session_key = ? AND input_id = ?"
)
OWN_BLOB: Final = "SELECT size_bytes, blob_key, media_type FROM blobs WHERE session_key = ? AND digest = ?"
_INHERITED_BLOB: Final = (
    "SELECT size_bytes, blob_key, media_type FROM ancestors JOIN blobs"
    " ON blobs.session_key = ancestor_key AND reference_sequence <= through_sequence"
    " WHERE ancestors.session_key = ? AND digest = ?"
)


def read_facts(connection: Connection, session_key: int, needs: Needs, *, is_fork: bool) -> Facts:
    """Return what the store holds under the keys that a commit names."""

    def find(own: str, inherited: str, keys: Iterable[str], make: Callable[..., T]) -> dict[str, T]:
        found = {}
        for key in keys:
            row = connection.execute(own, (session_key, key)).fetchone()
            if row is None and is_fork:
                row = connection.execute(inherited, (session_key, key)).fetchone()
            if row is not None:
                found[key] = make(*row)
        return found

    def seen_input(owner_key: int, sequence: int) -> SeenInput:
        found = connection.execute(
            "SELECT record FROM items WHERE session_key = ? AND sequence = ?", (owner_key, sequence)
        ).fetchone()
        if found is None:
            raise DataLossError(f"item {sequence}, an input, is missing", reason="HISTORY_DAMAGED")
        (record,) = found
        return SeenInput(sequence=sequence, message=records.decode_item(record, f"item {sequence}").input)

    calls = find(_OWN_CALL, _INHERITED_CALL, needs.call_ids, _call_facts)
    operation_ids = needs.operation_ids.union(*(call.operation_ids for call in calls.values()))
    operations = {}
    for operation_id in operation_ids:
        row = connection.execute(_OPERATION, (session_key, operation_id)).fetchone()
        if row is not None:
            operations[operation_id] = _operation_facts(*row)
    return Facts(
        turns=find(_OWN_TURN, _INHERITED_TURN, needs.turn_ids, _turn_facts),
        calls=calls,
        operations=operations,
        inputs=find(_OWN_INPUT, _INHERITED_INPUT, needs.input_ids, seen_input),
        blob_sizes=find(OWN_BLOB, _INHERITED_BLOB, needs.digests, _blob_size),
    )


def find_input(connection: Connection, session_key: int, input_id: str) -> tuple[int, int] | None:
    """Return whose item holds an input of a session, and its sequence; None where the ID was not used."""
    row = _find_one(connection, (_OWN_INPUT, _INHERITED_INPUT), session_key, input_id)
    return None if row is None else (row[0], row[1])


def find_blob(connection: Connection, session_key: int, digest: str) -> tuple[int, int, str] | None:
    """Return a readable blob's size, key and media type, or None."""
    row = _find_one(connection, (OWN_BLOB, _INHERITED_BLOB), session_key, digest)
    return None if row is None else (row[0], row[1], row[2])


def _find_one(connection: Connection, statements: Iterable[str], session_key: int, key: str) -> tuple[Any, ...] | None:
    for statement in statements:
        row = connection.execute(statement, (session_key, key)).fetchone()
        if row is not None:
            return tuple(row)
    return None


def _turn_facts(kind: int, is_answered: int) -> TurnFacts:
    # The column holds what the enum's field held.
    return TurnFacts(kind=cast("item_pb2.TurnKind.ValueType", kind), is_answered=bool(is_answered))


def _call_facts(turn_id: str, operation_ids: str, is_final: int) -> CallFacts:
    return CallFacts(turn_id=turn_id, operation_ids=tuple(operation_ids.split()), is_final=bool(is_final))


def _operation_facts(type_: str, type_version: int, status: int, step: int, call_id: str) -> OperationFacts:
    # The column holds what the enum's field held.
    known_status = cast("operation_pb2.OperationStatus.ValueType", status)
    return OperationFacts(type=type_, type_version=type_version, status=known_status, step=step, call_id=call_id)


def _blob_size(size_bytes: int, _blob_key: int, _media_type: str) -> int:
    return size_bytes
