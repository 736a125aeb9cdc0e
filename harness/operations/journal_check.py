"""Reads all of a manager's journal and what its operations left; says what is not sound. Changes and locks nothing."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from google.protobuf.message import DecodeError

from harness.errors import DataLossError, UnsupportedError
from harness.operations.journal import FORMAT_VERSION
from harness.operations.operations import is_terminal
from harness.primitives import process_records
from harness.primitives.sqlite_log import find_damage
from unreal_agent.operation.v1 import operation_pb2

JOURNAL_NAME = "journal.sqlite3"

MAX_FINDINGS: Final = 1_000
"""Of one journal; one with more is lost, and memory is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalState:
    """What was found."""

    version: int
    remembered: int
    """Operations that are not yet acknowledged."""

    running: int
    """Of them, those that have not ended."""

    findings: tuple[str, ...]
    """What is not sound, one line each, at most `MAX_FINDINGS`; empty: all is."""


class JournalFact(NamedTuple):
    """What the journal says of an operation, tombstones included."""

    operation: operation_pb2.Operation
    """Newest state; of a tombstone identity, status and step."""

    workspace: str
    acknowledged_step: int
    attempt: int
    is_discarded: bool
    is_tombstone: bool
    has_files: bool


@contextmanager
def opened(state_directory: Path) -> Iterator[sqlite3.Connection]:
    """Hold one state of the journal in a manager's state directory, for reading.

    Raises:
        UnsupportedError: UNSUPPORTED_JOURNAL_VERSION.
        DataLossError: JOURNAL_UNREADABLE.
    """
    path = state_directory / JOURNAL_NAME
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != FORMAT_VERSION:
                raise UnsupportedError(
                    f"journal {path} has format {version}, this release reads {FORMAT_VERSION}",
                    reason="UNSUPPORTED_JOURNAL_VERSION",
                )
            connection.execute("BEGIN")
            yield connection
    except sqlite3.Error as error:
        raise DataLossError(f"the journal {path} can't be read: {error}", reason="JOURNAL_UNREADABLE") from error


def facts(connection: sqlite3.Connection) -> Iterator[JournalFact | str]:
    """Yield what is known of each operation; a line for people in place of one that can't be decoded."""
    query = (
        "SELECT operation_id, operation, workspace, acknowledged_step, attempt, is_discarded,"
        " tombstone_time IS NOT NULL, has_files FROM operations"
    )
    for operation_id, record, *rest in connection.execute(query):
        try:
            operation = operation_pb2.Operation.FromString(record)
        except DecodeError:
            yield f"the state of operation {operation_id!r} can't be decoded"
            continue
        if operation.operation_id != operation_id:
            yield f"the state of operation {operation_id!r} names another: {operation.operation_id!r}"
            continue
        workspace, step, attempt, is_discarded, is_tombstone, has_files = rest
        yield JournalFact(operation, workspace, step, attempt, bool(is_discarded), bool(is_tombstone), bool(has_files))


def epochs(connection: sqlite3.Connection) -> Iterator[tuple[str, int]]:
    """Yield each session that the manager worked for, and the highest epoch that it saw of it."""
    yield from connection.execute("SELECT session_id, epoch FROM sessions")


def instance_id(connection: sqlite3.Connection) -> str:
    """Return the instance that the journal makes; empty where it says none."""
    found = connection.execute("SELECT value FROM meta WHERE key = 'instance_id'").fetchone()
    return "" if found is None else str(found[0])


def check_state(state_directory: Path) -> JournalState:
    """Read everything in the journal of a manager's state directory; raises as `opened` does."""
    path = state_directory / JOURNAL_NAME
    remembered = running = 0
    findings: list[str] = []
    with opened(state_directory) as connection:
        if (damage := find_damage(path)) is not None:
            findings.append(damage)
        broken = connection.execute("PRAGMA integrity_check").fetchall()
        findings += [f"the file is damaged: {line}" for (line,) in broken if line != "ok"]
        if not instance_id(connection):
            findings.append("the journal does not say which instance of a manager it belongs to")
        for fact in facts(connection):
            if isinstance(fact, JournalFact):
                remembered += not fact.is_tombstone
                running += not fact.is_tombstone and not is_terminal(fact.operation)
                found = _wrong_operation(fact, state_directory)
            else:
                found = iter((fact,))
            for line in found:
                if len(findings) < MAX_FINDINGS:
                    findings.append(line)
    return JournalState(version=FORMAT_VERSION, remembered=remembered, running=running, findings=tuple(findings))


def _wrong_operation(fact: JournalFact, state_directory: Path) -> Iterator[str]:
    operation = fact.operation
    name = f"operation {operation.operation_id!r} of session {operation.session_id!r}"
    if not fact.is_tombstone and not is_terminal(operation) and fact.workspace and not os.path.isdir(fact.workspace):
        yield f"{name} runs in a workspace that is gone ({fact.workspace})"
    if not fact.has_files or not fact.attempt:
        return
    directory = state_directory / "operations" / operation.operation_id / str(fact.attempt)
    if not directory.is_dir():
        # An acknowledged one's may go at any time, and a crash may come before that is journalled.
        if not fact.is_tombstone:
            yield f"{name} has lost its files ({directory})"
        return
    try:
        process_records.read_claim(str(directory))
    except ValueError as error:
        yield f"{name}: its claim can't be read: {error} ({directory / process_records.CLAIM})"
    # One that ended otherwise may have been killed while it wrote.
    is_ended = operation.status == operation_pb2.OPERATION_STATUS_COMPLETED
    record = directory / process_records.EXIT
    if is_ended and record.exists() and process_records.read_exit(str(directory)) is None:
        yield f"{name}: its exit record is damaged ({record})"
