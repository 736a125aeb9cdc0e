"""Cuts a rendered result to a size. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from harness.tools.presentation import text_part
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2


def cut_result(result: item_pb2.CallResult, max_chars: int, reason: str) -> item_pb2.CallResult:
    """Return a result whose texts have at most `max_chars` characters together, the marker of the cut included.

    The beginning and the end are kept, for an error stands at either. Images stay. Texts must be inline: a result is
    cut before long texts become blobs; what is a blob already is neither counted nor cut.

    Args:
        result: Left alone; returned itself where nothing has to be cut.
        max_chars: Below the marker's length, only the marker is left.
        reason: One line, for the marker and the context report: which bound was met.
    """
    lengths = [len(part.text.text) for part in result.parts]
    total = sum(lengths)
    if total <= max_chars:
        return result
    total_bytes = sum(len(part.text.text.encode()) for part in result.parts)
    kept_chars = max(0, max_chars - len(_marker(total_bytes, reason)))
    head_end = (kept_chars + 1) // 2
    tail_start = total - kept_chars // 2
    parts, omitted_bytes = _cut(result.parts, head_end, tail_start, reason)
    cut = item_pb2.CallResult(outcome=result.outcome, parts=parts)
    earlier = result.truncation
    cut.truncation.omitted_bytes = earlier.omitted_bytes + omitted_bytes
    cut.truncation.reason = f"{earlier.reason}; {reason}" if earlier.reason else reason
    return cut


def _cut(
    parts: Sequence[llm_pb2.ContentPart], head_end: int, tail_start: int, reason: str
) -> tuple[list[llm_pb2.ContentPart], int]:
    """Leave out the characters of all texts from `head_end` to `tail_start`, and say so once, where the gap begins."""
    omitted_bytes = sum(
        len(part.text.text[begin:end].encode()) for part, begin, end in _gaps(parts, head_end, tail_start)
    )
    marker = _marker(omitted_bytes, reason)
    kept: list[llm_pb2.ContentPart] = []
    is_marked = False
    for part, begin, end in _gaps(parts, head_end, tail_start):
        if begin == end:
            kept.append(part)
            continue
        text = part.text.text
        left = text[:begin] + ("" if is_marked else marker) + text[end:]
        is_marked = True
        if left:
            kept.append(text_part(left))
    return kept, omitted_bytes


def _gaps(
    parts: Sequence[llm_pb2.ContentPart], head_end: int, tail_start: int
) -> list[tuple[llm_pb2.ContentPart, int, int]]:
    """Return each part with the stretch of its text that falls into the gap; an empty one where none does."""
    gaps = []
    position = 0
    for part in parts:
        length = len(part.text.text)
        begin = min(max(head_end - position, 0), length)
        end = min(max(tail_start - position, 0), length)
        gaps.append((part, begin, max(begin, end)))
        position += length
    return gaps


def _marker(omitted_bytes: int, reason: str) -> str:
    return f"\n[... {omitted_bytes} bytes left out here: {reason} ...]\n"
