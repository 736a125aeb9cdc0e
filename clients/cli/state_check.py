"""What the store and the operation manager say of the soundness of their files, as findings of the doctor."""

from __future__ import annotations

from collections.abc import Iterator

from clients.cli.finding import Finding, Level
from clients.cli.state_dir import StateDirectory
from clients.cli.text import plural
from harness.errors import HarnessError
from harness.operations import journal_check
from harness.session_store.sqlite import manager_check, state_check

RESTORE = "restore the directory from a copy, or begin anew with another --state-dir"

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


def _check_store(state: StateDirectory) -> Iterator[Finding]:
    try:
        found = state_check.check_state(state.sessions_path)
    except HarnessError as error:
        yield Finding(level=Level.BAD, subject="sessions", text=error.message, what_to_type=RESTORE)
        return
    amount = f"{plural(found.sessions, 'session')}, {plural(found.items, 'item')}"
    yield from _verdict("sessions", amount, found.findings)


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


def _verdict(subject: str, amount: str, findings: tuple[str, ...]) -> Iterator[Finding]:
    if not findings:
        yield Finding(level=Level.GOOD, subject=subject, text=f"sound: {amount}")
        return
    for text in findings[:MAX_FINDINGS]:
        yield Finding(level=Level.BAD, subject=subject, text=text)
    hidden = len(findings) - MAX_FINDINGS
    more = f"and {plural(hidden, 'finding')} more" if hidden > 0 else amount
    yield Finding(level=Level.BAD, subject=subject, text=more, what_to_type=RESTORE)
