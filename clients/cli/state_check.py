"""What the store and the operation manager say of the soundness of their files, as findings of the doctor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from clients.cli.finding import Finding, Level
from clients.cli.state_dir import StateDirectory
from clients.cli.text import plural, size
from harness.errors import HarnessError
from harness.operations import journal_check
from harness.operations.output_files import tree_bytes
from harness.session_store.sqlite import manager_check, state_check

RESTORE = "restore the directory from a copy, or begin anew with another --state-dir"

GO_ON = "restore the directory from a copy; or go on without what is named: unreal-agent sessions delete ID --force"


MAX_FINDINGS = 20
"""Of each part; the rest is counted."""


def store_format(state: StateDirectory) -> Finding:
    """Return what version the session store's file has."""
    if not state.sessions_path.exists():
        return Finding(level=Level.GOOD, subject="store", text="no sessions yet")
    try:
        version = state_check.read_version(state.sessions_path)
    except HarnessError as error:
        return Finding(level=Level.BAD, subject="store", text=error.message, what_to_type=RESTORE)
    text = f"format {version}, this release reads up to {state_check.SUPPORTED_VERSION}"
    return Finding(level=Level.GOOD, subject="store", text=text)


def check_state(state: StateDirectory) -> Iterator[Finding]:
    """Yield whether what is stored is sound; reads all of it."""
    if state.sessions_path.exists():
        yield from _check_store(state)
    else:
        yield Finding(level=Level.GOOD, subject="sessions", text="none yet")
    if (state.operations_path / journal_check.JOURNAL_NAME).exists():
        yield from _check_journal(state)
        if state.sessions_path.exists():
            yield from _compare(state)
    if state.path.is_dir():
        yield _sizes(state)


def _sizes(state: StateDirectory) -> Finding:
    """Return what the directory takes up, by its parts."""
    outputs = state.operations_path / "operations"
    of_store = _file_bytes(state.sessions_path)
    parts = [
        f"sessions {size(of_store)}",
        f"journal {size(_file_bytes(state.operations_path / journal_check.JOURNAL_NAME))}",
        f"output of commands {size(tree_bytes(outputs))} (goes by age: 7 days)",
        f"log {size(_file_bytes(state.log_path))}",
    ]
    each = "each session's: unreal-agent sessions storage"
    return Finding(level=Level.GOOD, subject="takes up", text=f"{', '.join(parts)}; {each}")


def _file_bytes(path: Path) -> int:
    """Return the size of a file with what SQLite keeps beside it."""
    sizes = 0
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        with contextlib.suppress(OSError):
            sizes += path.with_name(name).stat().st_size
    return sizes


def _check_store(state: StateDirectory) -> Iterator[Finding]:
    try:
        found = state_check.check_state(state.sessions_path)
    except HarnessError as error:
        yield Finding(level=Level.BAD, subject="sessions", text=error.message, what_to_type=RESTORE)
        return
    amount = f"{plural(found.sessions, 'session')}, {plural(found.items, 'item')}"
    yield from _verdict("sessions", amount, found.findings, GO_ON)


def _check_journal(state: StateDirectory) -> Iterator[Finding]:
    try:
        found = journal_check.check_state(state.operations_path)
    except HarnessError as error:
        yield Finding(level=Level.BAD, subject="operations", text=error.message, what_to_type=RESTORE)
        return
    amount = f"{plural(found.remembered, 'operation')} in hand, {found.running} of them running"
    yield from _verdict("operations", amount, found.findings)


def _compare(state: StateDirectory) -> Iterator[Finding]:
    """Yield where sessions and operations contradict each other; nothing where one of them can't be read."""
    try:
        found = manager_check.check_against_manager(state.sessions_path, state.operations_path)
    except HarnessError:
        return
    if found:
        yield from _verdict("both together", "sessions and operations are of different times", found)


def _verdict(subject: str, amount: str, findings: tuple[str, ...], what_to_do: str = RESTORE) -> Iterator[Finding]:
    if not findings:
        yield Finding(level=Level.GOOD, subject=subject, text=f"sound: {amount}")
        return
    for text in findings[:MAX_FINDINGS]:
        yield Finding(level=Level.BAD, subject=subject, text=text)
    hidden = len(findings) - MAX_FINDINGS
    more = f"and {plural(hidden, 'finding')} more" if hidden > 0 else amount
    yield Finding(level=Level.BAD, subject=subject, text=more, what_to_type=what_to_do)
