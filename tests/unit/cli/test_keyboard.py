"""Lines typed key by key."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clients.cli.keyboard import LineEditor


def test_enter_ends_a_line() -> None:
    editor = LineEditor()
    assert editor.feed("use ta") == []
    assert editor.text == "use ta"
    assert editor.feed("bs\rand\nmore") == ["use tabs", "and"]
    assert editor.text == "more"


def test_a_blank_line_is_none() -> None:
    assert LineEditor().feed("  \r\r") == []


def test_erasing() -> None:
    editor = LineEditor()
    editor.feed("one two\x7f\x7f\x7f")
    assert editor.text == "one "
    editor.feed("three\x17")
    assert editor.text == "one "
    editor.feed("\x15")
    assert editor.text == ""


def test_arrow_keys_are_ignored_also_in_pieces() -> None:
    editor = LineEditor()
    for keys in ("a\x1b[D", "\x1b", "[1;5C", "\x1bOP", "b"):
        editor.feed(keys)
    assert editor.text == "ab"


def test_a_pasted_text_is_one_line_with_its_breaks() -> None:
    editor = LineEditor()
    assert editor.feed("\x1b[200~one\rtwo\x1b[201~") == []
    assert editor.feed("\r") == ["one\ntwo"]


@given(st.lists(st.text(max_size=5)))
def test_no_keys_break_it(pieces: list[str]) -> None:
    editor = LineEditor()
    for piece in pieces:
        editor.feed(piece)
    assert all(character.isprintable() or character in "\t\n" for character in editor.text)
