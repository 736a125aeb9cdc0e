"""The commands about sessions and operations, over what a run left behind."""

from __future__ import annotations

import json
import signal
import sqlite3
from pathlib import Path

import pytest

from tests.support.cli import Cli, bash
from tests.support.eventually import eventually


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def used(cli: Cli) -> Cli:
    """A state directory with one finished session, s1."""
    script = cli.script(
        [
            {
                "text": "I look.",
                "tool_calls": [bash("echo one; echo two >&2; exit 3")],
                "usage": {"input_tokens": 100, "cached_input_tokens": 40, "output_tokens": 20},
            },
            {"text": "Done."},
            {"expect": "more", "text": "More."},
        ]
    )
    assert cli.run("run", "-p", "Look.", "--session", "s1", "--script", script).code == 0
    return cli


@pytest.fixture
async def interrupted(cli: Cli) -> Cli:
    """A state directory with one session, s1, whose agent was killed while a command ran."""
    script = cli.script([{"tool_calls": [bash("touch begun; sleep 30")]}, {"text": "Done."}])
    with cli.start("run", "-p", "Wait.", "--session", "s1", "--script", script) as agent:
        await eventually(lambda: (cli.workspace / "begun").exists(), within_s=10)
        agent.send_signal(signal.SIGKILL)
    return cli


def operation_of(cli: Cli) -> str:
    operations = cli.run("operations", "list", "s1", "--output", "jsonl").items
    return next(str(one["operation_id"]) for one in operations if one["type"] == "bash")


def test_nothing_yet_says_how_to_begin(cli: Cli) -> None:
    done = cli.run("sessions", "list")
    assert done.code == 0
    assert "unreal-agent run -p" in done.stdout


def test_sessions_are_listed(used: Cli) -> None:
    heads, row = used.run("sessions", "list").stdout.splitlines()
    assert heads.split() == ["SESSION", "STATE", "CHANGED", "ITEMS", "MODEL", "WORKSPACE"]
    assert row.split()[:2] == ["s1", "idle"]
    assert row.endswith(str(used.workspace))
    [session] = used.run("sessions", "list", "--output", "jsonl").items
    assert session["session_id"] == "s1"


def test_a_session_is_shown_with_its_history(used: Cli) -> None:
    shown = used.run("sessions", "show", "s1").stdout
    assert "2 turns, 100 tokens in, 40 of them cached, 20 out" in shown
    for part in ("› Look.", "I look.", "✗ $ echo one", "exit 3", "│ two", "Done."):
        assert part in shown


def test_watching_a_finished_session_shows_it_and_ends(used: Cli) -> None:
    watched = used.run("sessions", "watch", "s1")
    assert watched.code == 0
    assert "› Look." in watched.stdout
    assert "Done." in watched.stdout
    items = used.run("sessions", "watch", "s1", "--output", "jsonl").items
    assert items == used.run("sessions", "show", "s1", "--output", "jsonl").items


def test_the_context_is_reported_and_shown(used: Cli) -> None:
    report = used.run("sessions", "context", "s1").stdout
    assert "tool result" in report
    assert "[P" in report
    assert "R results" in report
    assert "Bash" in report
    full = used.run("sessions", "context", "s1", "--full").stdout
    assert "--- user (item 1)\nLook." in full
    assert json.loads(used.run("sessions", "context", "s1", "--output", "jsonl").stdout)["entries"]


def test_a_fork_goes_its_own_way(used: Cli) -> None:
    made = used.run("sessions", "fork", "s1", "--as", "s2")
    assert made.code == 0
    assert "session s2, forked from s1" in made.stdout
    assert "More." in used.run("run", "-p", "more", "--session", "s2").stdout
    before = used.run("sessions", "show", "s1", "--output", "jsonl").items
    assert len(used.run("sessions", "show", "s2", "--output", "jsonl").items) > len(before)


def test_an_export_becomes_the_same_session_elsewhere(used: Cli, tmp_path: Path) -> None:
    path = used.directory / "s1.jsonl"
    assert used.run("sessions", "export", "s1", "--to", str(path)).code == 0
    assert used.run("sessions", "export", "s1").stdout == path.read_text()
    assert [one.name for one in used.directory.glob("*.partial")] == []
    elsewhere = ("--state-dir", str(tmp_path / "elsewhere"))
    made = used.run("sessions", "import", str(path), "--as", "copy", *elsewhere)
    assert (made.code, made.stderr) == (0, "")

    def texts(*arguments: str) -> list[str]:
        return [
            line for line in used.run("sessions", "show", *arguments).stdout.splitlines() if "›" in line or "│" in line
        ]

    assert texts("copy", *elsewhere) == texts("s1")


def test_an_import_from_standard_input(used: Cli) -> None:
    exported = used.run("sessions", "export", "s1").stdout
    assert used.run("sessions", "import", "-", "--as", "copy", stdin=exported).code == 0
    refused = used.run("sessions", "import", "-", "--as", "half", stdin="\n".join(exported.splitlines()[:-1]))
    assert refused.code == 1
    assert [one["session_id"] for one in used.run("sessions", "list", "--output", "jsonl").items] == ["copy", "s1"]


def test_a_deleted_session_is_gone_for_good(used: Cli) -> None:
    assert used.run("sessions", "delete", "s1").code == 0
    assert used.run("sessions", "list", "--output", "jsonl").stdout == ""
    again = used.run("run", "-p", "x", "--session", "s1", "--script", used.script([{"text": "x"}]))
    assert again.code == 1
    assert "deleted" in again.stderr


def test_an_input_waits_for_the_session_to_run(used: Cli) -> None:
    sent = used.run("input", "s1", "more", "--input-id", "i9")
    assert (sent.code, sent.stderr) == (0, "")
    assert "run --session s1" in sent.stdout
    assert "was accepted before" in used.run("input", "s1", "more", "--input-id", "i9").stdout
    done = used.run("run", "--session", "s1")
    assert done.code == 0
    assert "More." in done.stdout
    items = used.run("sessions", "show", "s1", "--output", "jsonl").items
    assert sum("content" in item.get("input", {}) for item in items) == 2


def test_operations_are_listed_shown_and_their_output_read(used: Cli) -> None:
    listed = used.run("operations", "list", "s1").stdout
    assert "completed, exit 3" in listed
    operation = operation_of(used)
    shown = json.loads(used.run("operations", "show", "s1", operation).stdout)
    assert shown["bash"]["exit_code"] == 3
    assert used.run("operations", "output", "s1", operation).stdout == "one\n"
    assert used.run("operations", "output", "s1", operation, "--stderr").stdout == "two\n"
    assert used.run("operations", "output", "s1", operation, "--tail", "2").stdout == "e\n"
    ended = used.run("operations", "cancel", "s1", operation)
    assert ended.code == 1
    assert ended.stderr.count("\n") == 1
    assert used.run("operations", "list", "s1", "--unsettled").stdout == "No operation runs.\n"


async def test_a_running_operation_is_cancelled_and_its_session_goes_on(interrupted: Cli) -> None:
    operation = operation_of(interrupted)
    done = interrupted.run("operations", "cancel", "s1", operation, "--reason", "too slow")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.strip().startswith(f"operation {operation} is canceled")
    went_on = interrupted.run("run", "--session", "s1")
    assert went_on.code == 0
    assert "Done." in went_on.stdout


async def test_a_session_that_nobody_runs_is_not_called_running(interrupted: Cli) -> None:
    _, row = interrupted.run("sessions", "list").stdout.splitlines()
    assert row.split()[:2] == ["s1", "interrupted"]
    assert "interrupted" in interrupted.run("sessions", "show", "s1").stdout.splitlines()[1]


async def test_an_operation_is_given_up(interrupted: Cli) -> None:
    operation = operation_of(interrupted)
    done = interrupted.run("operations", "abandon", "s1", operation)
    assert (done.code, done.stderr) == (0, "")
    assert "outcome unknown" in done.stdout
    assert interrupted.run("run", "--session", "s1").code == 0


async def test_an_interrupted_session_is_stopped(interrupted: Cli) -> None:
    done = interrupted.run("sessions", "stop", "s1", "--reason", "no more")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == "session s1 is stopped\n"
    assert "stopped: no more" in interrupted.run("sessions", "show", "s1").stdout


async def test_an_unfinished_session_is_deleted_by_force_only(interrupted: Cli) -> None:
    refused = interrupted.run("sessions", "delete", "s1")
    assert refused.code == 1
    assert "--force" in refused.stderr
    assert interrupted.run("sessions", "delete", "s1", "--force").code == 0


async def test_looking_at_an_unfinished_session_starts_nothing(interrupted: Cli) -> None:
    before = interrupted.run("sessions", "show", "s1", "--output", "jsonl").items
    for command in (["sessions", "list"], ["sessions", "context", "s1"], ["operations", "list", "s1"], ["doctor"]):
        interrupted.run(*command)
    assert interrupted.run("sessions", "show", "s1", "--output", "jsonl").items == before
    assert interrupted.run("sessions", "stop", "s1").code == 0


def test_the_doctor_finds_what_is_sound_and_never_prints_a_key(used: Cli) -> None:
    used.extra["OPENAI_API_KEY"] = "sk-secret-of-mine"
    told = used.run("doctor", "--check-state")
    assert (told.code, told.stderr) == (0, "")
    assert "secret" not in told.stdout
    assert "key set" in told.stdout
    assert "isolation       none" in told.stdout
    assert "sound: 1 session" in told.stdout


def test_the_doctor_says_what_to_type_for_what_is_missing(cli: Cli) -> None:
    cli.extra["PATH"] = "/nonexistent"
    told = cli.run("doctor", "--workspace", "missing")
    assert told.code == 1
    for part in ("export OPENAI_API_KEY=", "apt-get install bash", "mkdir -p missing"):
        assert part in told.stdout
    assert not cli.state.exists()


def test_the_doctor_counts_skills_that_load_and_names_those_that_do_not(cli: Cli) -> None:
    for name, text in (("good", "---\nname: good\ndescription: d\n---\nx"), ("bad", "---\nname: [\n---\nx")):
        folder = cli.workspace / ".harness" / "skills" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(text)
    told = cli.run("doctor").stdout
    assert f"{cli.workspace}, 1 skill\n" in told
    assert ".harness/skills/bad/SKILL.md, line " in told


def test_the_doctor_finds_damage(used: Cli) -> None:
    with sqlite3.connect(used.state / "sessions.db") as store:
        store.execute("DELETE FROM items WHERE sequence = 2")
        store.execute("UPDATE items SET record = x'ff' WHERE sequence = 3")
    store.close()
    told = used.run("doctor", "--check-state")
    assert told.code == 1
    assert "session 's1' lacks item 2; its last is 7" in told.stdout
    assert "item 3 of session 's1'" in told.stdout
