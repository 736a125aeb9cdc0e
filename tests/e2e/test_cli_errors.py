"""What goes wrong is told in one line: what, with the value, and what to do; and it changes nothing."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.cli import PROGRAM, Cli, Finished, bash
from tests.support.eventually import eventually
from tests.support.prepared import small_files


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def refused(finished: Finished, code: int, *parts: str) -> None:
    """Check that a command ended with one line that holds these parts."""
    assert finished.code == code, finished.stderr
    assert finished.stderr.startswith("unreal-agent: ")
    assert finished.stderr.count("\n") == 1, finished.stderr
    assert "Traceback" not in finished.stderr
    for part in parts:
        assert part in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "stdin", "named"),
    [
        (["run"], "", "nothing to do"),
        (["run"], "{", "standard input"),
        (["run"], '{"prompt": "x", "promt": 1}', "'promt'"),
        (["run"], '{"prompt": "x", "max_turns": "many"}', "max_turns"),
        (["run"], '{"prompt": ' + "[" * 100_000, "nested too deeply"),
        (["run"], '{"prompt": "half \\ud800"}', "surrogate"),
        (["run", "-"], "", "standard input is empty"),
        (["run", "missing.json"], "", "missing.json"),
        (["run", "-p", "x", "request.json"], "", "both -p and a request file"),
        (["run", "-p", " "], "", "blank"),
        (["run", "-p", "x", "--max-turns", "0"], "", "--max-turns"),
        (["run", "-p", "x", "--tools", ","], "", "--tools"),
        (["run", "-p", "x", "--script", "s.json", "--provider", "openai"], "", "--script"),
        (["run", "-p", "x", "--script", "s.json", "--record", "r"], "", "--record"),
        (["run", "-p", "x", "--nonsense"], "", "--nonsense"),
        (["sessions", "show"], "", "SESSION"),
        (["tokens", "create", "--prefix", ""], "", "--prefix is empty"),
        (["tokens", "create", "--right", "operate"], "", "--manager"),
        (["tokens", "create", "--right", "read", "--manager", "m"], "", "--manager m"),
        (["tokens", "create", "--manager", "m", "--prefix", "p"], "", "--prefix p"),
        (["nonsense"], "", "nonsense"),
    ],
)
def test_wrong_usage_is_named_and_makes_nothing(cli: Cli, arguments: list[str], stdin: str, named: str) -> None:
    refused(cli.run(*arguments, stdin=stdin), 2, named)
    assert not cli.state.exists()


def test_bytes_that_are_no_text_are_refused(cli: Cli) -> None:
    refused(cli.run("run", stdin=b'{"prompt": "\xff"}'), 2, "UTF-8")


@pytest.mark.parametrize(
    "arguments", [["run", "-p", "a\udcff"], ["sessions", "show", "\udcff"], ["input", "s", "\udcff"]]
)
def test_an_argument_that_is_no_text_is_named(cli: Cli, arguments: list[str]) -> None:
    refused(cli.run(*arguments), 2, "not UTF-8", "udcff")
    assert not cli.state.exists()


def test_a_directory_whose_name_is_no_text_is_named(cli: Cli) -> None:
    script = cli.script([{"text": "x"}])
    cli.workspace.rename(cli.directory / "\udcff")
    cli.workspace.symlink_to("\udcff")
    refused(cli.run("run", "-p", "x", "--script", script), 1, "not UTF-8", "udcff")


def test_a_current_directory_that_is_gone_is_told_of(cli: Cli) -> None:
    script = cli.script([{"text": "x"}])
    refused(cli.run("run", "-p", "x", "--script", script, first="os.rmdir(os.getcwd())"), 1, "deleted")


def test_a_missing_key_says_what_to_set(cli: Cli) -> None:
    refused(cli.run("run", "-p", "x"), 1, "OPENAI_API_KEY")
    assert not cli.state.exists()


def test_an_unknown_provider_names_those_that_exist(cli: Cli) -> None:
    refused(cli.run("run", "-p", "x", "--provider", "nobody"), 1, "'nobody'", "ollama")


def test_a_server_without_a_model_by_default_asks_for_one(cli: Cli) -> None:
    refused(cli.run("run", "-p", "x", "--provider", "ollama"), 1, "'ollama'", "--model")


@pytest.mark.parametrize("content", [None, "{", '{"responses": [{"tekst": "x"}]}'])
def test_a_script_that_can_not_be_played_is_named(cli: Cli, content: str | None) -> None:
    path = cli.directory / "script.json"
    if content is not None:
        path.write_text(content)
    refused(cli.run("run", "-p", "x", "--script", str(path)), 1, str(path))
    assert not cli.state.exists()


def test_a_token_that_no_call_can_carry_is_told_of_and_not_shown(cli: Cli) -> None:
    listing = ("sessions", "list", "--server", "127.0.0.1:9")
    cli.extra["UNREAL_AGENT_TOKEN"] = "ua_schl\u00fcssel"
    finished = cli.run(*listing)
    refused(finished, 1, "the token holds a character")
    assert "ssel" not in finished.stderr
    # The end of a line behind it is none of its characters: files have one.
    cli.extra["UNREAL_AGENT_TOKEN"] = "ua_key\n"
    refused(cli.run(*listing), 1, "no coordinator answers")


def test_a_workspace_that_is_none_is_named(cli: Cli) -> None:
    script = cli.script([{"text": "x"}])
    (cli.directory / "file").write_text("")
    for place, word in ((cli.directory / "missing", "does not exist"), (cli.directory / "file", "not a directory")):
        refused(cli.run("run", "-p", "x", "--script", script, "--workspace", str(place)), 1, str(place), word)


def test_an_unknown_tool_is_named(cli: Cli) -> None:
    script = cli.script([{"text": "x"}])
    refused(cli.run("run", "-p", "x", "--script", script, "--tools", "Bash,Browse"), 1, "'Browse'", "ViewImage")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--session"],
        ["sessions", "show"],
        ["sessions", "watch"],
        ["sessions", "context"],
        ["sessions", "fork"],
        ["sessions", "stop"],
        ["sessions", "export"],
        ["sessions", "delete"],
        ["operations", "list"],
        ["input"],
    ],
)
def test_an_unknown_session_is_named(cli: Cli, arguments: list[str]) -> None:
    text = ["hello"] if arguments == ["input"] else []
    refused(cli.run(*arguments, "nobody", *text), 1, "'nobody'")


def test_an_unknown_operation_is_named(cli: Cli) -> None:
    cli.run("run", "-p", "x", "--session", "s1", "--script", cli.script([{"text": "x"}]))
    for command in ("show", "cancel", "abandon", "output"):
        refused(cli.run("operations", command, "s1", "nothing"), 1, "'nothing'")


def test_a_session_stays_in_its_workspace(cli: Cli) -> None:
    cli.run("run", "-p", "x", "--session", "s1", "--script", cli.script([{"text": "x"}]))
    refused(cli.run("run", "-p", "y", "--session", "s1", "--workspace", ".."), 1, "s1", str(cli.workspace))


def test_a_session_whose_script_is_gone_says_so_and_stays_as_it_is(cli: Cli) -> None:
    script = cli.script([{"text": "x"}])
    cli.run("run", "-p", "x", "--session", "s1", "--script", script)
    before = cli.run("sessions", "show", "s1", "--output", "jsonl").items
    Path(script).unlink()
    refused(cli.run("run", "-p", "y", "--session", "s1"), 1, script)
    assert cli.run("sessions", "show", "s1", "--output", "jsonl").items == before


def test_a_session_of_a_later_release_is_left_alone(cli: Cli) -> None:
    cli.run("run", "-p", "x", "--session", "s1", "--script", cli.script([{"text": "x"}, {"text": "y"}]))
    with sqlite3.connect(cli.state / "sessions.db") as store:
        store.execute("UPDATE sessions SET format_version = 99")
    store.close()
    before = _stored(cli)
    refused(cli.run("run", "-p", "y", "--session", "s1"), 1, "99")
    assert _stored(cli) == before


def _stored(cli: Cli) -> list[str]:
    with contextlib.closing(sqlite3.connect(cli.state / "sessions.db")) as store:
        return list(store.iterdump())


def test_a_store_of_a_later_release_is_left_alone(cli: Cli) -> None:
    cli.run("run", "-p", "x", "--session", "s1", "--script", cli.script([{"text": "x"}]))
    with sqlite3.connect(cli.state / "sessions.db") as store:
        store.execute("PRAGMA user_version = 99")
    store.close()
    refused(cli.run("run", "-p", "y", "--session", "s1"), 1, "99")
    told = cli.run("doctor")
    assert told.code == 1
    assert "99" in told.stdout


def test_a_damaged_store_is_told_of(cli: Cli) -> None:
    cli.state.mkdir()
    (cli.state / "sessions.db").write_bytes(b"no database" * 1000)
    refused(cli.run("sessions", "list"), 1, "sessions.db")
    assert cli.run("doctor", "--check-state").code == 1


def test_a_state_directory_that_is_deleted_meanwhile_is_told_of(cli: Cli) -> None:
    script = cli.script([{"tool_calls": [bash(f"rm -r {cli.state}; echo gone")]}, {"text": "Done."}])
    done = cli.run("run", "-p", "x", "--session", "s1", "--script", script)
    refused(done, 1, "sessions.db", "deleted")
    assert "Done." not in done.stdout


def test_a_store_that_is_spoilt_meanwhile_is_told_of(cli: Cli) -> None:
    spoil = f"sleep 0.2; for f in {cli.state}/sessions.db*; do head -c 200000 /dev/urandom > $f; done"
    script = cli.script([{"tool_calls": [bash(spoil)]}, {"text": "Done."}])
    refused(cli.run("run", "-p", "x", "--session", "s1", "--script", script), 1, "sessions.db")


def test_a_damaged_journal_is_named_with_what_to_do(cli: Cli) -> None:
    script = cli.script([{"tool_calls": [bash("true")]}, {"text": "Done."}, {"text": "More."}])
    cli.run("run", "-p", "x", "--session", "s1", "--script", script)
    journal = cli.state / "operations" / "journal.sqlite3"
    journal.write_bytes(b"no database" * 1000)
    refused(cli.run("run", "-p", "y", "--session", "s1"), 1, str(journal), "Move it away")
    journal.unlink()
    assert "More." in cli.run("run", "-p", "y", "--session", "s1").stdout


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_state_directory_that_is_none_is_named(cli: Cli, place: str) -> None:
    (cli.directory / "file").write_text("")
    path = cli.directory / place
    refused(cli.run("sessions", "list", "--state-dir", str(path)), 1, str(path), "--state-dir")


OBEY_PERMISSIONS = """
if os.geteuid() == 0:
    drop_from_bounding_set, dac_override = 24, 1
    assert ctypes.CDLL(None).prctl(drop_from_bounding_set, dac_override, 0, 0, 0) == 0
"""
"""Gives up the superuser's right to write anywhere; for everybody else there is nothing to give up."""


def test_a_state_directory_that_can_not_be_written_is_named(cli: Cli, tmp_path: Path) -> None:
    place = tmp_path / "locked"
    place.mkdir(mode=0o500)
    done = cli.run("sessions", "list", "--state-dir", str(place / "state"), first=OBEY_PERMISSIONS)
    refused(done, 1, str(place / "state"), "permission denied", "--state-dir")
    told = cli.run("doctor", "--state-dir", str(place / "state"), first=OBEY_PERMISSIONS)
    assert told.code == 1
    assert f"{place} can't be written" in told.stdout


async def test_a_state_directory_that_is_in_use_names_who_uses_it(cli: Cli) -> None:
    script = cli.script([{"tool_calls": [bash("touch begun; sleep 30")]}])
    with cli.start("run", "-p", "x", "--session", "s1", "--script", script) as agent:
        try:
            await eventually(lambda: (cli.workspace / "begun").exists(), within_s=10)
            refused(cli.run("run", "--session", "s1"), 1, f"pid {agent.pid}", "--state-dir", "serve all")
            told = cli.run("doctor").stdout
            assert f"pid {agent.pid}" in told
        finally:
            agent.kill()
    assert cli.run("sessions", "stop", "s1").code == 0


@pytest.mark.parametrize("size_bytes", [1, 10_000, 150_000, 200_000, 250_000, 300_000, 400_000])
def test_a_full_disk_is_one_line_and_loses_nothing(cli: Cli, size_bytes: int) -> None:
    script = cli.script([{"text": "I look.", "tool_calls": [bash("seq 9999")]}, {"text": "Done."}])
    arguments = ("run", "-p", "x", "--session", "s1", "--script", script, "--input-id", "i1")
    begin_s = time.monotonic()

    refused(cli.run(*arguments, first=small_files(size_bytes)), 1)
    assert time.monotonic() - begin_s < 8
    done = cli.run(*arguments)
    assert (done.code, done.stderr) == (0, "")
    items = cli.run("sessions", "show", "s1", "--output", "jsonl").items
    assert sum("input" in item and "content" in item["input"] for item in items) == 1
    assert cli.run("doctor", "--check-state").stdout.count("sound") == 2


def test_a_full_output_is_one_line(cli: Cli) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PROGRAM, "doctor"], stdout=full, stderr=subprocess.PIPE, env=cli.environment, cwd=cli.workspace
        )
    assert done.returncode == 1
    assert done.stderr.decode().count("\n") == 1
    assert b"no space left on device" in done.stderr


def test_an_import_that_is_none_names_the_line(cli: Cli) -> None:
    path = cli.directory / "export.jsonl"
    path.write_text('{"header": {}}\n{"nonsense": 1}\n')
    refused(cli.run("sessions", "import", str(path)), 1, f"{path}, line 2")
    assert cli.run("sessions", "list", "--output", "jsonl").stdout == ""


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_closed_stream_hinders_nothing_and_gives_its_number_to_no_file(cli: Cli, descriptor: int) -> None:
    script = cli.script([{"tool_calls": [bash("ls -l /proc/$PPID/fd; sleep 0.2")]}, {"text": "Done."}])
    done = cli.run("run", "-p", "x", "--session", "s1", "--script", script, first=f"os.close({descriptor})")
    assert (done.code, done.stderr) == (0, "")
    assert ("Done." in done.stdout) == (descriptor != 1)
    assert cli.run("doctor", "--check-state").stdout.count("sound") == 2


@pytest.mark.parametrize("group", [[], ["sessions"], ["operations"]])
def test_without_a_command_the_help_is_shown_as_it_is(cli: Cli, group: list[str]) -> None:
    done = cli.run(*group)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == cli.run(*group, "--help").stdout


def test_help_of_every_command_says_what_it_does(cli: Cli) -> None:
    of_sessions = ("list", "show", "watch", "context", "storage", "fork", "stop", "export", "import", "delete")
    of_operations = ("list", "show", "cancel", "output", "abandon")
    pages = ["run", "input", "doctor", "sessions", "operations", "serve", "tokens"]
    pages += [f"sessions {name}" for name in of_sessions] + [f"operations {name}" for name in of_operations]
    pages += [f"tokens {name}" for name in ("create", "list", "revoke")]
    for page in pages:
        told = cli.run(*page.split(), "--help")
        assert (told.code, told.stderr) == (0, "")
        assert told.stdout.startswith(f"Usage: unreal-agent {page}")


def test_help_answers_at_once(cli: Cli) -> None:
    def elapsed_s() -> float:
        begin_s = time.monotonic()
        cli.run("--help")
        return time.monotonic() - begin_s

    # The best of a few: a busy machine is no fault of the program.
    assert min(elapsed_s() for _ in range(5)) <= 0.25


def test_the_module_is_the_same_program(cli: Cli) -> None:
    command = [str(PROGRAM.with_name("python")), "-m", "clients.cli", "--version"]
    module = subprocess.run(command, capture_output=True, text=True, check=True)
    assert module.stdout == cli.run("--version").stdout
    assert module.stdout.startswith("unreal-agent ")
