"""A terminal's screen, as far as the command line draws on it: what a person sees after bytes were written."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\x1b\[(?P<arguments>[0-9?;]*)(?P<final>[A-Za-z])|(?P<control>[\r\n])|(?P<text>[^\x1b\r\n]+)")


class Screen:
    """Rows that scroll up for good and rows that can still be reached. One cell a character; refuses what it can't."""

    def __init__(self, *, rows: int = 24, columns: int = 80, may_wrap: bool = False) -> None:
        """Begin empty, the cursor at the top; a row that is too long is an error, unless it may wrap."""
        self._may_wrap = may_wrap
        self.columns = columns
        self._rows = rows
        self._lines: list[str] = [""]
        self._line = 0
        self._column = 0
        self.touched: set[int] = set()
        """Lines that were written to since the test cleared this, from the very first line on."""

    @property
    def lines(self) -> list[str]:
        """All lines from the first on, without trailing space and trailing empty lines."""
        lines = [line.rstrip() for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def cursor(self) -> tuple[int, int]:
        """Line and column of the cursor, lines from the very first one."""
        return self._line, self._column

    def write(self, text: str) -> None:
        """Do what a terminal does with `text`."""
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            assert match is not None, f"unknown sequence {text[position : position + 12]!r}"
            position = match.end()
            if match["text"]:
                self._put(match["text"])
            elif match["control"] == "\r":
                self._column = 0
            elif match["control"] == "\n":
                # The terminal's own driver adds the carriage return.
                self._new_line()
            else:
                self._control(match["arguments"], match["final"])

    def _put(self, text: str) -> None:
        while self._may_wrap and self._column + len(text) > self.columns:
            room = self.columns - self._column
            self._write_here(text[:room])
            self._new_line()
            text = text[room:]
        assert self._may_wrap or self._column + len(text) < self.columns, f"a row would wrap: {text!r}"
        self._write_here(text)

    def _write_here(self, text: str) -> None:
        line = self._lines[self._line].ljust(self._column)
        self._lines[self._line] = line[: self._column] + text + line[self._column + len(text) :]
        self._column += len(text)
        self.touched.add(self._line)

    def _new_line(self) -> None:
        self._column = 0
        self._line += 1
        if self._line == len(self._lines):
            self._lines.append("")

    def _control(self, arguments: str, final: str) -> None:
        if arguments.startswith("?") or final == "m":
            return
        count = int(arguments or "1")
        match final:
            case "A":
                self._line -= count
                assert self._line >= max(0, len(self._lines) - self._rows), "the cursor left the screen"
            case "C":
                self._column += count
            case "K":
                self._lines[self._line] = self._lines[self._line][: self._column]
                self.touched.add(self._line)
            case "J":
                self._lines[self._line] = self._lines[self._line][: self._column]
                del self._lines[self._line + 1 :]
            case _:
                raise AssertionError(f"unknown sequence CSI {arguments}{final}")
