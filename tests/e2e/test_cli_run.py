"""`unreal-agent run` without a terminal: jobs, redelivery, resuming, and what programs read."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.cli import Cli, Finished, bash
from tests.support.eventually import eventually


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def kinds(finished: Finished) -> list[str]:
    known = ("input", "turn", "model_response", "tool_call_status", "turn_failure")
    return [next(name for name in known if name in item) for item in finished.items]


def test_a_job_is_done_and_told_in_readable_lines(cli: Cli) -> None:
    script = cli.script(
        [{"text": "I look.", "tool_calls": [bash("echo one; exit 3")]}, {"expect": "one", "text": "Done."}]
    )
    done = cli.run("run", "-p", "Look around.", "--script", script, "--session", "s1")
    assert (done.code, done.stderr) == (0, "")
    lines = [line.strip() for line in done.stdout.splitlines() if line]
    assert lines[0] == f"session s1 · scripted · {cli.workspace}"
    assert lines[1:3] == ["› Look around.", "I look."]
    assert lines[3].split("  ")[0] == "✗ $ echo one; exit 3"
    assert "exit 3" in lines[3]
    assert lines[4:6] == ["│ one", "Done."]
    assert lines[6].startswith("done · 2 turns · ")
    assert lines[7].endswith("run --session s1 -p '…'")
    assert "\x1b" not in done.stdout


def test_programs_read_one_json_line_per_item_and_nothing_else(cli: Cli) -> None:
    script = cli.script([{"text": "I look.", "tool_calls": [bash("echo one")]}, {"text": "Done."}])
    done = cli.run("run", "-p", "x", "--script", script, "--session", "s1", "--output", "jsonl")
    assert (done.code, done.stderr) == (0, "")
    assert [item["sequence"] for item in done.items] == [str(n) for n in range(1, len(done.items) + 1)]
    assert kinds(done) == [
        "input",
        "turn",
        "model_response",
        "tool_call_status",
        "tool_call_status",
        "turn",
        "model_response",
    ]
    assert cli.run("sessions", "show", "s1", "--output", "jsonl").items == done.items


@pytest.mark.parametrize("way", ["option", "file", "standard input", "dash"])
def test_a_request_comes_in_one_of_three_ways(cli: Cli, way: str) -> None:
    script = cli.script([{"text": "Hello."}])
    request = json.dumps({"prompt": "Say hello.", "system_prompt": "Be brief.", "max_turns": 2})
    (cli.workspace / "request.json").write_text(request)
    arguments = {"option": ["-p", "Say hello."], "file": ["request.json"], "dash": ["-"]}.get(way, [])
    stdin = request if way in ("standard input", "dash") else ""
    done = cli.run("run", *arguments, "--script", script, "--output", "jsonl", stdin=stdin)
    assert (done.code, done.stderr) == (0, "")
    assert done.items[0]["input"]["content"]["parts"] == [{"text": {"text": "Say hello."}}]


def test_messages_with_ids_are_submitted_in_order(cli: Cli) -> None:
    messages = [{"content": "one", "message_id": "m1"}, {"content": "two", "message_id": "m2"}]
    script = cli.script([{"expect": "two", "text": "Both."}])
    done = cli.run("run", "--script", script, "--output", "jsonl", stdin=json.dumps({"messages": messages}))
    inputs = [item["input"]["input_id"] for item in done.items if "input" in item]
    assert (done.code, inputs) == (0, ["m1", "m2"])


def test_an_input_that_is_sent_again_is_done_once_and_shows_the_same(cli: Cli) -> None:
    script = cli.script([{"text": "First."}, {"text": "Second."}])
    again = ("run", "-p", "x", "--session", "s1", "--script", script, "--input-id", "i1")
    first = cli.run(*again, "--output", "jsonl")
    second = cli.run(*again, "--output", "jsonl")
    assert (first.code, second.code) == (0, 0)
    assert second.items == first.items
    told = cli.run(*again)
    assert "input i1 was accepted before (item 1): no second turn" in told.stdout
    assert "First." in told.stdout


def test_an_input_id_with_other_content_is_a_conflict(cli: Cli) -> None:
    script = cli.script([{"text": "First."}])
    cli.run("run", "-p", "x", "--session", "s1", "--script", script, "--input-id", "i1")
    refused = cli.run("run", "-p", "y", "--session", "s1", "--input-id", "i1")
    assert refused.code == 1
    assert refused.stderr.count("\n") == 1
    assert "'i1'" in refused.stderr
    assert "--input-id" in refused.stderr


def test_an_input_that_no_session_takes_makes_none(cli: Cli) -> None:
    script = cli.script([{"text": "First."}])
    request = '{"messages": [{"content": "good"}, {"content": "x", "message_id": "two\\nlines"}]}'
    refused = cli.run("run", "--session", "s1", "--script", script, stdin=request)
    assert (refused.code, refused.stderr.count("\n")) == (1, 1)
    assert "input_id" in refused.stderr
    assert "No sessions yet" in cli.run("sessions", "list").stdout


def test_a_session_goes_on_with_a_further_prompt_and_remembers_its_script(cli: Cli) -> None:
    script = cli.script([{"text": "First."}, {"expect": "more", "text": "Second."}])
    cli.run("run", "-p", "x", "--session", "s1", "--script", script)
    done = cli.run("run", "-p", "more", "--session", "s1")
    assert done.code == 0
    assert "resuming session s1" in done.stdout
    assert "Second." in done.stdout


def test_nothing_unfinished_is_said_and_does_nothing(cli: Cli) -> None:
    cli.run("run", "-p", "x", "--session", "s1", "--script", cli.script([{"text": "First."}]))
    before = cli.run("sessions", "show", "s1", "--output", "jsonl").items
    done = cli.run("run", "--session", "s1")
    assert done.code == 0
    assert "nothing is unfinished" in done.stdout
    assert cli.run("sessions", "show", "s1", "--output", "jsonl").items == before


def test_a_failed_turn_is_tried_again(cli: Cli) -> None:
    script = cli.script([{"error": {"class": "authentication"}}, {"text": "Now it works."}])
    failed = cli.run("run", "-p", "x", "--session", "s1", "--script", script)
    assert failed.code == 1
    assert "run --session s1" in failed.stderr
    assert failed.stderr.count("\n") == 1
    done = cli.run("run", "--session", "s1")
    assert done.code == 0
    assert "Now it works." in done.stdout


def test_turns_are_bounded_for_one_run(cli: Cli) -> None:
    calls = {"tool_calls": [bash("true")]}
    script = cli.script([calls, calls, calls, {"text": "Done."}])
    first = cli.run("run", "-p", "x", "--session", "s1", "--script", script, "--max-turns", "2")
    assert first.code == 1
    assert "stopped" in first.stderr
    # Under the same bound it would stop again at once: what to type raises it.
    assert "run --session s1 --max-turns N" in first.stderr.splitlines()[-1]
    assert "run --session s1 --max-turns N" in first.stdout.splitlines()[-1]
    second = cli.run("run", "--session", "s1", "--max-turns", "5")
    assert (second.code, second.stderr) == (0, "")
    assert "Done." in second.stdout


def test_tools_that_are_not_offered_can_not_be_used(cli: Cli) -> None:
    script = cli.script([{"tool_calls": [bash("echo x > made")]}, {"expect": "no tool named", "text": "I see."}])
    done = cli.run("run", "-p", "x", "--script", script, "--tools", "ViewImage")
    assert done.code == 0
    assert "refused" in done.stdout
    assert not (cli.workspace / "made").exists()


def test_arguments_nested_however_deeply_are_refused_and_shown(cli: Cli) -> None:
    deep = {"name": "Bash", "arguments": '{"command": ' + "[" * 100_000 + "]" * 100_000 + "}"}
    done = cli.run("run", "-p", "x", "--script", cli.script([{"tool_calls": [deep]}, {"text": "Done."}]))
    assert (done.code, done.stderr) == (0, "")
    assert "nested" in done.stdout
    assert "Done." in done.stdout


async def test_a_killed_agent_goes_on_and_the_command_ran_once(cli: Cli) -> None:
    log = cli.workspace / "log"
    command = "echo started >> log; while [ ! -e go ]; do sleep 0.05; done; echo ended >> log; echo result"
    script = cli.script([{"tool_calls": [bash(command)]}, {"expect": "result", "text": "Done."}])
    with cli.start("run", "-p", "x", "--session", "s1", "--script", script) as agent:
        await eventually(lambda: log.exists() and "started" in log.read_text(), within_s=10)
        agent.send_signal(signal.SIGKILL)
    (cli.workspace / "go").touch()
    await eventually(lambda: "ended" in log.read_text(), within_s=10)
    done = cli.run("run", "--session", "s1")
    assert (done.code, done.stderr) == (0, "")
    assert "Done." in done.stdout
    assert log.read_text() == "started\nended\n"


async def test_an_agent_that_is_told_to_end_leaves_at_once_and_can_be_resumed(cli: Cli) -> None:
    log = cli.workspace / "log"
    script = cli.script([{"tool_calls": [bash("echo started >> log; sleep 2; echo result")]}, {"text": "Done."}])
    with cli.start("run", "-p", "x", "--session", "s1", "--script", script) as agent:
        await eventually(log.exists, within_s=10)
        agent.send_signal(signal.SIGTERM)
        _, stderr = agent.communicate(timeout=2)
    assert agent.returncode == 130
    assert b"run --session s1" in stderr
    done = cli.run("run", "--session", "s1")
    assert done.code == 0
    assert log.read_text() == "started\n"


async def test_an_interrupt_stops_the_command_and_the_resume_goes_on(cli: Cli) -> None:
    log = cli.workspace / "log"
    script = cli.script(
        [
            {"tool_calls": [bash("echo started >> log; sleep 30; echo late >> log")]},
            {"expect": "Go on", "text": "Done."},
        ]
    )
    with cli.start("run", "-p", "x", "--session", "s1", "--script", script) as agent:
        await eventually(log.exists, within_s=10)
        agent.send_signal(signal.SIGINT)
        stdout, stderr = agent.communicate(timeout=15)
    assert agent.returncode == 130
    assert stderr.decode().count("\n") == 1
    assert "run --session s1" in stderr.decode()
    assert "cancelled" in stdout.decode()
    done = cli.run("run", "--session", "s1")
    assert (done.code, done.stderr) == (0, "")
    assert "Done." in done.stdout
    assert log.read_text() == "started\n"


def test_a_stopped_session_with_nothing_unfinished_asks_for_a_prompt(cli: Cli) -> None:
    script = cli.script([{"text": "Done."}, {"text": "More."}])
    assert cli.run("run", "-p", "x", "--session", "s1", "--script", script).code == 0
    assert cli.run("sessions", "stop", "s1").code == 0
    told = cli.run("run", "--session", "s1")
    assert "nothing is unfinished" in told.stdout
    assert (told.code, "run --session s1 -p '…'" in told.stderr) == (1, True)
    assert "More." in cli.run("run", "--session", "s1", "-p", "y").stdout


def test_an_output_that_is_closed_ends_the_run_and_loses_nothing(cli: Cli) -> None:
    script = cli.script([{"text": "I look.", "tool_calls": [bash("true")]}, {"text": "Done."}])
    with cli.start("run", "-p", "x", "--session", "s1", "--script", script, "--output", "jsonl") as agent:
        assert agent.stdout is not None
        assert agent.stderr is not None
        agent.stdout.close()
        stderr = agent.stderr.read().decode()
    assert agent.returncode == 1
    assert stderr.startswith("unreal-agent: the output was closed")
    assert stderr.count("\n") == 1
    assert cli.run("run", "--session", "s1").code == 0
