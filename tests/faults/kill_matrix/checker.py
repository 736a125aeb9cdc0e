"""Reads what a system under fire left, all files of it, and says what must not be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TypeAlias

from harness.operations import journal_check
from harness.operations.journal import Journal, OperationRow
from harness.session_store.sqlite import SqliteSessionStore, state_check
from tests.faults.kill_matrix.client_program import item_digest
from tests.faults.kill_matrix.diary import DiaryReader, Line
from tests.faults.kill_matrix.fire import Outcome
from tests.faults.kill_matrix.scripted_model import EFFECTS_FILE, results_in, task_text, tasks_in
from tests.faults.kill_matrix.verdict import EFFECTS, INPUTS, OTHERS, RESULTS, WATCHES, Verdict
from tests.support.invariants import call_ids, check_history
from tests.support.world import result_text
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

SUPERVISOR_LOST = "SUPERVISOR_LOST"
STORE_NAME = "sessions.db"
OPERATIONS_NAME = "operations"

COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
OUTCOME_UNKNOWN = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN

Found: TypeAlias = Iterator[tuple[str, str]]
"""Areas, and what is wrong in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What is left of one session."""

    session_id: str
    items: Sequence[item_pb2.Item]
    operations: Mapping[str, operation_pb2.Operation]
    """By ID, as the store's file has them."""

    rows: Mapping[str, OperationRow]
    """By ID, as the manager's journal has them."""

    effects: Sequence[str]
    """The lines that its commands wrote."""

    diary: Sequence[Line]
    """What its client sent and saw."""


async def check(outcome: Outcome) -> Verdict:
    """Return what is found; the system must have ended."""
    verdict = Verdict()
    state = outcome.directory / "state"
    stored = state_check.check_state(state / STORE_NAME).findings
    journalled = journal_check.check_state(state / OPERATIONS_NAME).findings
    for text in (*outcome.violations, *stored, *journalled):
        verdict.note(OTHERS, text)
    for remains in await collect(outcome):
        diary = remains.diary
        verdict.sessions += 1
        verdict.lives[remains.session_id] = (diary[0]["at_s"], diary[-1]["at_s"])
        verdict.inputs += len({line["input_id"] for line in diary if line["what"] == "accepted"})
        verdict.changes += sum(line["what"] == "change" for line in diary)
        verdict.calls += len(call_ids(remains.items))
        verdict.unknown += sum(one.status == OUTCOME_UNKNOWN for one in remains.operations.values())
        for area, text in violations_of(remains, outcome.supervisor_victims):
            verdict.note(area, text, remains.session_id)
    return verdict


def violations_of(remains: Remains, supervisor_victims: set[str]) -> Found:
    """Yield all that is wrong with one session."""
    return chain(
        _wrong_history(remains),
        _wrong_inputs(remains),
        _wrong_results(remains),
        _wrong_effects(remains),
        _wrong_endings(remains, supervisor_victims),
        _wrong_watch(remains),
        _wrong_context(remains),
        _wrong_journal(remains),
    )


async def collect(outcome: Outcome) -> list[Remains]:
    """Return what is left of each session."""
    directory, state = outcome.directory, outcome.directory / "state"
    diaries = defaultdict[str, list[Line]](list)
    for line in DiaryReader(directory / "diary").new_lines():
        if "session" in line:
            diaries[line["session"]].append(line)
    found = []
    async with SqliteSessionStore.open(state / STORE_NAME) as store:
        with closing(Journal(state / OPERATIONS_NAME / journal_check.JOURNAL_NAME)) as journal:
            for session_id, diary in diaries.items():
                items: list[item_pb2.Item] = []
                operations: dict[str, operation_pb2.Operation] = {}
                async for change in store.watch_session(store_pb2.WatchSessionRequest(session_id=session_id)):
                    items += change.items
                    operations.update((one.operation_id, one) for one in change.operations)
                    if change.is_current:
                        break
                path = directory / "workspace" / session_id / EFFECTS_FILE
                found.append(
                    Remains(
                        session_id=session_id,
                        items=items,
                        operations=operations,
                        rows=journal.find(list(operations)),
                        effects=path.read_text().splitlines() if path.exists() else [],
                        diary=diary,
                    )
                )
    return found


def _wrong_history(remains: Remains) -> Found:
    try:
        check_history(remains.items, list(remains.operations.values()))
    except AssertionError as error:
        yield OTHERS, str(error)


def _wrong_inputs(remains: Remains) -> Found:
    """No acknowledged input is lost, none is there twice, and a repetition is told as one."""
    found = {one.input.input_id: one for one in remains.items if one.input.kind == item_pb2.INPUT_KIND_EXTERNAL}
    accepted: dict[str, int] = {}
    for line in remains.diary:
        if line["what"] != "accepted":
            continue
        input_id, sequence = line["input_id"], line["sequence"]
        if input_id in accepted and (not line["duplicate"] or accepted[input_id] != sequence):
            yield INPUTS, f"{input_id} was accepted twice, at {accepted[input_id]} and {sequence}"
        accepted[input_id] = sequence
        item = found.get(input_id)
        if item is None or item.sequence != sequence:
            yield INPUTS, f"{input_id} was accepted at {sequence} and is at {item.sequence if item else None}"
        elif item.input.content.parts[0].text.text != task_text(remains.session_id, input_id):
            yield INPUTS, f"{input_id} has another text"
    sent = {line["input_id"] for line in remains.diary if line["what"] == "sent"}
    for input_id in found.keys() - sent:
        yield INPUTS, f"{input_id} was never sent"


def _wrong_results(remains: Remains) -> Found:
    """Each call has one final result, which is its own operation's, and says so where nobody knows."""
    finals = defaultdict[str, list[item_pb2.ToolCallStatus]](list)
    for item in remains.items:
        if item.tool_call_status.HasField("result"):
            finals[item.tool_call_status.call_id].append(item.tool_call_status)
    for call_id in call_ids(remains.items):
        if len(finals[call_id]) != 1:
            yield RESULTS, f"{call_id} has {len(finals[call_id])} final results"
            continue
        (status,) = finals[call_id]
        text = result_text(status.result)
        for operation_id in status.operation_ids:
            ending = remains.operations[operation_id].status
            if ending == COMPLETED and results_in(text) != Counter([operation_id]):
                yield RESULTS, f"{call_id} has not the result of {operation_id}: {text[:200]!r}"
            if ending == OUTCOME_UNKNOWN and "unknown" not in text:
                yield RESULTS, f"{call_id} does not tell the model that nobody knows: {text[:200]!r}"


def _wrong_effects(remains: Remains) -> Found:
    """No command began twice, and what is complete did all of its work."""
    counts = Counter(remains.effects)
    calls = [key for key, one in remains.operations.items() if one.call_id]
    known = {f"{word} {operation_id}" for word in ("begin", "end") for operation_id in calls}
    for line, count in counts.items():
        if line not in known:
            yield EFFECTS, f"{line!r} is nobody's effect"
        if count > 1:
            yield EFFECTS, f"{line!r} was written {count} times"
    for operation_id in calls:
        if remains.operations[operation_id].status == COMPLETED:
            for word in ("begin", "end"):
                if not counts[f"{word} {operation_id}"]:
                    yield RESULTS, f"{operation_id} is complete without its {word}"


def _wrong_endings(remains: Remains, supervisor_victims: set[str]) -> Found:
    """Every operation is complete, or its supervisor was killed."""
    for operation_id, operation in remains.operations.items():
        if operation.status == COMPLETED:
            continue
        is_excused = operation.status == OUTCOME_UNKNOWN and operation.error.reason == SUPERVISOR_LOST
        if not (is_excused and operation_id in supervisor_victims):
            name = operation_pb2.OperationStatus.Name(operation.status)
            yield OTHERS, f"{operation_id} ended as {name}: {operation.error.reason} {operation.error.message}"


def _wrong_watch(remains: Remains) -> Found:
    """Revisions grow, and what was seen is what is there: no item is skipped or comes twice."""
    changes = [line for line in remains.diary if line["what"] == "change"]
    if any(later["revision"] <= earlier["revision"] for earlier, later in pairwise(changes)):
        yield WATCHES, "revisions repeat or go back"
    seen = [(sequence, digest) for line in changes for sequence, digest in line["items"]]
    items = list(remains.items)
    while len(items) > len(seen) and items[-1].input.kind == item_pb2.INPUT_KIND_CRASH:
        # The client had ended its watch: a coordinator that came back took the session up once more, for its context.
        items.pop()
    there = [(item.sequence, item_digest(item)) for item in items]
    if seen != there:
        place = next((at for at, (one, other) in enumerate(zip(seen, there, strict=False)) if one != other), "the end")
        yield WATCHES, f"the watch saw {len(seen)} items of {len(there)}, the first wrong one at {place}"
    steps: dict[str, int] = {}
    for line in changes:
        for operation_id, step in line["operations"]:
            if step <= steps.get(operation_id, -1):
                yield WATCHES, f"step {step} of {operation_id} came again, or went back"
            steps[operation_id] = step
    if steps != {key: one.step for key, one in remains.operations.items()}:
        yield WATCHES, "the newest state of an operation was not seen"


def _wrong_context(remains: Remains) -> Found:
    """The model has been shown every input once, and every result once."""
    context = next((line for line in reversed(remains.diary) if line["what"] == "context"), None)
    if context is None:
        yield OTHERS, "did not come to its end"
        return
    texts = [item.input.content.parts[0].text.text for item in remains.items if item.input.HasField("content")]
    if context["inputs"] != sum(map(tasks_in, texts), Counter[str]()):
        yield INPUTS, "the model's context has other inputs than the history"
    finals = [item.tool_call_status.result for item in remains.items if item.tool_call_status.HasField("result")]
    if context["results"] != sum((results_in(result_text(result)) for result in finals), Counter[str]()):
        yield RESULTS, "the model's context has other results than the history"


def _wrong_journal(remains: Remains) -> Found:
    """The manager knows of every operation what the store knows."""
    for operation_id, operation in remains.operations.items():
        row = remains.rows.get(operation_id)
        if row is None:
            yield OTHERS, f"the manager has forgotten {operation_id}"
        elif (row.operation.status, row.operation.step) != (operation.status, operation.step):
            yield OTHERS, f"the manager has another end of {operation_id} than the store"
