"""What fills the window: one letter for as much of it, a legend, the parts, and what was changed and why."""

from __future__ import annotations

import pytest

from clients.cli.context_report import bar, print_context_report, shares
from clients.cli.style import style_for
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

PLAIN = style_for({}, "utf-8", is_terminal=False)
COLOURED = style_for({"TERM": "xterm"}, "utf-8", is_terminal=True)


def context(window: int = 1_000, *, tokens: int = 500) -> coordinator_pb2.BuildContextResponse:
    made = coordinator_pb2.BuildContextResponse(window_tokens=window, context_digest="ab")
    made.settings.CopyFrom(session_pb2.SessionSettings(provider="scripted", model="m1"))
    made.totals.estimated_tokens = tokens
    for place, part, size in ((0, "prompt", 100), (7, "summary", 50), (3, "input", 1), (9, "tool_result", 99)):
        made.report.add(source_sequence=place, kind=part, estimated_tokens=size, text_bytes=size * 4)
    made.report[3].call_id = "c1"
    for kind, sequence, call_id, reason in (
        (item_pb2.CONTEXT_CHANGE_KIND_COMPACTED, 7, "", "items up to 6 were summarised"),
        (item_pb2.CONTEXT_CHANGE_KIND_PREFIX_BREAK, 0, "", "old output was pruned"),
        (item_pb2.CONTEXT_CHANGE_KIND_PRUNED, 9, "c1", "no room"),
        (item_pb2.CONTEXT_CHANGE_KIND_PRUNED, 11, "c2", "no room"),
    ):
        made.changes.add(kind=kind, source_sequence=sequence, call_id=call_id, reason=reason, omitted_bytes=1_000)
    return made


def test_parts_make_up_the_estimate_of_the_whole() -> None:
    found = shares(context())
    assert [(one.letter, one.tokens) for one in found] == [("P", 200), ("S", 100), ("Y", 2), ("R", 198)]


def test_the_bar_is_as_long_as_the_window() -> None:
    assert bar(shares(context()), 1_000, 20) == "PPPPSSYRRR.........."
    assert bar(shares(context()), 0, 20) == "P" * 8 + "S" * 4 + "Y" + "R" * 7
    assert bar(shares(context(tokens=3_000)), 1_000, 20) == "P" * 8 + "S" * 4 + "Y" + "R" * 7
    assert bar([], 1_000, 20) == "." * 20


def test_the_smallest_part_is_seen_wherever_it_stands() -> None:
    made = context()
    made.report.add(source_sequence=12, kind="late_result", estimated_tokens=1)
    assert bar(shares(made), 0, 20).endswith("L")


@pytest.mark.parametrize("columns", [1, 2, 3, 10, 72])
@pytest.mark.parametrize("tokens", [0, 1, 500, 999, 1_000, 5_000])
def test_it_never_is_longer_or_shorter(columns: int, tokens: int) -> None:
    assert len(bar(shares(context(tokens=tokens)), 1_000, columns)) == columns


def test_it_reads_well_without_colours(capsys: pytest.CaptureFixture[str]) -> None:
    print_context_report(context(), PLAIN, columns=52)
    assert capsys.readouterr().out.splitlines() == [
        "model   scripted m1",
        "size    about 500 of 1,000 tokens (50 %), 0 B of text, 0 images",
        "digest  ab",
        "",
        "[" + "P" * 10 + "S" * 5 + "Y" + "R" * 9 + "." * 25 + "]",
        "  P prompt and tools                   200    20 %",
        "  S summary of older turns             100    10 %",
        "  Y your words                           2   0.2 %",
        "  R results                            198    20 %",
        "  . free                               500    50 %",
        "",
        "ITEM  PART         CALL  TOKENS   TEXT  IMAGES  CHANGED",
        "      prompt                200  400 B",
        "7     summary               100  200 B          compacted",
        "3     input                   2    4 B",
        "9     tool result  c1       198  396 B          pruned",
        "",
        "Not as in the history:",
        "  compacted item 7: items up to 6 were summarised (1.0 kB less)",
        "  prefix break: old output was pruned (1.0 kB less)",
        "  pruned 2 items from 9 to 11: no room (2.0 kB less)",
    ]


def test_a_narrow_terminal_is_not_overrun(capsys: pytest.CaptureFixture[str]) -> None:
    print_context_report(context(), PLAIN, columns=40)
    lines = capsys.readouterr().out.splitlines()
    assert "  S summary of older       100    10 %" in lines
    assert max(len(line) for line in lines[4:10]) <= 40


def test_colours_change_no_letter(capsys: pytest.CaptureFixture[str]) -> None:
    print_context_report(context(), COLOURED, columns=22)
    shown = capsys.readouterr().out
    assert "\x1b[32mRRR\x1b[0m" in shown
    assert "\x1b[36mY\x1b[0m" in shown


def test_without_a_known_window_there_is_no_free_room(capsys: pytest.CaptureFixture[str]) -> None:
    print_context_report(context(0), PLAIN, columns=22)
    shown = capsys.readouterr().out
    assert "about 500 tokens, " in shown
    assert "free" not in shown


def test_what_others_wrote_can_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = context()
    hostile.report[3].call_id = "c\x1b[2J"
    hostile.changes[0].reason = "a\x1b[2Jb\nc"
    print_context_report(hostile, PLAIN, columns=80)
    assert "\x1b" not in capsys.readouterr().out
