"""`make demo` on a machine with no key and no network: it does what it says, and shows it."""

from __future__ import annotations

import re

import pytest

from tests.support.demo import ROOT, Demo, run_demo
from tests.support.screen import Screen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CLAIMS = [
    "the agent finished its job",
    "a test failed before, all pass now",
    "the command that was running at the kill started once and ran to its end",
    "7 tool calls, each with exactly one result in the history",
    "the chart is there",
]


@pytest.fixture(scope="module")
def demo() -> Demo:
    return run_demo()


def test_every_claim_holds(demo: Demo) -> None:
    assert (demo.plain_code, demo.terminal_code) == (0, 0)
    for text in (demo.plain, demo.terminal):
        assert re.findall(r"  ([✓✗]) (.*[a-z])\r?$", text.partition("# Checked:")[2], re.MULTILINE) == [
            ("✓", claim) for claim in CLAIMS
        ]


def test_it_shows_a_kill_and_that_the_command_runs_on(demo: Demo) -> None:
    before, kill, after = demo.plain.partition("! kill -9 ")
    assert kill
    assert "run 10 of 10" not in before
    assert re.search(r"run (\d+) of 10: all tests pass\n    run (\d+) of 10", after)
    assert "the process that ran this session died; going on from its records" in after


def test_it_shows_the_tests_fail_and_the_change(demo: Demo) -> None:
    assert re.search(r"✗ \$ python3 -m unittest .*exit 1", demo.plain)
    assert "│ FAILED (failures=1)" in demo.plain
    assert "│ +    half = len(ordered) // 2" in demo.plain
    assert "✓ read skill charts" in demo.plain
    assert "│ PNG 640×360" in demo.plain


def test_it_ends_with_what_to_type_next(demo: Demo) -> None:
    following = demo.plain.partition("# What to type next:\n")[2]
    assert "unreal-agent sessions show demo --state-dir " in following
    assert "OPENAI_API_KEY=" in following


def test_it_is_neither_over_at_once_nor_long(demo: Demo) -> None:
    assert 10 < demo.elapsed_s < 60


def test_a_terminal_shows_it_whole(demo: Demo) -> None:
    screen = Screen(rows=50, columns=100, may_wrap=True)
    screen.write(demo.terminal)
    text = "\n".join(screen.lines)
    for part in ("› A test fails.", "✗ $ python3 -m unittest", "! kill -9", "Done. `median` is right", "# Checked:"):
        assert text.count(part) == 1, part


def test_it_leaves_the_project_as_it_was(demo: Demo) -> None:
    text = (ROOT / "examples" / "weather" / "weather" / "readings.py").read_text()
    assert "return ordered[len(ordered) // 2]" in text
    assert not (ROOT / "examples" / "weather" / "charts").exists()
