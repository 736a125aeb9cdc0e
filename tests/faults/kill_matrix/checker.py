"""Reads what a system under fire left, all files of it, and says what must not be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from harness.operations import is_terminal, journal_check
from harness.operations.journal import Journal
from harness.session_store.sqlite import SqliteSessionStore, state_check
from tests.faults.kill_matrix.client_program import item_digest
from tests.faults.kill_matrix.diary import DiaryReader, Line
from tests.faults.kill_matrix.fire import Outcome
from tests.faults.kill_matrix.scripted_model import EFFECTS, results_in, task_text, tasks_in
from tests.support.invariants import call_ids, check_history
from tests.support.world import result_text
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

SUPERVISOR_LOST = "SUPERVISOR_LOST"
STORE_NAME = "sessions.db"


@dataclass(slots=True)
class Verdict:
    """What was counted, and what is wrong."""

    sessions: int = 0
    inputs: int = 0
    calls: int = 0
    changes: int = 0
    unknown: int = 0
    """Operations whose outcome is unknown, each with a supervisor that was killed."""

    lost_inputs: list[str] = field(default_factory=list)
    lost_results: list[str] = field(default_factory=list)
    repeated_effects: list[str] = field(default_factory=list)
    wrong_watches: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """Everything that is wrong."""
        return [*self.lost_inputs, *self.lost_results, *self.repeated_effects, *self.wrong_watches, *self.others]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session as the store's file has it."""

    session_id: str
    items: Sequence[item_pb2.Item]
    operations: Mapping[str, operation_pb2.Operation]


async def check(outcome: Outcome) -> Verdict:
    """Return what is found; the system must have ended."""
    verdict = Verdict(others=list(outcome.violations))
    diary = defaultdict[str, list[Line]](list)
    for line in DiaryReader(outcome.directory / "diary").new_lines():
        if "session" in line:
            diary[line["session"]].append(line)
    state = outcome.directory / "state"
    verdict.others += state_check.check_state(state / STORE_NAME).findings
    for stored in await _stored_sessions(state / STORE_NAME, sorted(diary)):
        lines = diary[stored.session_id]
        verdict.sessions += 1
        _check_history(stored, verdict)
        _check_inputs(stored, lines, verdict)
        _check_results(stored, verdict)
        _check_effects(stored, outcome, verdict)
        _check_watch(stored, lines, verdict)
        _check_context(stored, lines, verdict)
        _check_journal(stored, outcome, verdict)
    return verdict


async def _stored_sessions(path: Path, session_ids: Sequence[str]) -> list[StoredSession]:
    found = []
    async with SqliteSessionStore.open(path) as store:
        for session_id in session_ids:
            items: list[item_pb2.Item] = []
            operations: dict[str, operation_pb2.Operation] = {}
            async for change in store.watch_session(store_pb2.WatchSessionRequest(session_id=session_id)):
                items += change.items
                operations.update((one.operation_id, one) for one in change.operations)
                if change.is_current:
                    break
            found.append(StoredSession(session_id=session_id, items=items, operations=operations))
    return found


def _check_history(stored: StoredSession, verdict: Verdict) -> None:
    try:
        check_history(stored.items, list(stored.operations.values()))
    except AssertionError as error:
        verdict.others.append(f"{stored.session_id}: {error}")


def _check_inputs(stored: StoredSession, lines: Sequence[Line], verdict: Verdict) -> None:
    """No acknowledged input is lost, none is there twice, and a repetition is told as one."""
    found = {item.input.input_id: item for item in stored.items if item.input.kind == item_pb2.INPUT_KIND_EXTERNAL}
    accepted: dict[str, int] = {}
    for line in lines:
        if line["what"] != "accepted":
            continue
        input_id, sequence = line["input_id"], line["sequence"]
        where = f"{stored.session_id}/{input_id}"
        if input_id in accepted and (not line["duplicate"] or accepted[input_id] != sequence):
            verdict.lost_inputs.append(f"{where}: accepted twice, at {accepted[input_id]} and {sequence}")
        accepted[input_id] = sequence
        item = found.get(input_id)
        if item is None or item.sequence != sequence:
            verdict.lost_inputs.append(f"{where}: accepted at {sequence}, is at {item.sequence if item else None}")
        elif item.input.content.parts[0].text.text != task_text(stored.session_id, input_id):
            verdict.lost_inputs.append(f"{where}: has another text")
    sent = {line["input_id"] for line in lines if line["what"] == "sent"}
    verdict.lost_inputs += [f"{stored.session_id}/{one}: was never sent" for one in found.keys() - sent]
    verdict.inputs += len(accepted)


def _check_results(stored: StoredSession, verdict: Verdict) -> None:
    """Each call has one final result, which is its own operation's."""
    finals = defaultdict[str, list[item_pb2.ToolCallStatus]](list)
    for item in stored.items:
        if item.tool_call_status.HasField("result"):
            finals[item.tool_call_status.call_id].append(item.tool_call_status)
    for call_id in call_ids(stored.items):
        verdict.calls += 1
        where = f"{stored.session_id}/{call_id}"
        if len(finals[call_id]) != 1:
            verdict.lost_results.append(f"{where}: {len(finals[call_id])} final results")
            continue
        (status,) = finals[call_id]
        text = result_text(status.result)
        for operation_id in status.operation_ids:
            operation = stored.operations[operation_id]
            is_complete = operation.status == operation_pb2.OPERATION_STATUS_COMPLETED
            if is_complete and results_in(text) != Counter([operation_id]):
                verdict.lost_results.append(f"{where}: the result is not that of {operation_id}: {text[:200]!r}")
            if operation.status == operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN and "unknown" not in text:
                verdict.lost_results.append(
                    f"{where}: the model is not told that the outcome is unknown: {text[:200]!r}"
                )


def _check_effects(stored: StoredSession, outcome: Outcome, verdict: Verdict) -> None:
    """No command began twice; one that is complete did all of its work; the unknown has a reason."""
    path = outcome.directory / "workspace" / stored.session_id / EFFECTS
    lines = path.read_text().splitlines() if path.exists() else []
    counts = Counter(lines)
    operations = {key: one for key, one in stored.operations.items() if one.call_id}
    known = {f"{word} {operation_id}" for word in ("begin", "end") for operation_id in operations}
    verdict.repeated_effects += [f"{stored.session_id}: effect of nobody: {line!r}" for line in counts.keys() - known]
    for line, count in counts.items():
        if count > 1:
            verdict.repeated_effects.append(f"{stored.session_id}: {count} times {line!r}")
    for operation_id, operation in operations.items():
        where = f"{stored.session_id}/{operation_id}"
        begun, ended = counts[f"begin {operation_id}"], counts[f"end {operation_id}"]
        if operation.status == operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN:
            verdict.unknown += 1
            if operation_id not in outcome.supervisor_victims or operation.error.reason != SUPERVISOR_LOST:
                verdict.others.append(f"{where}: unknown without a reason: {operation.error.reason}")
        elif operation.status != operation_pb2.OPERATION_STATUS_COMPLETED:
            name = operation_pb2.OperationStatus.Name(operation.status)
            verdict.others.append(f"{where}: ended as {name}: {operation.error.reason} {operation.error.message}")
        elif (begun, ended) != (1, 1):
            verdict.lost_results.append(f"{where}: complete, but began {begun} and ended {ended} times")


def _check_watch(stored: StoredSession, lines: Sequence[Line], verdict: Verdict) -> None:
    """Revisions grow, and what was seen is what is there: no item is skipped or comes twice."""
    changes = [line for line in lines if line["what"] == "change"]
    verdict.changes += len(changes)
    revisions = [line["revision"] for line in changes]
    if any(later <= earlier for earlier, later in zip(revisions, revisions[1:], strict=False)):
        verdict.wrong_watches.append(f"{stored.session_id}: revisions repeat or go back")
    seen = [(sequence, digest) for line in changes for sequence, digest in line["items"]]
    there = [(item.sequence, item_digest(item)) for item in stored.items]
    if seen != there:
        place = next((at for at, pair in enumerate(zip(seen, there, strict=False)) if pair[0] != pair[1]), -1)
        verdict.wrong_watches.append(
            f"{stored.session_id}: saw {len(seen)} items of {len(there)}, first wrong: {place}"
        )
    steps: dict[str, int] = {}
    for line in changes:
        for operation_id, step in line["operations"]:
            if step <= steps.get(operation_id, -1):
                verdict.wrong_watches.append(f"{stored.session_id}/{operation_id}: step {step} came again or went back")
            steps[operation_id] = step
    if steps != {key: one.step for key, one in stored.operations.items()}:
        verdict.wrong_watches.append(f"{stored.session_id}: the newest state of an operation was not seen")


def _check_context(stored: StoredSession, lines: Sequence[Line], verdict: Verdict) -> None:
    """The model has been shown every input once, and every result once."""
    context = next((line for line in reversed(lines) if line["what"] == "context"), None)
    if context is None:
        verdict.others.append(f"{stored.session_id}: did not come to its end")
        return
    texts = [item.input.content.parts[0].text.text for item in stored.items if item.input.HasField("content")]
    inputs = sum(map(tasks_in, texts), Counter[str]())
    if context["inputs"] != inputs:
        verdict.lost_inputs.append(f"{stored.session_id}: the model's context has other inputs than the history")
    finals = [item.tool_call_status.result for item in stored.items if item.tool_call_status.HasField("result")]
    results = sum((results_in(result_text(result)) for result in finals), Counter[str]())
    if context["results"] != results:
        verdict.lost_results.append(f"{stored.session_id}: the model's context has other results than the history")


def _check_journal(stored: StoredSession, outcome: Outcome, verdict: Verdict) -> None:
    """The manager knows of every operation what the store knows, and remembers nothing that it need not."""
    (journal_path,) = (outcome.directory / "state").rglob(journal_check.JOURNAL_NAME)
    findings = journal_check.check_state(journal_path.parent).findings
    verdict.others += [finding for finding in findings if finding not in verdict.others]
    with closing(Journal(journal_path)) as journal:
        rows = journal.find(list(stored.operations))
    for operation_id, operation in stored.operations.items():
        where = f"{stored.session_id}/{operation_id}"
        row = rows.get(operation_id)
        if row is None:
            verdict.others.append(f"{where}: the manager has forgotten it")
        elif row.operation.status != operation.status or not is_terminal(row.operation):
            verdict.others.append(f"{where}: the manager has another end of it than the store")
