"""Colours and marks, few of both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Characters that stand for something."""

    prompt: str
    good: str
    bad: str
    unknown: str
    bullet: str
    bar: str
    spinner: str


UNICODE_MARKS = Marks(prompt="›", good="✓", bad="✗", unknown="?", bullet="•", bar="│", spinner="⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
ASCII_MARKS = Marks(prompt=">", good="+", bad="x", unknown="?", bullet="-", bar="|", spinner="|/-\\")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How text is emphasised; without colours, nothing is but by weight, and without escapes, not at all."""

    has_escapes: bool
    has_colours: bool
    marks: Marks

    def dim(self, text: str) -> str:
        """Return text that matters less."""
        return self._sgr(2, text)

    def bold(self, text: str) -> str:
        """Return text that matters more."""
        return self._sgr(1, text)

    def good(self, text: str) -> str:
        """Return text of a success."""
        return self._colour(32, text)

    def bad(self, text: str) -> str:
        """Return text of a failure."""
        return self._colour(31, text)

    def unsure(self, text: str) -> str:
        """Return text of what nobody can know."""
        return self._colour(33, text)

    def accent(self, text: str) -> str:
        """Return text that the eye shall find."""
        return self._colour(36, text)

    def spinner(self, now: datetime) -> str:
        """Return the mark of something under way; turns with the time."""
        frames = self.marks.spinner
        return frames[int(now.timestamp() * 8) % len(frames)]

    def _sgr(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.has_escapes and text else text

    def _colour(self, code: int, text: str) -> str:
        return self._sgr(code, text) if self.has_colours else text


def style_for(environ: Mapping[str, str], encoding: str, *, is_terminal: bool) -> Style:
    """Return the style that suits an output; NO_COLOR (https://no-color.org) is respected."""
    has_escapes = is_terminal and environ.get("TERM", "") not in ("", "dumb")
    return Style(
        has_escapes=has_escapes,
        has_colours=has_escapes and not environ.get("NO_COLOR"),
        marks=UNICODE_MARKS if encoding.lower().replace("-", "") == "utf8" else ASCII_MARKS,
    )


def environment_style(encoding: str, *, is_terminal: bool) -> Style:
    """Return the style that suits an output of this process."""
    return style_for(os.environ, encoding, is_terminal=is_terminal)
