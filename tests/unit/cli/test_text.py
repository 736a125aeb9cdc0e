"""Text for a terminal: hostile characters out, words whole, amounts in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from clients.cli.text import clean, clip, duration, last_lines, one_line, plural, size, wrap


@given(st.text())
def test_nothing_that_moves_a_cursor_or_hides_text_is_left(text: str) -> None:
    cleaned = clean(text)
    assert not any(ord(character) < 32 and character != "\n" for character in cleaned)
    assert not any(character in cleaned for character in "\x7f\x9b\u202e\u2066\ufeff\u200b")
    assert clean(cleaned) == cleaned


@given(st.text(alphabet="ab 长e\u0301", max_size=60), st.integers(2, 20))
def test_wrapped_rows_fit_and_lose_no_letter(line: str, width: int) -> None:
    rows = wrap(line, width)
    assert all(cell_len(row) <= width for row in rows)
    assert "".join(rows).replace(" ", "") == line.replace(" ", "")


@given(st.text(alphabet="ab ", max_size=40), st.text(alphabet="ab ", max_size=10), st.integers(2, 12))
def test_rows_but_the_last_stay_when_a_line_grows(line: str, more: str, width: int) -> None:
    assert wrap(line + more, width)[: len(wrap(line, width)) - 1] == wrap(line, width)[:-1]


@given(st.text(max_size=30), st.integers(0, 30))
def test_a_clipped_text_fits(text: str, width: int) -> None:
    assert cell_len(clip(text, width)) <= width


def test_the_last_lines_and_how_many_stand_above() -> None:
    assert last_lines("a\n\nb\nc\n", 2) == (["b", "c"], 1)
    assert last_lines("", 2) == ([], 0)


def test_one_line_joins_white_space() -> None:
    assert one_line(" a\n\tb\x1b[31m c ") == "a b c"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 s"),
        (-1, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.7, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_amounts() -> None:
    assert [size(812), size(1_400_000), size(250_000)] == ["812 B", "1.4 MB", "250 kB"]
    assert [plural(1, "turn"), plural(12345, "token")] == ["1 turn", "12,345 tokens"]
