"""Pure text work for a terminal: cleaning, cutting, wrapping, and amounts in words.

What a model or a command wrote is hostile: nothing of it may move a cursor, set a title or hide other text.
"""

from __future__ import annotations

import re

from google.protobuf.descriptor import EnumDescriptor
from rich.cells import cell_len, chop_cells

from harness.primitives.terminal_text import plain_text

# What reorders or hides the text around it: direction marks, invisible operators, line separators, byte order marks.
_HIDDEN = re.compile("[\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]")

TAB_WIDTH = 4


def clean(text: str) -> str:
    """Return `text` without escape sequences, control and hidden characters; newlines stay, tabs become spaces."""
    return _HIDDEN.sub("", plain_text(text)).expandtabs(TAB_WIDTH)


def one_line(text: str) -> str:
    """Return `text` cleaned, on one line, with runs of white space joined."""
    return " ".join(clean(text).split())


def clip(text: str, width: int, ellipsis: str = "…") -> str:
    """Return `text` cut to at most `width` terminal cells."""
    if cell_len(text) <= width:
        return text
    room = width - cell_len(ellipsis)
    if room <= 0:
        return ""
    return chop_cells(text, room)[0].rstrip() + ellipsis


def wrap(line: str, width: int) -> list[str]:
    """Return the rows of one line, broken at spaces where it can be; at least one row.

    Greedy, so that all rows but the last stay as they are when the line grows.
    """
    rows = []
    while cell_len(line) > width:
        head = chop_cells(line, width)[0]
        space = head.rfind(" ") if line[len(head) : len(head) + 1] != " " else len(head)
        # A row of nothing but indentation would repeat for ever.
        cut = space if space > 0 and head[:space].strip() else len(head)
        rows.append(line[:cut].rstrip())
        line = line[cut:].removeprefix(" ")
    return [*rows, line]


def last_lines(text: str, count: int) -> tuple[list[str], int]:
    """Return the last `count` non-blank lines of cleaned `text`, and how many lines stand above them."""
    lines = [line.rstrip() for line in clean(text).split("\n")]
    lines = [line for line in lines if line]
    return lines[-count:], max(0, len(lines) - count)


def duration(seconds: float) -> str:
    """Return a length of time as a person says it: "0.4 s", "12 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: int) -> str:
    """Return a number of bytes: "812 B", "1.4 MB"."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def plural(count: int, noun: str) -> str:
    """Return "1 turn", "12,345 tokens"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def enum_word(values: EnumDescriptor, number: int) -> str:
    """Return an enum's value as a person says it: "waiting for operations"; one of a later release by its number."""
    known = values.values_by_number.get(number)
    if known is None:
        return f"unknown ({number})"
    prefix = values.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return known.name.removeprefix(prefix).lower().replace("_", " ")
