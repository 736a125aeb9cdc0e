"""A session as lines, for people without a terminal and for programs."""

from __future__ import annotations

import json
from datetime import timedelta

from clients.cli.connection import Connection
from clients.cli.display import Display, Heading, Summary
from clients.cli.jsonl_display import JsonlDisplay
from clients.cli.plain_display import PlainDisplay
from clients.cli.style import ASCII_MARKS, Style, style_for
from clients.cli.view import SessionView
from tests.support.watches import BEGIN, IDLE, RUNNING, Watch, ended, exited, response, running, started, turn, user
from unreal_agent.session.v1 import item_pb2

STYLE = Style(has_escapes=False, has_colours=False, marks=ASCII_MARKS)


def play(display: Display) -> str:
    """Return what a display writes of one run."""
    watch = Watch()
    text = ""
    display.begin(Heading(session_id="s1", provider="p", model="m", workspace="/w", is_resumed=True))
    display.receive(watch.change(user("hi\nthere"), turn("t1"), rest=RUNNING))
    display.receive(watch.text("t1", "I lo"))
    display.receive(watch.change(response("t1", "I look.", commands=[("c1", "make")]), started("c1", "o1")))
    display.receive(watch.change(operations=[running("o1", "c1")]))
    text += display.frame(BEGIN + timedelta(seconds=1))
    text += display.frame(BEGIN + timedelta(seconds=3))
    text += display.frame(BEGIN + timedelta(seconds=4))
    done = exited("o1", "c1", stdout="built\n", took_s=5)
    display.receive(watch.change(ended("c1", "o1"), turn("t2"), operations=[done]))
    display.receive(watch.change(response("t2", "Done."), rest=IDLE))
    display.notice("a notice")
    display.end(
        Summary(word="done", turns=2, tokens=9, elapsed_s=5, session_id="s1", next_command="run", next_label="go on")
    )
    return text + display.frame(BEGIN + timedelta(seconds=5))


def test_a_connection_that_stays_lost_is_told_of_once() -> None:
    now_s = 0.0
    connection = Connection(lambda: now_s)
    display, watch = PlainDisplay(SessionView(), STYLE, connection=connection), Watch()
    display.receive(watch.change(user("hi"), turn("t1"), rest=RUNNING))
    written = display.frame(BEGIN)
    connection.note(False)
    for now_s in (1.0, 2.0, 3.0):  # noqa: B007  # the connection's clock reads it
        written += display.frame(BEGIN)
    assert written.count("- connection lost; going on when it is back") == 1


def test_lines_for_people() -> None:
    assert play(PlainDisplay(SessionView(), STYLE)).splitlines() == [
        "resuming session s1 · p m · /w",
        "",
        "> hi",
        "  there",
        "",
        "I look.",
        "",
        "  ~ $ make" + "running 3.0 s".rjust(90),
        "  + $ make" + "5.0 s".rjust(90),
        "    | built",
        "",
        "Done.",
        "",
        "- a notice",
        "",
        "done · 2 turns · 9 tokens · 5.0 s · session s1",
        "go on: run",
    ]


def test_lines_for_programs_are_the_items_and_nothing_else() -> None:
    items = [json.loads(line) for line in play(JsonlDisplay(SessionView())).splitlines()]
    assert [item["sequence"] for item in items] == [str(number) for number in range(1, 8)]
    kinds = [next(iter(item.keys() - {"sequence", "revision", "record_time"})) for item in items]
    assert kinds == [
        "input",
        "turn",
        "model_response",
        "tool_call_status",
        "tool_call_status",
        "turn",
        "model_response",
    ]


def test_a_refused_call_shows_why() -> None:
    display, watch = PlainDisplay(SessionView(), STYLE), Watch()
    refused = ended("c1", outcome=item_pb2.CALL_OUTCOME_REJECTED, text="There is no tool named Bush.")
    display.receive(watch.change(turn("t1"), response("t1", commands=[("c1", "x")]), refused))
    lines = display.frame(BEGIN).splitlines()
    assert lines == ["  x $ x" + "refused".rjust(93), "    | There is no tool named Bush."]


def test_colours_are_for_terminals_that_have_them_and_people_who_want_them() -> None:
    assert style_for({"TERM": "xterm"}, "utf-8", is_terminal=True).has_colours
    assert not style_for({"TERM": "xterm", "NO_COLOR": "1"}, "utf-8", is_terminal=True).has_colours
    assert not style_for({"TERM": "dumb"}, "utf-8", is_terminal=True).has_escapes
    assert not style_for({"TERM": "xterm"}, "utf-8", is_terminal=False).has_escapes
    assert style_for({}, "ascii", is_terminal=False).marks == ASCII_MARKS
