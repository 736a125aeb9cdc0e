"""What stands on a terminal: whole rows in order, a small region below, and nothing drawn that did not change."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.cli.connection import Connection
from clients.cli.display import Heading, Summary
from clients.cli.live_display import LiveDisplay
from clients.cli.style import UNICODE_MARKS, Style
from clients.cli.view import SessionView
from tests.support.screen import Screen
from tests.support.watches import BEGIN, IDLE, RUNNING, Watch, ended, exited, response, running, started, turn, user
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2

STYLE = Style(has_escapes=True, has_colours=True, marks=UNICODE_MARKS)


class Terminal:
    """A display and the screen that it draws on."""

    def __init__(self, *, columns: int = 60, rows: int = 24) -> None:
        self.screen = Screen(rows=rows, columns=columns)
        self.size = os.terminal_size((columns, rows))
        self.now = BEGIN
        self.connection = Connection(lambda: (self.now - BEGIN).total_seconds())
        self.display = LiveDisplay(SessionView(), STYLE, lambda: self.size, self.connection)
        self.display.begin(Heading(session_id="s1", provider="scripted", model="", workspace="/w", is_resumed=False))

    def feed(self, *messages: coordinator_pb2.WatchSessionResponse, after_s: float = 0.0) -> str:
        self.now += timedelta(seconds=after_s)
        for message in messages:
            self.display.receive(message)
        written = self.display.frame(self.now)
        self.screen.write(written)
        return written

    def end(self) -> None:
        self.display.end(
            Summary(
                word="done", turns=1, tokens=0, elapsed_s=2, session_id="s1", next_command="run", next_label="go on"
            )
        )
        self.feed()


def test_a_whole_run_leaves_what_happened_and_nothing_of_the_region() -> None:
    terminal, watch = Terminal(), Watch()
    terminal.display.set_typed("")
    terminal.feed(watch.change(user("hi"), turn("t1"), rest=RUNNING))
    terminal.feed(watch.text("t1", "I look."))
    terminal.feed(watch.change(response("t1", "I look.", commands=[("c1", "ls")]), started("c1", "o1")))
    terminal.feed(watch.change(operations=[running("o1", "c1")]), watch.output("o1", b"a\nb\n"), after_s=1)
    done = exited("o1", "c1", exit_code=1, stdout="a\nb\n", took_s=1.5)
    terminal.feed(watch.change(ended("c1", "o1"), turn("t2"), operations=[done]))
    terminal.feed(watch.change(response("t2", "Done."), rest=IDLE))
    terminal.end()
    assert terminal.screen.lines == [
        "session s1 · scripted · /w",
        "",
        "› hi",
        "",
        "I look.",
        "",
        "  ✗ $ ls" + "exit 1 · 1.5 s".rjust(51),
        "    │ a",
        "    │ b",
        "",
        "Done.",
        "",
        "done · 1 turn · 2.0 s · session s1",
        "go on: run",
    ]


def test_running_calls_show_their_time_and_the_end_of_their_output() -> None:
    terminal, watch = Terminal(columns=80), Watch()
    calls = [("c1", "make"), ("c2", "sleep 9")]
    terminal.feed(watch.change(turn("t1"), response("t1", commands=calls), started("c1", "o1"), started("c2", "o2")))
    output = watch.output("o1", b"one\ntwo\nthree\nfour\n10%\r90%")
    terminal.feed(watch.change(operations=[running("o1", "c1")]), output, after_s=3)
    region = terminal.screen.lines[2:]
    assert [line.split("  ")[-1].strip() for line in region if "$" in line] == ["3.0 s", "waiting"]
    assert [line.strip() for line in region if "│" in line] == ["│ three", "│ four", "│ 90%"]
    assert "2 calls running" in region[-1]


def test_a_frame_without_news_writes_nothing() -> None:
    terminal, watch = Terminal(), Watch()
    terminal.feed(watch.change(user("hi"), turn("t1"), rest=RUNNING))
    assert terminal.feed() == ""


def test_a_tick_writes_only_the_rows_that_changed() -> None:
    terminal, watch = Terminal(), Watch()
    terminal.feed(watch.change(turn("t1"), response("t1", commands=[("c1", "make")]), started("c1", "o1")))
    terminal.feed(watch.change(operations=[running("o1", "c1")]), watch.output("o1", b"one\n"))
    terminal.screen.touched.clear()
    terminal.feed(after_s=1)
    lines = terminal.screen.lines
    drawn = [lines[row].strip() for row in sorted(terminal.screen.touched)]
    assert ["$ make" in row for row in drawn] == [True, False]
    assert "1 call running" in drawn[1]


def test_what_ends_while_the_model_speaks_is_shown_after_its_words() -> None:
    terminal, watch = Terminal(), Watch()
    terminal.feed(watch.change(turn("t1"), response("t1", commands=[("c1", "make")]), started("c1", "o1")))
    terminal.feed(watch.change(turn("t2")), watch.text("t2", "I wait\nfor"))
    terminal.feed(watch.change(ended("c1", "o1"), operations=[exited("o1", "c1")]))
    terminal.feed(watch.text("t2", " it."), watch.change(response("t2", "I wait\nfor it.")))
    text = "\n".join(terminal.screen.lines)
    assert text.index("I wait\nfor it.") < text.index("✓ $ make")


def test_the_cursor_stands_behind_what_is_typed() -> None:
    terminal, watch = Terminal(), Watch()
    terminal.display.set_typed("use tabs")
    terminal.feed(watch.change(turn("t1")))
    line, column = terminal.screen.cursor
    assert terminal.screen.lines[line] == "› use tabs"
    assert column == len("› use tabs")


def test_a_long_typed_line_shows_its_end() -> None:
    terminal, watch = Terminal(columns=40), Watch()
    terminal.display.set_typed("x" * 100 + "end")
    terminal.feed(watch.change(turn("t1")))
    assert terminal.screen.lines[-1].endswith("xend")


def test_many_calls_fit_a_small_terminal() -> None:
    terminal, watch = Terminal(columns=80, rows=10), Watch()
    calls = [(f"c{number}", f"sleep {number}") for number in range(30)]
    terminal.feed(
        watch.change(turn("t1"), response("t1", commands=calls), *(started(call, f"o-{call}") for call, _ in calls))
    )
    region = [line for line in terminal.screen.lines if line][1:]
    assert len(region) <= 8
    assert any("and 2" in line and "more" in line for line in region)


def test_hostile_text_moves_nothing() -> None:
    terminal, watch = Terminal(), Watch()
    evil = "\x1b[2J\x1b[H\x1b]0;title\x07\x9b5Aa\x08b\u202e"
    terminal.feed(watch.change(user(evil), turn("t1")))
    terminal.feed(watch.text("t1", evil), watch.change(response("t1", evil, commands=[("c1", evil)])))
    done = exited("o1", "c1", stdout=evil)
    terminal.feed(watch.change(started("c1", "o1")), watch.change(ended("c1", "o1"), operations=[done]))
    terminal.end()
    assert terminal.screen.lines[0] == "session s1 · scripted · /w"


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_long_paragraph_is_broken_at_words(columns: int) -> None:
    terminal, watch = Terminal(columns=columns), Watch()
    words = " ".join(f"word{number}" for number in range(60))
    terminal.feed(watch.change(turn("t1")))
    for start in range(0, len(words), 7):
        terminal.feed(watch.text("t1", words[start : start + 7]))
    terminal.feed(watch.change(response("t1", words)))
    terminal.end()
    shown = terminal.screen.lines[2:-3]
    assert " ".join(shown) == words
    assert max(map(len, shown)) < columns


def test_a_narrower_terminal_keeps_what_scrolled_up() -> None:
    terminal, watch = Terminal(columns=100), Watch()
    terminal.feed(watch.change(user("hi"), turn("t1")))
    terminal.size = os.terminal_size((50, 24))
    terminal.screen.columns = 50
    terminal.feed(watch.change(response("t1", "Done.")), after_s=1)
    assert terminal.screen.lines[0] == "session s1 · scripted · /w"


def test_a_lost_connection_is_told_of_while_it_lasts() -> None:
    terminal, watch = Terminal(), Watch()
    terminal.feed(watch.change(user("hi"), turn("t1"), rest=RUNNING))
    terminal.connection.note(False)
    terminal.feed(after_s=0.2)
    assert "lost" not in terminal.screen.lines[-1]
    terminal.feed(after_s=1.8)
    assert "connection lost, waiting 2.0 s" in terminal.screen.lines[-1]
    terminal.connection.note(True)
    terminal.feed(after_s=0.1)
    assert "lost" not in terminal.screen.lines[-1]


def test_others_may_write_where_the_region_was() -> None:
    terminal, watch = Terminal(columns=100), Watch()
    terminal.display.set_typed("typed")
    terminal.feed(watch.change(user("hi"), response("t1", "I look.", commands=[("c1", "ls")]), started("c1", "o1")))
    terminal.screen.write(terminal.display.erase())
    terminal.screen.write("others\n")
    terminal.feed(after_s=0.1)
    assert terminal.screen.lines[:5] == ["session s1 · scripted · /w", "", "› hi", "", "I look."]
    assert terminal.screen.lines[5:7] == ["others", ""]
    text = "\n".join(terminal.screen.lines)
    assert [text.count(part) for part in ("$ ls", "Ctrl-C stops", "› typed")] == [1, 1, 1]


@given(st.lists(st.sampled_from(["a", "word ", "\n", "  ", "长", "\n\n", "x" * 30]), max_size=40))
def test_streaming_shows_the_same_as_telling_at_once(pieces: list[str]) -> None:
    def shown(chunks: list[str]) -> list[str]:
        terminal, watch = Terminal(columns=31), Watch()
        terminal.feed(watch.change(turn("t1")))
        for chunk in chunks:
            terminal.feed(watch.text("t1", chunk))
        terminal.feed(watch.change(response("t1", "".join(chunks))))
        terminal.end()
        return [line for line in terminal.screen.lines if line]

    whole = "".join(pieces)
    assert shown(pieces) == shown([whole] if whole else [])
