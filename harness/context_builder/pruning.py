"""Shortens old tool output and drops old images where the conversation grows too large. Pure.

Which entries, is decided once and recorded with the turn; from then on each replay shows the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from harness.context_builder.entries import Placed, place, text_part
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

MAX_IMAGES: Final = 80
"""Images of one request; the least that a large provider takes is 100."""

KEPT_IMAGES: Final = 40
"""Left where there were too many, so that the next image does not break the prefix again."""

MIN_SAVED_TOKENS: Final = 300
"""An entry that would save less is left as it is."""

_HEAD_CHARS: Final = 600
_TAIL_CHARS: Final = 400
_RESULTS: Final = frozenset({"tool_result", "late_result"})
_IMAGE_NOTE: Final = "[An image stood here; it was left out to make room.]"


def pruned(placed: Placed) -> Placed:
    """Return an entry as it is shown once it is pruned; itself where there is nothing to prune.

    Texts of the user and of the model stay as they are. A late result keeps its fence, which stands at the ends.
    """
    kind = placed.entry.WhichOneof("entry")
    if kind == "assistant" or placed.entry.tool_result.is_placeholder:
        return placed
    parts = list(placed.entry.user.parts if kind == "user" else placed.entry.tool_result.parts)
    short = [_short(part, is_result=placed.kind in _RESULTS) for part in parts]
    if all(one is part for one, part in zip(short, parts, strict=True)):
        return placed
    entry = llm_pb2.ContextEntry()
    entry.CopyFrom(placed.entry)
    shown = entry.user.parts if kind == "user" else entry.tool_result.parts
    del shown[:]
    shown.extend(short)
    return place(placed.kind, entry, call_id=placed.call_id)


def saved_tokens(placed: Placed) -> int:
    """Return what pruning an entry would save, by sizes; 0 where it is not worth it."""
    if not placed.totals.images and placed.kind not in _RESULTS:
        return 0
    saved = placed.totals.estimated_tokens - pruned(placed).totals.estimated_tokens
    return saved if saved >= MIN_SAVED_TOKENS or placed.totals.images else 0


def old_entries(entries: Sequence[Placed], protected_tokens: int) -> list[Placed]:
    """Return the entries worth pruning, the oldest first, in front of the latest ones of `protected_tokens`."""
    end, tokens = len(entries), 0
    while end and tokens < protected_tokens:
        end -= 1
        tokens += entries[end].totals.estimated_tokens
    return [one for one in entries[:end] if saved_tokens(one)]


def surplus_images(entries: Sequence[Placed]) -> list[Placed]:
    """Return the oldest entries with images, until few enough are left; none where there are not too many."""
    images = sum(one.totals.images for one in entries)
    if images <= MAX_IMAGES:
        return []
    chosen: list[Placed] = []
    for one in entries:
        if images <= KEPT_IMAGES:
            break
        if one.totals.images:
            chosen.append(one)
            images -= one.totals.images
    return chosen


def changes_for(entries: Iterable[Placed], reason: str) -> list[item_pb2.ContextChange]:
    """Return the record of pruning these entries."""
    return [
        item_pb2.ContextChange(
            kind=item_pb2.CONTEXT_CHANGE_KIND_PRUNED,
            source_sequence=one.entry.source_sequence,
            call_id=one.call_id,
            reason=reason,
            omitted_bytes=max(0, one.totals.text_bytes - pruned(one).totals.text_bytes),
        )
        for one in entries
    ]


def keys_of(changes: Iterable[item_pb2.ContextChange]) -> frozenset[tuple[int, str]]:
    """Return which entries recorded changes prune."""
    return frozenset(
        (one.source_sequence, one.call_id) for one in changes if one.kind == item_pb2.CONTEXT_CHANGE_KIND_PRUNED
    )


def apply_to(entries: Sequence[Placed], keys: frozenset[tuple[int, str]]) -> list[Placed]:
    """Return entries with those named pruned."""
    return [pruned(one) if (one.entry.source_sequence, one.call_id) in keys else one for one in entries]


def _short(part: llm_pb2.ContentPart, *, is_result: bool) -> llm_pb2.ContentPart:
    if part.WhichOneof("part") == "image":
        return text_part(_IMAGE_NOTE)
    if not is_result:
        return part
    if part.text.WhichOneof("body") == "blob":
        return text_part(f"[{part.text.blob.size_bytes} bytes of output were left out to make room.]")
    text = part.text.text
    if len(text) <= _HEAD_CHARS + _TAIL_CHARS + MIN_SAVED_TOKENS:
        return part
    omitted_bytes = len(text[_HEAD_CHARS:-_TAIL_CHARS].encode())
    note = f"\n[... {omitted_bytes} bytes of this old output were left out to make room ...]\n"
    return text_part(text[:_HEAD_CHARS] + note + text[-_TAIL_CHARS:])
