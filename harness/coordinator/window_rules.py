"""Keeps every request within the model's window: what a turn sends, what is pruned, when a summary is made. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from harness import context_builder
from harness.context_builder import NextRequest, compaction, pruning
from harness.context_builder.entries import BYTES_PER_TOKEN, Placed, chain, total
from harness.coordinator.draft import Draft
from harness.coordinator.protocol import ModelAnswered, ModelFailed
from harness.coordinator.settings import asked_model
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

DEFAULT_WINDOW_TOKENS = 128_000
"""Taken for a model whose window is not known."""

MAX_KEPT_TOKENS = 20_000
"""Of the latest turns that a summary leaves as they are; less where the window is small."""

MAX_COMPACTION_FAILURES = 2

_NO_SUMMARY_HELPS = frozenset(
    {llm_pb2.ERROR_CLASS_AUTHENTICATION, llm_pb2.ERROR_CLASS_PERMISSION, llm_pb2.ERROR_CLASS_QUOTA}
)
_ROOM = "the conversation had outgrown its room in the model's window"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What a request may take."""

    limit: int
    """Tokens of the whole request."""

    request: NextRequest
    """What would be sent if nothing were done."""

    tokens: int
    """What that takes."""

    prompt: llm_pb2.BlobRef

    def by_size(self, tokens: int) -> int:
        """Return the size, as entries measure it, that takes so many tokens here."""
        known = context_builder.totals_with_prompt(self.request, self.prompt).estimated_tokens
        return tokens * known // max(self.tokens, 1) if self.tokens > known else tokens


def window_tokens(draft: Draft) -> int:
    """Return the window of the model that the next turn asks."""
    _, model = asked_model(draft.state)
    return draft.environment.window_tokens(model) or DEFAULT_WINDOW_TOKENS


def next_turn(draft: Draft, prompt: llm_pb2.BlobRef) -> item_pb2.Turn:
    """Return the turn that is to be recorded and sent: an ordinary one, or one that makes room for it."""
    room = _room(draft, prompt)
    if room.tokens <= room.limit and not draft.state.is_compaction_asked:
        return _regular_turn(draft, room, [])
    plan = _plan(draft, room)
    if plan is not None and draft.state.is_compaction_asked:
        return _compaction_turn(draft, prompt, plan)
    old = pruning.old_entries(room.request.prefix.entries, room.by_size(room.limit // 4))
    saved = sum(pruning.saved_tokens(one) for one in old)
    # Less would soon have to be done again, and each time breaks the prefix that the provider has in its cache.
    makes_room = saved >= room.by_size(room.limit // 2) and saved >= room.by_size(room.tokens - room.limit)
    if makes_room and not draft.state.compaction_failures:
        return _regular_turn(draft, room, old)
    is_worth_it = plan is not None and total(plan.replaced).estimated_tokens * 10 >= room.by_size(room.limit)
    if plan is not None and is_worth_it and not draft.state.is_compacted:
        return _compaction_turn(draft, prompt, plan)
    return _regular_turn(draft, room, _needed(room))


def _prunings(room: _Room, chosen: list[Placed]) -> list[item_pb2.ContextChange]:
    """Return the record of pruning these entries, and those whose images are too many."""
    prefix = room.request.prefix
    surplus = pruning.surplus_images(prefix.entries) if prefix.totals.images > pruning.MAX_IMAGES else []
    others = [one for one in chosen if not any(one is other for other in surplus)]
    return [
        *pruning.changes_for(surplus, "too many images in one request"),
        *pruning.changes_for(others, _ROOM),
    ]


def has_whole_turns(draft: Draft) -> bool:
    """Return whether there is anything that a summary could replace."""
    answered = draft.state.context.answered.entries
    return compaction.plan(answered, keep_tokens=0, max_request_tokens=0, is_trimmed=False) is not None


def can_compact(draft: Draft) -> bool:
    """Return whether a summary could make room for the request that was just refused as too large."""
    prompt = draft.state.prompt
    return prompt is not None and not draft.state.is_compacted and _plan(draft, _room(draft, prompt)) is not None


def take_summary(draft: Draft, answered: ModelAnswered) -> ModelFailed | None:
    """Record a summary; return the failure to be recorded in its place where it is none."""
    output, turn = answered.output, draft.state.latest_turn
    assert turn is not None
    said = "\n\n".join(one.message.text for one in output.items if one.message.text.strip())
    if output.stop_reason != llm_pb2.STOP_REASON_COMPLETE or not said:
        return _no_summary(answered)
    recorded = llm_pb2.ModelOutput()
    recorded.CopyFrom(output)
    kept = [one for one in output.items if one.WhichOneof("item") != "tool_call"]
    del recorded.items[:]
    recorded.items.extend(kept)
    through = compaction.through_of(turn.changes)
    context = draft.state.context
    entries = context.answered.entries
    waiting = [*context.submitted.entries[len(entries) :], *context.inputs]
    replaced = entries[: compaction.cut_index(entries, through)]
    draft.append(item_pb2.Item(model_response=item_pb2.ModelResponse(turn_id=turn.turn_id, output=recorded)))
    kept_input = compaction.kept_input(
        entries,
        through,
        is_newest=not any(one.kind == "input" for one in waiting),
        max_tokens=_kept_tokens(draft),
    )
    awaited = context_builder.awaited_calls(context)
    summary = compaction.summary_text(said, replaced, awaited, max_tokens=window_tokens(draft) // 8)
    draft.append(
        item_pb2.Item(
            compaction=item_pb2.Compaction(
                turn_id=turn.turn_id, through_sequence=through, summary=summary, kept_input_sequence=kept_input
            )
        )
    )
    draft.update_volatile(request_turn_id="")
    return None


def compaction_failure(draft: Draft, failure: llm_pb2.Failure) -> tuple[llm_pb2.Failure, bool]:
    """Return how the failure of a request for a summary is recorded, and whether it is tried again at once."""
    if failure.error_class in _NO_SUMMARY_HELPS:
        return failure, False
    if draft.state.compaction_failures + 1 < MAX_COMPACTION_FAILURES:
        return failure, True
    final = llm_pb2.Failure()
    final.CopyFrom(failure)
    final.error_class = llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW
    final.message = f"the conversation does not fit the model's window and could not be summarised: {failure.message}"
    return final, False


def _room(draft: Draft, prompt: llm_pb2.BlobRef) -> _Room:
    context = draft.state.context
    provider, model = asked_model(draft.state)
    window = window_tokens(draft)
    answer = draft.state.settings.limits.max_output_tokens or draft.environment.max_output_tokens(model)
    limit = min(int(window * draft.environment.config.compaction_threshold), window - min(answer, window // 4))
    request = context_builder.next_request(context, provider=provider, model=model, prompt_digest=prompt.digest)
    tokens = context_builder.estimated_tokens(context, request, prompt)
    return _Room(limit=limit, request=request, tokens=tokens, prompt=prompt)


def _kept_tokens(draft: Draft) -> int:
    return min(MAX_KEPT_TOKENS, window_tokens(draft) // 10)


def _plan(draft: Draft, room: _Room) -> compaction.CompactionPlan | None:
    state = draft.state
    prompt_tokens = room.prompt.size_bytes // BYTES_PER_TOKEN
    return compaction.plan(
        room.request.answered.entries,
        keep_tokens=0 if state.is_compaction_asked else room.by_size(_kept_tokens(draft)),
        max_request_tokens=max(0, room.by_size(room.limit) - prompt_tokens),
        is_trimmed=state.compaction_failures > 0,
    )


def _needed(room: _Room) -> list[Placed]:
    """Return what must be pruned whatever it is, the oldest first: also what the model has not been shown yet."""
    missing = room.by_size(room.tokens - room.limit)
    chosen: list[Placed] = []
    for one in room.request.prefix.entries:
        if missing <= 0:
            break
        saved = pruning.saved_tokens(one)
        if saved:
            chosen.append(one)
            missing -= saved
    return chosen


def _regular_turn(draft: Draft, room: _Room, pruned: list[Placed]) -> item_pb2.Turn:
    prunings = _prunings(room, pruned)
    context, prompt = draft.state.context, room.prompt
    turn = _turn(draft, prompt, item_pb2.TURN_KIND_REGULAR)
    request, tokens = room.request, room.tokens
    if prunings:
        request = context_builder.next_request(
            context, provider=turn.provider, model=turn.model, prompt_digest=prompt.digest, prunings=prunings
        )
        tokens = context_builder.estimated_tokens(context, request, prompt)
    turn.context_digest = request.digest
    turn.totals.CopyFrom(context_builder.totals_with_prompt(request, prompt).message(tokens))
    turn.changes.extend(request.changes)
    return turn


def _compaction_turn(draft: Draft, prompt: llm_pb2.BlobRef, plan: compaction.CompactionPlan) -> item_pb2.Turn:
    turn = _turn(draft, prompt, item_pb2.TURN_KIND_COMPACTION)
    base = context_builder.rebased(
        draft.state.context, provider=turn.provider, model=turn.model, prompt_digest=prompt.digest
    )
    entries = compaction.request_entries(base.entries, plan.changes)
    totals = total(entries)
    turn.context_digest = chain(bytes.fromhex(prompt.digest), entries).hex()
    tokens = totals.estimated_tokens + prompt.size_bytes // BYTES_PER_TOKEN
    turn.totals.CopyFrom(totals.message(tokens))
    turn.totals.text_bytes += prompt.size_bytes
    turn.changes.extend(plan.changes)
    return turn


def _turn(draft: Draft, prompt: llm_pb2.BlobRef, kind: item_pb2.TurnKind.ValueType) -> item_pb2.Turn:
    state = draft.state
    provider, model = asked_model(state)
    return item_pb2.Turn(
        turn_id=f"{state.session_uid}-t{draft.next_sequence()}",
        previous_turn_id=state.latest_turn.turn_id if state.latest_turn is not None else "",
        kind=kind,
        provider=provider,
        model=model,
        effort=state.settings.effort,
        prompt=prompt,
    )


def _no_summary(answered: ModelAnswered) -> ModelFailed:
    output = answered.output
    reason = llm_pb2.StopReason.Name(output.stop_reason).removeprefix("STOP_REASON_").lower()
    attempts = list(output.attempts)
    if not any(one.HasField("usage") for one in attempts):
        attempts.append(llm_pb2.Attempt(number=len(attempts) + 1, usage=output.usage, provider=output.provider))
    failure = llm_pb2.Failure(
        error_class=llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE,
        message=f"the model was asked for a summary and wrote none that can be used (its answer ended as {reason})",
    )
    return ModelFailed(turn_id=answered.turn_id, failure=failure, attempts=tuple(attempts))
