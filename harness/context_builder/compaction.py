"""Summaries in the place of answered turns: what may be cut off, how a summary is asked for, what it says. Pure.

A cut falls behind a response and the results of all its calls, never between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from harness.context_builder import pruning
from harness.context_builder.entries import BYTES_PER_TOKEN, Placed, calls_of, place, text_part, total, user_entry
from unreal_agent.session.v1 import item_pb2

MAX_ARGUMENTS_CHARS: Final = 500
"""Of a call that a summary lists."""

MAX_SUMMARY_TOKENS: Final = 12_000
"""By size; a model that writes more has not summarised."""

INSTRUCTION: Final = """\
[This message comes from the harness, not from the user.] The conversation is about to outgrow the room that there is \
for it. Everything above will be replaced by a summary that you write now; it is all that you will know of it. Call no \
tool. Write in plain text, complete and exact, what whoever goes on with the work needs:
- what the user asked for, in their own words where they matter, and every wish, limit and correction since;
- what was done and decided, and why; what was tried and failed;
- files, names, commands, numbers, errors and findings that are still needed, exactly as they are;
- where the work stands now, and the next steps.
Calls that still run are listed for you behind the summary; their results come later."""

_HEADER: Final = (
    "[Summary of the conversation until here, written by you to make room. It comes from the harness, not from the"
    " user.]"
)
_RUNNING_HEADER: Final = (
    "[Calls whose results are still to come: each comes by itself, in a message of its own. Do not make them again.]"
)
_LEFT_OUT: Final = "[Older parts of the conversation were left out here: they did not fit.]"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPlan:
    """A summary that can be asked for."""

    through_sequence: int
    """The last response that would be replaced."""

    replaced: tuple[Placed, ...]
    """What would be replaced, in order."""

    changes: tuple[item_pb2.ContextChange, ...]
    """What the turn records; `request_entries` makes its request from them."""


def cut_index(entries: Sequence[Placed], through_sequence: int) -> int:
    """Return where the part behind the last response up to `through_sequence`, and its results, begins."""
    cut = 0
    for index, one in enumerate(entries):
        if one.kind == "response" and one.entry.source_sequence <= through_sequence:
            cut = index + 1
    while cut and cut < len(entries) and entries[cut].kind == "tool_result":
        cut += 1
    return cut


def plan(
    answered: Sequence[Placed], *, keep_tokens: int, max_request_tokens: int, is_trimmed: bool
) -> CompactionPlan | None:
    """Return what a compaction would replace; None where no whole turn is answered.

    Args:
        answered: What a provider has accepted, and the latest response.
        keep_tokens: The latest whole turns of together at most this size, by sizes, stay as they are.
        max_request_tokens: Bound of the request's conversation, by sizes.
        is_trimmed: The request is shortened, to half at least: one of its whole size has failed. Else where it must be.
    """
    through = _last_response(answered, keep_tokens)
    if not through:
        return None
    replaced = tuple(answered[: cut_index(answered, through)])
    changes = [
        item_pb2.ContextChange(
            kind=item_pb2.CONTEXT_CHANGE_KIND_COMPACTED,
            source_sequence=through,
            reason=f"turns up to item {through} are summarised",
            omitted_bytes=total(replaced).text_bytes,
        )
    ]
    size = total(replaced).estimated_tokens
    if is_trimmed:
        max_request_tokens = min(max_request_tokens, size // 2)
    if size > max_request_tokens:
        changes += _trimmed(replaced, max_request_tokens)
    return CompactionPlan(through_sequence=through, replaced=replaced, changes=tuple(changes))


def request_entries(answered: Sequence[Placed], changes: Sequence[item_pb2.ContextChange]) -> list[Placed]:
    """Return the conversation of a compaction turn, from what it recorded."""
    replaced = answered[: cut_index(answered, through_of(changes))]
    omitted = {one.source_sequence for one in changes if one.kind == item_pb2.CONTEXT_CHANGE_KIND_OMITTED}
    # Results are named by their own items, but go with the response that made their calls.
    shown: list[Placed] = []
    is_omitted = False
    for one in pruning.apply_to(replaced, pruning.keys_of(changes)):
        if one.kind != "tool_result":
            is_omitted = one.entry.source_sequence in omitted
        if not is_omitted:
            shown.append(one)
    if len(shown) < len(replaced):
        shown.insert(0, place("summary", user_entry([text_part(_LEFT_OUT)], source_sequence=0)))
    return [*shown, place("summary", user_entry([text_part(INSTRUCTION)], source_sequence=0))]


def through_of(changes: Iterable[item_pb2.ContextChange]) -> int:
    """Return the last response that a recorded compaction turn replaces; 0 where it names none."""
    kind = item_pb2.CONTEXT_CHANGE_KIND_COMPACTED
    return next((one.source_sequence for one in changes if one.kind == kind), 0)


def kept_input(answered: Sequence[Placed], through_sequence: int, *, is_newest: bool, max_tokens: int) -> int:
    """Return the user's newest input where a compaction would replace it and it is small enough to stay; 0 if none.

    Args:
        answered: As given to `plan`.
        through_sequence: As in the plan.
        is_newest: False where a newer input waits behind `answered`.
        max_tokens: What it may take, by sizes.
    """
    newest = next((one for one in reversed(answered) if one.kind == "input"), None)
    if newest is None or not is_newest or newest.totals.estimated_tokens > max_tokens:
        return 0
    is_replaced = any(one is newest for one in answered[: cut_index(answered, through_sequence)])
    return newest.entry.source_sequence if is_replaced else 0


def summary_text(said: str, replaced: Iterable[Placed], awaited: Set[str], max_tokens: int = MAX_SUMMARY_TOKENS) -> str:
    """Return what stands in the place of the replaced turns.

    Args:
        said: The model's summary; cut where it is too long.
        replaced: The entries that go.
        awaited: Calls whose final result the model has not answered yet.
        max_tokens: What the model's summary may take, by size.
    """
    max_bytes = min(max_tokens, MAX_SUMMARY_TOKENS) * BYTES_PER_TOKEN
    if len(said.encode()) > max_bytes:
        said = said.encode()[:max_bytes].decode(errors="ignore") + "\n[... the summary was cut here ...]"
    lines = [
        f"- call ID {call.call_id}, tool {call.name}, arguments: {call.arguments_json[:MAX_ARGUMENTS_CHARS]}"
        for one in replaced
        for call in calls_of(one)
        if call.call_id in awaited
    ]
    running = f"\n\n{_RUNNING_HEADER}\n" + "\n".join(lines) if lines else ""
    return f"{_HEADER}\n\n{said}{running}"


def _last_response(answered: Sequence[Placed], keep_tokens: int) -> int:
    """Return behind which response to cut: the earliest that leaves no more than is to be kept, else the last."""
    candidates = [
        (one.entry.source_sequence, _group_end(answered, index))
        for index, one in enumerate(answered)
        if one.kind == "response" and _is_whole(answered, index)
    ]
    left = 0
    position = len(answered)
    chosen = candidates[-1][0] if candidates else 0
    for sequence, end in reversed(candidates):
        left += total(answered[end:position]).estimated_tokens
        position = end
        if left > keep_tokens:
            break
        chosen = sequence
    return chosen


def _group_end(answered: Sequence[Placed], index: int) -> int:
    return index + 1 + len(calls_of(answered[index]))


def _is_whole(answered: Sequence[Placed], index: int) -> bool:
    return all(one.kind == "tool_result" for one in answered[index + 1 : _group_end(answered, index)]) and _group_end(
        answered, index
    ) <= len(answered)


def _trimmed(replaced: Sequence[Placed], max_tokens: int) -> list[item_pb2.ContextChange]:
    """Return what makes a request for a summary smaller: output shortened, images gone, the oldest left out."""
    large = [one for one in replaced if pruning.saved_tokens(one)]
    changes = pruning.changes_for(large, "shortened in the request for a summary")
    groups = _groups(pruning.apply_to(replaced, pruning.keys_of(changes)))
    left = sum(total(group).estimated_tokens for group in groups)
    max_tokens -= len(INSTRUCTION) // BYTES_PER_TOKEN
    for group in groups[:-1]:
        if left <= max_tokens:
            break
        left -= total(group).estimated_tokens
        changes.append(
            item_pb2.ContextChange(
                kind=item_pb2.CONTEXT_CHANGE_KIND_OMITTED,
                source_sequence=group[0].entry.source_sequence,
                reason="left out of the request for a summary, which did not fit",
                omitted_bytes=total(group).text_bytes,
            )
        )
    return changes


def _groups(entries: Sequence[Placed]) -> list[list[Placed]]:
    """Return entries with results behind the response that made their calls."""
    groups: list[list[Placed]] = []
    for one in entries:
        if one.kind == "tool_result" and groups:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups
