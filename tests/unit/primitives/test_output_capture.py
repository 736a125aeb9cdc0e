"""Head and tail of output: exact counts, whole characters, no terminal sequences."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.primitives.output_capture import EXTRA_WINDOW_BYTES, capture, clean
from unreal_agent.operation.v1 import operation_pb2

texts = st.text(st.sampled_from("ab\n\tä─😀"), max_size=60)


def captured(
    tmp_path: Path, content: bytes, max_chars: int, frozen_bytes: int | None = None
) -> operation_pb2.CapturedOutput:
    path = tmp_path / "out"
    path.write_bytes(content)
    return capture(str(path), max_chars, frozen_bytes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts, st.integers(1, 70))
def test_text_is_cut_at_characters_and_counted_exactly(tmp_path: Path, text: str, limit: int) -> None:
    output = captured(tmp_path, text.encode(), limit)
    if len(text) <= limit:
        assert (output.head, output.tail, output.omitted_bytes) == (text, "", 0)
    else:
        tail_chars = limit // 2
        assert output.head == text[: limit - tail_chars]
        assert output.tail == (text[-tail_chars:] if tail_chars else "")
        shown = len(output.head.encode()) + len(output.tail.encode())
        assert output.omitted_bytes == len(text.encode()) - shown
    assert (output.total_bytes, output.is_lossy) == (len(text.encode()), False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=80), st.integers(1, 90))
def test_any_bytes_are_shown_and_never_counted_twice(tmp_path: Path, content: bytes, limit: int) -> None:
    output = captured(tmp_path, content, limit)
    assert output.total_bytes == len(content)
    assert output.omitted_bytes <= len(content)
    assert not set(output.head + output.tail) & set("\x00\x07\x08\x1b\x7f\r")


@pytest.mark.parametrize("character", ["x", "ä", "─", "😀"])
def test_large_file_is_read_at_its_ends_only(tmp_path: Path, character: str) -> None:
    count = EXTRA_WINDOW_BYTES
    text = "A" + character * count * 3 + "Z"
    output = captured(tmp_path, text.encode(), 11)
    assert (output.head, output.tail) == (text[:6], text[-5:])
    shown = len(output.head.encode()) + len(output.tail.encode())
    assert output.omitted_bytes == len(text.encode()) - shown
    assert not output.is_lossy


def test_what_was_written_after_the_freeze_does_not_count(tmp_path: Path) -> None:
    output = captured(tmp_path, b"before after", 100, frozen_bytes=6)
    assert (output.head, output.total_bytes) == ("before", 6)


def test_missing_file_is_empty(tmp_path: Path) -> None:
    output = capture(str(tmp_path / "none"), 10)
    assert (output.head, output.total_bytes, output.path) == ("", 0, str(tmp_path / "none"))


@pytest.mark.parametrize(
    "raw, shown",
    [
        ("a\r\nb\r\n", "a\nb\n"),
        ("a\r\r\nb", "a\nb"),
        ("10%\r20%\r30%\n", "30%\n"),
        ("10%\r20%\r", "20%"),
        ("last\r\x1b[K\n", "last\n"),
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07x\x1b]8;;u\x1b\\y", "red xy"),
        ("\x1b(Bcharset\x1bMup", "charsetup"),
        ("ab\bc", "ac"),
        ("\b\bx", "x"),
        ("bell\x07 nul\x00 tab\t", "bell nul tab\t"),
        ("cut \x1b[3", "cut 3"),
        ("no newline", "no newline"),
        ("", ""),
    ],
)
def test_text_is_what_a_person_would_have_seen(raw: str, shown: str) -> None:
    cleaned = clean(raw.encode())
    assert cleaned.head(1000)[0] == shown
    assert cleaned.tail(1000)[0] == shown


def test_omitted_bytes_are_raw_ones(tmp_path: Path) -> None:
    content = b"\x1b[31m0123456789\x1b[0m\n" * 3
    output = captured(tmp_path, content, 10)
    assert (output.head, output.tail) == ("01234", "6789\n")
    assert output.omitted_bytes == len(content) - len(b"\x1b[31m01234") - len(b"6789\x1b[0m\n")
