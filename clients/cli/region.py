"""Rows at the bottom of a terminal that are redrawn in place, below what has scrolled up for good. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.cells import cell_len

from clients.cli.text import clean


@dataclass
class Region:
    """Rows at the bottom that belong to the display."""

    _rows: list[str] = field(default_factory=list)
    _columns: int = 0
    _shows_cursor: bool = True

    def draw(self, scroll: list[str], rows: list[str], columns: int, *, shows_cursor: bool) -> str:
        """Return the bytes that turn the screen from the last frame into this one; empty where they are the same.

        Between frames the cursor stands at the end of the region's last row, or below everything where there is none.
        """
        if not scroll and rows == self._rows and columns == self._columns:
            return ""
        out = ["\x1b[?2026h"]  # begin of a synchronised update: terminals that know it show it at once
        if shows_cursor != self._shows_cursor:
            out.append("\x1b[?25h" if shows_cursor else "\x1b[?25l")
        out.append("\r")
        if height := self._drawn_height(columns):
            out.append(f"\x1b[{height - 1}A" if height > 1 else "")
        out += [f"{row}\x1b[K\n" for row in scroll]
        is_moved = bool(scroll) or columns != self._columns
        for index, row in enumerate(rows):
            if is_moved or index >= len(self._rows) or row != self._rows[index]:
                out.append(f"\r{row}\x1b[K")
            if index + 1 < len(rows):
                out.append("\n")
        if len(rows) < len(self._rows) or is_moved:
            # Nothing of an older, longer region stays below.
            out.append("\x1b[J" if rows else "\r\x1b[J")
        if rows:
            out.append(f"\r\x1b[{cells(rows[-1])}C" if cells(rows[-1]) else "\r")
        out.append("\x1b[?2026l")
        self._rows, self._columns, self._shows_cursor = rows, columns, shows_cursor
        return "".join(out)

    def erase(self, columns: int) -> str:
        """Return the bytes that leave the screen as if there were no region, for others to write on."""
        height = self._drawn_height(columns)
        up = f"\x1b[{height - 1}A" if height > 1 else ""
        self._rows, self._shows_cursor = [], True
        return f"\x1b[?2026h\r{up}\x1b[J\x1b[?25h\x1b[?2026l"

    def _drawn_height(self, columns: int) -> int:
        """Return the rows that the region takes now: a narrower terminal has broken its lines."""
        if columns >= self._columns or columns <= 0:
            return len(self._rows)
        return sum(max(1, -(-cells(row) // columns)) for row in self._rows)


def cells(row: str) -> int:
    """Return the width of a styled row."""
    return cell_len(clean(row))
