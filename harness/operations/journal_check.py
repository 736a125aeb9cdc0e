"""Reads all of a manager's journal and says what is not sound; changes nothing, and takes no lock."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from google.protobuf.message import DecodeError

from harness.errors import DataLossError, UnsupportedError
from harness.operations.journal import FORMAT_VERSION
from harness.operations.operations import is_terminal
from unreal_agent.operation.v1 import operation_pb2

JOURNAL_NAME = "journal.sqlite3"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalState:
    """What was found."""

    version: int
    remembered: int
    """Operations that are not yet acknowledged."""

    running: int
    """Of them, those that have not ended."""

    findings: tuple[str, ...]
    """What is not sound, one line each; empty: all is."""


def check_state(state_directory: Path) -> JournalState:
    """Read everything in the journal of a manager's state directory.

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
            findings = [
                f"the file is damaged: {line}"
                for (line,) in connection.execute("PRAGMA integrity_check")
                if line != "ok"
            ]
            operations = list(_remembered(connection, findings))
    except sqlite3.Error as error:
        raise DataLossError(f"the journal {path} can't be read: {error}", reason="JOURNAL_UNREADABLE") from error
    return JournalState(
        version=version,
        remembered=len(operations),
        running=sum(not is_terminal(operation) for operation in operations),
        findings=tuple(findings),
    )


def _remembered(connection: sqlite3.Connection, findings: list[str]) -> Iterator[operation_pb2.Operation]:
    query = "SELECT operation_id, operation, workspace FROM operations WHERE tombstone_time IS NULL"
    for operation_id, record, workspace in connection.execute(query):
        try:
            operation = operation_pb2.Operation.FromString(record)
        except DecodeError:
            findings.append(f"the state of operation {operation_id!r} can't be decoded")
            continue
        if operation.operation_id != operation_id:
            findings.append(f"the state of operation {operation_id!r} names another: {operation.operation_id!r}")
        if not is_terminal(operation) and workspace and not os.path.isdir(workspace):
            findings.append(f"operation {operation_id!r} runs in a workspace that is gone ({workspace})")
        yield operation
