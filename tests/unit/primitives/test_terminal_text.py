"""What a program wrote for a terminal reaches the model as plain text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.primitives.terminal_text import plain_text

PROGRESS = "".join(f"\r\x1b[2K{percent}%" for percent in range(1, 5001)) + "\n\x1b[31mred\x1b[0m\x1b]0;title\x07\n"


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        (PROGRESS, "5000%\nred\n"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("a\r\r\nb", "a\nb"),
        ("10%\r20%\r", "20%"),
        ("|\b/\b-\b done", " done"),
        ("n\bna\bam\bme\be", "name"),
        ("\x1b]8;;https://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;never closed\nnext", "\nnext"),
        ("cut off \x1b[3", "cut off "),
        ("\x1b(Bplain\x1b[?25l\x1b[1;2H", "plain"),
        ("\x9b31mred", "red"),
        ("tab\tkept\0\x07\x7f", "tab\tkept"),
        ("\u2500 \U0001f600 é", "\u2500 \U0001f600 é"),
        ("", ""),
    ],
)
def test_control_sequences_and_overwritten_frames_go(raw: str, plain: str) -> None:
    assert plain_text(raw) == plain


@given(st.text(st.sampled_from("ab\x1b[]0;m\x07\r\n\b\\\x9b\x9c ?\t"), max_size=40))
def test_cleaning_twice_is_cleaning_once(raw: str) -> None:
    once = plain_text(raw)

    assert plain_text(once) == once


@given(st.text())
def test_nothing_but_tab_and_newline_controls_the_terminal(raw: str) -> None:
    assert not any(character < " " and character not in "\t\n" for character in plain_text(raw))


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert plain_text(text) == text


@pytest.mark.parametrize("run", ["\r", "\b", "\x1b", "\x1b]", "\x1b[", "\x1b[1;"])
def test_hostile_runs_cost_no_more_than_their_length(run: str) -> None:
    assert plain_text("a\n" + run * 300_000 + "\nb").startswith("a\n")
