"""Compares a store's file with the journal and the outputs of the operation manager beside it; changes nothing.

Each writes before the other is told: an operation is committed before it is sent, an acknowledgement goes out behind
the commit. So whatever one of them knows of the other's and the other does not know any more was lost there: a copy of
another day was put back, or the end of a file is gone. Nothing inside one file could tell.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, cast

from harness.errors import DataLossError, HarnessError
from harness.operations import journal_check
from harness.primitives.messages import find_messages
from harness.session_store import records
from harness.session_store.sql import rows
from harness.session_store.sqlite import state_check
from unreal_agent.operation.v1 import operation_pb2

_STORE_IS_OLD: Final = "the store lost what was committed since, or is an older copy"
_JOURNAL_IS_OLD: Final = "the journal lost what was written since, or is an older copy"


def check_against_manager(store_path: Path, state_directory: Path) -> tuple[str, ...]:
    """Return where store and manager contradict each other, one line each; empty where they agree.

    Raises:
        HarnessError: One of the files can't be read; as `state_check.opened` and `journal_check.opened` say.
    """
    return tuple(islice(_contradictions(store_path, state_directory), state_check.MAX_FINDINGS))


def check_not_older(store_path: Path, state_directory: Path) -> None:
    """Refuse a store that is an older copy than the journal beside it; for use before both are opened to work.

    Operations are named by session and sequence: one that the older store comes to again would be taken for the one
    that ran, and answered with its result. Costs the sessions that the manager knows. Nothing is said of files that are
    not there or can't be read: whoever opens them says it.

    Raises:
        DataLossError: STORE_OUTDATED, with the session.
    """
    if not store_path.exists() or not (state_directory / journal_check.JOURNAL_NAME).exists():
        return
    older = None
    with suppress(HarnessError), journal_check.opened(state_directory) as journal:
        # All of it: a cursor left in the middle would be closed on another thread.
        epochs = list(journal_check.epochs(journal))
        with state_check.opened(store_path) as store:
            older = next((one for one, epoch in epochs if _is_older(store, one, epoch)), None)
    if older is not None:
        raise DataLossError(
            f"session {older!r} went on after this state of {str(store_path)!r}: {_STORE_IS_OLD}",
            reason="STORE_OUTDATED",
            metadata={"session_id": older, "path": str(store_path)},
        )


def _is_older(store: sqlite3.Connection, session_id: str, epoch: int) -> bool:
    row = rows.look_up(store, session_id)
    return row is not None and row.epoch < epoch


def _contradictions(store_path: Path, state_directory: Path) -> Iterator[str]:
    # The journal's state is taken first: what is in it was in the store before.
    with journal_check.opened(state_directory) as journal:
        instance_id = journal_check.instance_id(journal)
        with state_check.opened(store_path) as store:
            for session_id, epoch in journal_check.epochs(journal):
                yield from _older_session(store, session_id, epoch)
            for fact in journal_check.facts(journal):
                if isinstance(fact, journal_check.JournalFact):
                    yield from _older_operation(store, fact)
    with state_check.opened(store_path) as store, journal_check.opened(state_directory) as journal:
        # Here the other way round, in states of the other order.
        yield from _wrong_in_journal(store, journal, instance_id)


def _older_session(store: sqlite3.Connection, session_id: str, epoch: int) -> Iterator[str]:
    row = rows.look_up(store, session_id)
    if row is None:
        yield f"session {session_id!r} is known to the operation manager and not in the store: {_STORE_IS_OLD}"
    elif row.epoch < epoch:
        yield (
            f"session {session_id!r} is under epoch {row.epoch} in the store, under {epoch} at the operation manager:"
            f" {_STORE_IS_OLD}"
        )


def _older_operation(store: sqlite3.Connection, fact: journal_check.JournalFact) -> Iterator[str]:
    operation = fact.operation
    row = rows.look_up(store, operation.session_id)
    if row is None or row.visibility != rows.VISIBLE or fact.is_discarded:
        return
    name = f"operation {operation.operation_id!r} of session {operation.session_id!r}"
    found = store.execute(
        "SELECT step FROM operations WHERE session_key = ? AND operation_id = ?",
        (row.session_key, operation.operation_id),
    ).fetchone()
    if found is None:
        yield f"{name} is in the journal and not in the store: {_STORE_IS_OLD}"
    elif found[0] < fact.acknowledged_step:
        yield f"{name} is at step {found[0]} in the store, acknowledged was {fact.acknowledged_step}: {_STORE_IS_OLD}"


def _wrong_in_journal(store: sqlite3.Connection, journal: sqlite3.Connection, instance_id: str) -> Iterator[str]:
    found = store.execute(
        "SELECT session_id, operation_id, record FROM operations JOIN sessions USING (session_key)"
        " WHERE visibility = ?",
        (rows.VISIBLE,),
    )
    for session_id, operation_id, record in found:
        name = f"operation {operation_id!r} of session {session_id!r}"
        try:
            operation = records.decode_operation(record, name)
        except HarnessError:
            continue  # said by the check of the store
        # What ended otherwise may never have been accepted.
        is_manager_s = operation.instance_id == instance_id and instance_id != ""
        if is_manager_s and operation.status == operation_pb2.OPERATION_STATUS_COMPLETED:
            known = journal.execute("SELECT 1 FROM operations WHERE operation_id = ?", (operation_id,)).fetchone()
            if known is None:
                yield f"{name} was run by this operation manager and is not in its journal: {_JOURNAL_IS_OLD}"
        if is_manager_s:
            yield from _short_outputs(operation, name)


def _short_outputs(operation: operation_pb2.Operation, name: str) -> Iterator[str]:
    """Yield output files that hold less than was recorded. One that is not there went by age or size."""
    # find_messages yields messages of the type asked for.
    outputs = cast(
        "Iterable[operation_pb2.CapturedOutput]",
        find_messages(operation, operation_pb2.CapturedOutput.DESCRIPTOR),
    )
    for output in outputs:
        try:
            size = os.stat(output.path).st_size if output.path else output.total_bytes
        except OSError:
            continue
        if size < output.total_bytes:
            yield f"{name}: its output has {size} bytes, recorded were {output.total_bytes} ({output.path})"
