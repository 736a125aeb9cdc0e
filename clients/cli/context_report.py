"""What fills a model's window: a bar, a legend, and the report of what is sent and what was changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from clients.cli.display import model_words
from clients.cli.style import Style
from clients.cli.tables import print_facts, print_table
from clients.cli.text import enum_word, one_line, plural, size
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2

MAX_BAR_COLUMNS: Final = 72

_FREE: Final = "."
_MAX_NAME_COLUMNS: Final = 28
_NAMES: Final[Mapping[str, str]] = {
    "prompt": "prompt and tools",
    "summary": "summary of older turns",
    "input": "your words",
    "heartbeat": "notes of the harness",
    "response": "the model's words and calls",
    "tool_result": "results",
    "late_result": "late results",
}
_LETTERS: Final[Mapping[str, str]] = {
    "prompt": "P",
    "summary": "S",
    "input": "Y",
    "heartbeat": "N",
    "response": "M",
    "tool_result": "R",
    "late_result": "L",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one kind of part takes."""

    letter: str
    name: str
    tokens: int


def shares(context: coordinator_pb2.BuildContextResponse) -> list[Share]:
    """Return what takes room, in the order of the request; together as many tokens as the whole is estimated at."""
    sizes: dict[str, int] = {}
    for entry in context.report:
        sizes[entry.kind] = sizes.get(entry.kind, 0) + entry.estimated_tokens
    measured = sum(sizes.values())
    whole = context.totals.estimated_tokens
    kinds = [*(kind for kind in _NAMES if kind in sizes), *(kind for kind in sizes if kind not in _NAMES)]
    return [
        Share(
            letter=_LETTERS.get(kind, "?"),
            name=_NAMES.get(kind, kind.replace("_", " ")),
            tokens=sizes[kind] * whole // measured if measured else 0,
        )
        for kind in kinds
    ]


def bar(parts: Sequence[Share], window_tokens: int, columns: int) -> str:
    """Return one line of letters, each standing for as much of the window; what takes anything gets one at least.

    Without a known window the line is full.
    """
    whole = max(window_tokens, sum(part.tokens for part in parts), 1)
    widths = [max(min(part.tokens, 1), part.tokens * columns // whole) for part in parts]
    while sum(widths) > columns and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    if widths and not window_tokens:
        widths[widths.index(max(widths))] += max(0, columns - sum(widths))
    line = "".join(part.letter * width for part, width in zip(parts, widths, strict=True))
    return line[:columns].ljust(columns, _FREE)


def print_context_report(context: coordinator_pb2.BuildContextResponse, style: Style, *, columns: int) -> None:
    """Print all of it, for an output of so many columns."""
    totals, window = context.totals, context.window_tokens
    of_window = f" of {window:,}" if window else ""
    percent = f" ({_percent(totals.estimated_tokens, window)})" if window else ""
    amount = f"about {totals.estimated_tokens:,}{of_window} tokens{percent}"
    print_facts(
        ("model", model_words(context.settings.provider, context.settings.model)),
        ("size", f"{amount}, {size(totals.text_bytes)} of text, {plural(totals.images, 'image')}"),
        ("digest", context.context_digest),
        ("tools", ", ".join(tool.name for tool in context.prompt.tools)),
    )
    print()
    parts = shares(context)
    line = bar(parts, window, max(10, min(MAX_BAR_COLUMNS, columns - 2)))
    print(f"[{_coloured(line, style)}]")
    if window:
        parts.append(Share(letter=_FREE, name="free", tokens=max(0, window - totals.estimated_tokens)))
    width = max(8, min(_MAX_NAME_COLUMNS, columns - 24))
    for part in parts:
        share = _percent(part.tokens, window or totals.estimated_tokens)
        name = part.name[:width].ljust(width)
        print(f"  {_coloured(part.letter, style)} {name}{part.tokens:>10,}  {share:>6}")
    print()
    _print_entries(context)
    _print_changes(context)


def _print_entries(context: coordinator_pb2.BuildContextResponse) -> None:
    # As the legend above: by sizes, brought to what the provider counted, so that the two can be compared.
    measured = sum(entry.estimated_tokens for entry in context.report)
    whole = context.totals.estimated_tokens
    changed = {(one.source_sequence, one.call_id): _kind(one) for one in context.changes if one.source_sequence}
    rows = [
        (
            str(entry.source_sequence or ""),
            entry.kind.replace("_", " "),
            one_line(entry.call_id),
            f"{entry.estimated_tokens * whole // measured if measured else 0:,}",
            size(entry.text_bytes),
            str(entry.images or ""),
            changed.get((entry.source_sequence, entry.call_id), ""),
        )
        for entry in context.report
    ]
    heads = ("item", "part", "call", "tokens", "text", "images", "changed")
    print_table(heads, rows, right_aligned=(3, 4, 5))


def _print_changes(context: coordinator_pb2.BuildContextResponse) -> None:
    """Print what is not as it is in the history, and why; what was changed for one reason, in one line."""
    groups: dict[tuple[str, str], list[item_pb2.ContextChange]] = {}
    for change in context.changes:
        groups.setdefault((_kind(change), one_line(change.reason)), []).append(change)
    if groups:
        print("\nNot as in the history:")
    for (kind, reason), changes in groups.items():
        sequences = [change.source_sequence for change in changes if change.source_sequence]
        if not sequences:
            place = "" if len(changes) == 1 else f", {len(changes)} times"
        elif len(sequences) == 1:
            place = f" item {sequences[0]}"
        else:
            place = f" {len(sequences)} items from {min(sequences)} to {max(sequences)}"
        omitted_bytes = sum(change.omitted_bytes for change in changes)
        less = f" ({size(omitted_bytes)} less)" if omitted_bytes else ""
        print(f"  {kind}{place}: {reason}{less}")


def _kind(change: item_pb2.ContextChange) -> str:
    return enum_word(item_pb2.ContextChangeKind.DESCRIPTOR, change.kind).replace("_", " ")


def _percent(part: int, whole: int) -> str:
    share = 100 * part / max(whole, 1)
    return f"{share:.1f} %" if 0 < share < 10 else f"{share:.0f} %"


def _coloured(letters: str, style: Style) -> str:
    """Return letters, each kind in its colour; where there are none, the letters tell them apart."""
    paints = {
        "P": style.dim,
        "S": style.unsure,
        "Y": style.accent,
        "M": style.bold,
        "R": style.good,
        "L": style.good,
        "N": style.unsure,
        _FREE: style.dim,
    }
    pieces: list[str] = []
    start = 0
    for index in range(1, len(letters) + 1):
        if index == len(letters) or letters[index] != letters[start]:
            piece = letters[start:index]
            pieces.append(paints.get(piece[0], str)(piece))
            start = index
    return "".join(pieces)
