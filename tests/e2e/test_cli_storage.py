"""The command line tells what sessions take up, what a deletion leaves, and what to do about damage."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.cli import Cli, bash


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Return a command line with a session that ran a command, and a fork of it."""
    cli = Cli(tmp_path)
    script = cli.script([{"text": "hm", "tool_calls": [bash("seq 1 3000")]}, {"text": "done"}])
    for session in ("s1", "s2"):
        done = cli.run("run", "--provider", "scripted", "--script", script, "--session", session, "-p", "go")
        assert done.code == 0, done.stderr
    return cli


def damage(cli: Cli, statement: str) -> None:
    with closing(sqlite3.connect(cli.state / "sessions.db")) as store, store:
        store.execute(statement)


def test_storage_of_a_session_is_told_by_kind(cli: Cli) -> None:
    assert cli.run("sessions", "fork", "s1", "--as", "f").code == 0
    told = cli.run("sessions", "storage", "s1")
    assert (told.code, told.stderr) == (0, "")
    for part in (
        "items       model response",
        "operations  bash",
        "stay for 1 fork when",
        "output files  2 files, 13.9 kB",
    ):
        assert part in told.stdout, told.stdout
    inherited = cli.run("sessions", "storage", "f").stdout
    assert "stored with the sessions that it was forked from" in inherited
    (record,) = cli.run("sessions", "storage", "s1", "--output", "jsonl").items
    assert record["forks"] == "1"


def test_storage_of_all_sessions_is_a_table(cli: Cli) -> None:
    lines = cli.run("sessions", "storage").stdout.splitlines()
    assert lines[0].split("  ")[0] == "SESSION"
    assert {line.split()[0] for line in lines[1:3]} == {"s1", "s2"}
    assert lines[-1].startswith("2 sessions, ")


def test_deletion_says_what_stays(cli: Cli) -> None:
    assert cli.run("sessions", "fork", "s1", "--as", "f").code == 0
    told = cli.run("sessions", "delete", "s1").stdout
    assert "session s1 is deleted" in told
    assert "1 fork of it still shows " in told
    assert "2 files with output of its commands (13.9 kB) go within 7 days" in told
    assert "7 days at most" in cli.run("sessions", "delete", "--help").stdout
    again = cli.run("run", "--session", "s1", "--provider", "scripted", "-p", "go")
    assert (again.code, "never used again" in again.stderr) == (1, True)


@pytest.mark.timeout(90)
def test_damaged_session_is_refused_named_and_deleted_by_force(cli: Cli) -> None:
    """The other session goes on all the while."""
    damage(cli, "DELETE FROM items WHERE session_key = 1 AND sequence > 5")
    for command in (["show", "s1"], ["context", "s1"], ["export", "s1"], ["delete", "s1"]):
        told = cli.run("sessions", *command)
        assert told.code == 1
        assert "item 6 of session 's1' is missing" in told.stderr
        assert len(told.stderr.splitlines()) == 1
    told = cli.run("run", "--session", "s1", "--provider", "scripted", "-p", "go")
    assert (told.code, "doctor --check-state" in told.stderr) == (1, True)
    doctor = cli.run("doctor", "--check-state")
    assert doctor.code == 1
    assert "session 's1' lacks items 6 to 7; its last is 7" in doctor.stdout
    assert "sessions delete ID --force" in doctor.stdout
    counted = cli.run("sessions", "storage")
    assert (counted.code, "s2" in counted.stdout, "not counted: item" in counted.stderr) == (1, True, True)
    assert cli.run("sessions", "show", "s2").code == 0
    assert cli.run("sessions", "delete", "s1", "--force").code == 0
    assert "sound: 1 session, 7 items" in cli.run("doctor", "--check-state").stdout


def test_doctor_tells_what_the_directory_takes_up(cli: Cli) -> None:
    told = cli.run("doctor", "--check-state").stdout
    assert "takes up        sessions " in told
    assert "output of commands" in told
