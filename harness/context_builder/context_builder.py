"""Contract and state of the context builder: what the model is sent, as a pure function of the history.

It places each recorded item: an answered prefix that never changes, and what is staged behind it for the next turn. The
order is the same in every format: assistant, all its tool results, late results, inputs. It does no I/O, renders no
result (the final status holds the rendered one) and knows no wire format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pyrsistent import PMap, PVector, pmap, pvector

from harness.context_builder import compaction, pruning
from harness.context_builder.entries import (
    Placed,
    Totals,
    chain,
    place,
    text_part,
    total,
    user_entry,
    without_reasoning,
)
from harness.tools.presentation import RUNNING_PLACEHOLDER, late_result_parts
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

OMITTED_RESULT = "[This result was left out of the conversation.]"

MAX_DENSITY = 4
"""Tokens for one estimated token: text has at least a byte a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A stretch of the conversation from its beginning, with its chained digest."""

    entries: PVector[Placed] = field(default_factory=pvector)
    digest: bytes = b""
    totals: Totals = field(default_factory=Totals)

    def extended(self, placed: list[Placed]) -> Prefix:
        """Return it with further entries."""
        totals = self.totals
        for one in placed:
            totals = totals + one.totals
        return Prefix(entries=self.entries.extend(placed), digest=chain(self.digest, placed), totals=totals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A provider's own count of a request and its response."""

    digest: bytes
    """Of the conversation that was counted, the response included."""

    tokens: int
    estimated_tokens: int
    """Of the same, by sizes, the prompt included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextState:
    """The conversation so far; a value."""

    submitted: Prefix = field(default_factory=Prefix)
    """What the latest turn was sent, and the responses behind it."""

    answered: Prefix = field(default_factory=Prefix)
    """`submitted` as the latest response left it: what a provider has accepted."""

    results: PVector[Placed] = field(default_factory=pvector)
    """Results of the latest response's calls in the order of the calls, placeholders among them; not yet sent."""

    late: PVector[Placed] = field(default_factory=pvector)
    """Final results whose placeholder was sent; not yet sent."""

    inputs: PVector[Placed] = field(default_factory=pvector)
    """Inputs and heartbeats in order; not yet sent."""

    open_calls: PMap[str, str] = field(default_factory=pmap)
    """Tool name by call ID, for calls without final result."""

    changes: PVector[item_pb2.ContextChange] = field(default_factory=pvector)
    """What changed in the report since the latest turn."""

    recorded_changes: PVector[item_pb2.ContextChange] = field(default_factory=pvector)
    """What turns recorded of it and still concerns what is sent."""

    prompt_digest: str = ""
    """Prompt that `submitted` chains from; empty before the first turn."""

    model: tuple[str, str] = ("", "")
    """Provider and model that the reasoning in `submitted` belongs to."""

    counted: Counted | None = None
    """What the provider counted last; None before it did."""

    prompt_bytes: int = 0
    """Of the latest turn's prompt."""

    is_compacting: bool = False
    """The latest turn is a compaction and has no response yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRequest:
    """What a turn would send now."""

    answered: Prefix
    """The part that a provider has accepted before, as it is sent now."""

    prefix: Prefix
    """All of it."""

    changes: tuple[item_pb2.ContextChange, ...]

    @property
    def entries(self) -> list[llm_pb2.ContextEntry]:
        """The conversation."""
        return [placed.entry for placed in self.prefix.entries]

    @property
    def digest(self) -> str:
        """The chained digest as a turn records it."""
        return self.prefix.digest.hex()


def next_request(
    context: ContextState,
    *,
    provider: str,
    model: str,
    prompt_digest: str,
    prunings: Sequence[item_pb2.ContextChange] = (),
) -> NextRequest:
    """Return what a regular turn under these settings would send, with these entries pruned."""
    answered, submitted, breaks = _rebase(context, provider=provider, model=model, prompt_digest=prompt_digest)
    staged = [*context.results, *context.late, *context.inputs]
    keys = pruning.keys_of(prunings)
    if keys:
        answered, submitted, is_broken = _pruned(answered, submitted, keys, prompt_digest)
        staged = pruning.apply_to(staged, keys)
        if is_broken:
            breaks.append(_prefix_break("old tool output or images were pruned"))
    changes = (*context.changes, *breaks, *prunings)
    return NextRequest(answered=answered, prefix=submitted.extended(staged), changes=changes)


def rebased(context: ContextState, *, provider: str, model: str, prompt_digest: str) -> Prefix:
    """Return the answered part as it is sent under these settings: what a compaction works on."""
    return _rebase(context, provider=provider, model=model, prompt_digest=prompt_digest)[0]


def estimated_tokens(context: ContextState, request: NextRequest, prompt: llm_pb2.BlobRef) -> int:
    """Return what a request takes: by the provider's own count as far as it goes, by sizes beyond it.

    Where the counted conversation does not begin the request any more, its density is applied to the sizes.
    """
    by_size = totals_with_prompt(request, prompt).estimated_tokens
    counted = context.counted
    if counted is None:
        return by_size
    known = max(counted.estimated_tokens, 1)
    density = min(max(counted.tokens, known), known * MAX_DENSITY)
    if request.answered.digest == counted.digest:
        # A server that leaves out what it had in its cache must not make a full window look empty.
        sure = max(counted.tokens, counted.estimated_tokens // MAX_DENSITY)
        return sure + max(0, by_size - counted.estimated_tokens) * density // known
    return by_size * density // known


def totals_with_prompt(request: NextRequest, prompt: llm_pb2.BlobRef) -> Totals:
    """Return the amount of a request, its prompt included; the prompt's size is its blob's."""
    totals = request.prefix.totals
    return totals + Totals(text_bytes=prompt.size_bytes)


def advance(context: ContextState, item: item_pb2.Item) -> ContextState:
    """Return the context after one more item of the history. Never mutates the item."""
    match item.WhichOneof("item"):
        case "input":
            return _with_input(context, item)
        case "turn":
            return _with_turn(context, item.turn)
        case "model_response":
            return _with_response(context, item)
        case "tool_call_status":
            return _with_status(context, item)
        case "compaction":
            return _with_compaction(context, item)
        case _:
            return context


def omit_new(context: ContextState) -> tuple[ContextState, bool]:
    """Leave out what the latest, refused request had new; return whether a result was replaced and must be answered.

    A result can't be dropped, since its call stands in the answered prefix: its content is. A placeholder says nothing
    that could have been refused, and its result is still to come.
    """
    behind = list(context.submitted.entries[len(context.answered.entries) :])
    refused = [placed for placed in behind if not placed.entry.tool_result.is_placeholder]
    kept = [
        placed if placed.entry.tool_result.is_placeholder else _omitted_result(placed)
        for placed in behind
        if placed.kind == "tool_result"
    ]
    changes = [
        item_pb2.ContextChange(
            kind=item_pb2.CONTEXT_CHANGE_KIND_OMITTED,
            source_sequence=placed.entry.source_sequence,
            call_id=placed.call_id,
            reason="left out on retry of a refused request",
            omitted_bytes=placed.totals.text_bytes,
        )
        for placed in refused
    ]
    submitted = context.answered.extended(kept)
    must_answer = any(placed.kind == "tool_result" for placed in refused)
    return replace(context, submitted=submitted, changes=context.changes.extend(changes)), must_answer


def awaited_calls(context: ContextState) -> frozenset[str]:
    """Return the calls whose final result the model has not answered yet."""
    behind = context.submitted.entries[len(context.answered.entries) :]
    late = {one.call_id for one in [*context.late, *behind] if one.kind == "late_result"}
    return frozenset(late | set(context.open_calls))


def report(context: ContextState) -> list[Placed]:
    """Return everything that the next turn would send, in order."""
    return [*context.submitted.entries, *context.results, *context.late, *context.inputs]


def _with_input(context: ContextState, item: item_pb2.Item) -> ContextState:
    message = item.input
    if message.WhichOneof("payload") == "content":
        entry = user_entry(message.content.parts, source_sequence=item.sequence)
        return replace(context, inputs=context.inputs.append(place("input", entry)))
    if message.WhichOneof("payload") == "control" and message.control.WhichOneof("control") == "heartbeat":
        entry = user_entry([text_part(message.control.heartbeat.reason)], source_sequence=item.sequence)
        return replace(context, inputs=context.inputs.append(place("heartbeat", entry)))
    return context


def _with_turn(context: ContextState, turn: item_pb2.Turn) -> ContextState:
    if turn.kind == item_pb2.TURN_KIND_COMPACTION:
        return replace(context, is_compacting=True)
    request = next_request(
        context,
        provider=turn.provider,
        model=turn.model,
        prompt_digest=turn.prompt.digest,
        prunings=[one for one in turn.changes if one.kind == item_pb2.CONTEXT_CHANGE_KIND_PRUNED],
    )
    return replace(
        context,
        submitted=request.prefix,
        answered=request.answered,
        results=pvector(),
        late=pvector(),
        inputs=pvector(),
        changes=pvector(),
        recorded_changes=context.recorded_changes.extend(turn.changes),
        prompt_digest=turn.prompt.digest,
        prompt_bytes=turn.prompt.size_bytes,
        model=(turn.provider, turn.model),
        is_compacting=False,
    )


def _with_response(context: ContextState, item: item_pb2.Item) -> ContextState:
    if context.is_compacting:
        return replace(context, is_compacting=False)  # its text comes back in the compaction item, if at all
    output = item.model_response.output
    if output.items:
        entry = llm_pb2.ContextEntry(
            assistant=llm_pb2.AssistantMessage(items=output.items), source_sequence=item.sequence
        )
        context = replace(context, submitted=context.submitted.extended([place("response", entry)]))
    calls = [one.tool_call for one in output.items if one.WhichOneof("item") == "tool_call"]
    return replace(
        context,
        answered=context.submitted,
        counted=_counted(context, output) or context.counted,
        results=pvector(_placeholder(call, item.sequence) for call in calls),
        open_calls=context.open_calls.update({call.call_id: call.name for call in calls}),
    )


def _with_status(context: ContextState, item: item_pb2.Item) -> ContextState:
    status = item.tool_call_status
    if not status.HasField("result"):
        return context
    name = context.open_calls.get(status.call_id, "")
    context = replace(context, open_calls=context.open_calls.discard(status.call_id))
    if status.result.HasField("truncation"):
        truncation = status.result.truncation
        change = item_pb2.ContextChange(
            kind=item_pb2.CONTEXT_CHANGE_KIND_TRUNCATED,
            source_sequence=item.sequence,
            call_id=status.call_id,
            reason=truncation.reason,
            omitted_bytes=truncation.omitted_bytes,
        )
        context = replace(context, changes=context.changes.append(change))
    for index, placed in enumerate(context.results):
        if placed.call_id == status.call_id:
            return replace(context, results=context.results.set(index, _final(name, item)))
    entry = user_entry(late_result_parts(name, status.call_id, status.result), source_sequence=item.sequence)
    return replace(context, late=context.late.append(place("late_result", entry, call_id=status.call_id)))


def _counted(context: ContextState, output: llm_pb2.ModelOutput) -> Counted | None:
    """Return the provider's count with a response; None where it gave none."""
    usage = output.usage
    if not usage.input_tokens:
        return None
    is_sent_back = any(one.WhichOneof("item") == "reasoning" for one in output.items)
    unsent = 0 if is_sent_back else min(usage.reasoning_tokens, usage.output_tokens)
    totals = context.submitted.totals + Totals(text_bytes=context.prompt_bytes)
    return Counted(
        digest=context.submitted.digest,
        tokens=usage.input_tokens + usage.output_tokens - unsent,
        estimated_tokens=totals.estimated_tokens,
    )


def _with_compaction(context: ContextState, item: item_pb2.Item) -> ContextState:
    through, kept_sequence = item.compaction.through_sequence, item.compaction.kept_input_sequence
    answered = context.answered.entries
    cut = compaction.cut_index(answered, through)
    summary = place("summary", user_entry([text_part(item.compaction.summary)], source_sequence=item.sequence))
    kept = [one for one in answered[:cut] if kept_sequence and one.entry.source_sequence == kept_sequence]
    prefix = Prefix(digest=_prompt_seed(context.prompt_digest)).extended([summary, *kept, *answered[cut:]])
    change = item_pb2.ContextChange(
        kind=item_pb2.CONTEXT_CHANGE_KIND_COMPACTED,
        source_sequence=item.sequence,
        reason=f"items up to {through} were summarised",
        omitted_bytes=total(answered[:cut]).text_bytes - total(kept).text_bytes,
    )
    submitted = prefix.extended(list(context.submitted.entries[len(answered) :]))
    left = {one.entry.source_sequence for one in submitted.entries}
    return replace(
        context,
        submitted=submitted,
        answered=prefix,
        changes=context.changes.append(change),
        recorded_changes=pvector(one for one in context.recorded_changes if one.source_sequence in left),
    )


def _pruned(
    answered: Prefix, submitted: Prefix, keys: frozenset[tuple[int, str]], prompt_digest: str
) -> tuple[Prefix, Prefix, bool]:
    """Return `answered` and `submitted` with entries pruned, and whether anything changed that was sent before."""
    before = list(submitted.entries)
    after = pruning.apply_to(before, keys)
    if all(one is other for one, other in zip(before, after, strict=True)):
        return answered, submitted, False
    base = Prefix(digest=_prompt_seed(prompt_digest)).extended(after[: len(answered.entries)])
    return base, base.extended(after[len(answered.entries) :]), True


def _rebase(
    context: ContextState, *, provider: str, model: str, prompt_digest: str
) -> tuple[Prefix, Prefix, list[item_pb2.ContextChange]]:
    """Return `answered` and `submitted` as they are sent under these settings; themselves where nothing breaks."""
    answered = context.answered.entries
    unanswered = list(context.submitted.entries[len(answered) :])
    breaks: list[item_pb2.ContextChange] = []
    if context.model not in {("", ""), (provider, model)}:
        stripped = [without_reasoning(placed) if placed.kind == "response" else placed for placed in answered]
        kept = [placed for placed in stripped if placed is not None]
        if len(kept) < len(answered) or any(a is not b for a, b in zip(kept, answered, strict=True)):
            breaks.append(_prefix_break(f"reasoning left out after the change of model to {model}"))
            answered = pvector(kept)
    if prompt_digest == context.prompt_digest and not breaks:
        return context.answered, context.submitted, breaks
    if prompt_digest != context.prompt_digest and context.prompt_digest:
        breaks.append(_prefix_break("the prompt changed with the settings"))
    base = Prefix(digest=_prompt_seed(prompt_digest)).extended(list(answered))
    return base, base.extended(unanswered), breaks


def _prompt_seed(prompt_digest: str) -> bytes:
    return bytes.fromhex(prompt_digest)


def _prefix_break(reason: str) -> item_pb2.ContextChange:
    return item_pb2.ContextChange(kind=item_pb2.CONTEXT_CHANGE_KIND_PREFIX_BREAK, reason=reason)


def _placeholder(call: llm_pb2.ToolCall, source_sequence: int) -> Placed:
    result = llm_pb2.ToolResult(
        call_id=call.call_id, tool_name=call.name, parts=[text_part(RUNNING_PLACEHOLDER)], is_placeholder=True
    )
    entry = llm_pb2.ContextEntry(tool_result=result, source_sequence=source_sequence)
    return place("tool_result", entry, call_id=call.call_id)


def _final(name: str, item: item_pb2.Item) -> Placed:
    status = item.tool_call_status
    result = llm_pb2.ToolResult(
        call_id=status.call_id,
        tool_name=name,
        parts=status.result.parts,
        is_error=status.result.outcome != item_pb2.CALL_OUTCOME_COMPLETED,
    )
    entry = llm_pb2.ContextEntry(tool_result=result, source_sequence=item.sequence)
    return place("tool_result", entry, call_id=status.call_id)


def _omitted_result(placed: Placed) -> Placed:
    result = llm_pb2.ToolResult()
    result.CopyFrom(placed.entry.tool_result)
    del result.parts[:]
    result.parts.append(text_part(OMITTED_RESULT))
    entry = llm_pb2.ContextEntry(tool_result=result, source_sequence=placed.entry.source_sequence)
    return place("tool_result", entry, call_id=placed.call_id)
