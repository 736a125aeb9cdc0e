"""The README says nothing that is not so: its transcript, its commands, its snippets."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cli import PROGRAM, bash
from tests.support.demo import ROOT, run_demo

README = (ROOT / "README.md").read_text(encoding="utf-8")


SERVED_AT = "127.0.0.1:7777"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def normalised(line: str) -> str:
    """Return a line without what differs from run to run: places, pids, times, which of the runs it was."""
    line = re.sub(r"/tmp/agent-demo-\w+", "/tmp/agent-demo", line)
    line = re.sub(r"(kill -9 |started again: )\d+ \d+", r"\1PIDS", line)
    line = re.sub(r"\b(session store|operation manager|coordinator) \d+", r"\1 PID", line)
    line = re.sub(r"\brun \d of 10", "run N of 10", line)
    line = re.sub(r"\s+(exit \d+)? ?·? ?\d+(\.\d+)? s$", r"  \1", line)
    return line.rstrip()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_transcript_is_what_the_demo_prints() -> None:
    found = re.search(r"^<!-- transcript: examples/demo.py -->\n```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    printed = [normalised(line) for line in run_demo().plain.splitlines()]
    position = 0
    for line in found[1].splitlines():
        # Shortened, but in order and with nothing added. Calls that run at once end in any order.
        wanted = normalised(line)
        is_call = line.startswith("  ✓") or line.startswith("  ✗") or line.startswith("    ")
        begin = max(0, position - 30) if is_call else position
        assert wanted in printed[begin:], f"the demo does not print: {line}"
        position = max(position, printed.index(wanted, begin))


@pytest.mark.parametrize("name", ["own_tool", "own_remote_job", "own_provider"])
def test_a_snippet_is_part_of_a_program_that_runs(name: str) -> None:
    program = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    snippet = re.search(r"# \[snippet\]\n(.*?)# \[/snippet\]", program, re.DOTALL)
    assert snippet is not None
    assert snippet[1].strip("\n") + "\n" in blocks("python")
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"], cwd=ROOT, capture_output=True, text=True, timeout=25, check=True
    )
    words = {
        "own_tool": "One fails: the median of an even number of values.",
        "own_remote_job": '"app: 0 errors"\nIt builds.',
        "own_provider": "IS ANYBODY THERE?",
    }
    assert words[name] in done.stdout
    assert done.stderr == ""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], subprocess.CompletedProcess[str]]]:
    """Run `serve all` as the README does, at a free port, and return what runs further lines of it."""
    directory = tmp_path_factory.mktemp("served")
    script = {"responses": [{"tool_calls": [bash("echo one")]}, {"expect": "one", "text": "It was the median."}]}
    (directory / "script.json").write_text(json.dumps(script))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "LANG": "C.UTF-8", "UNREAL_AGENT_TOKEN": "x"}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", line.replace(SERVED_AT, address)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30)

    (line,) = re.findall(r"^    OPENAI_API_KEY=… (.*serve all.*)$", README, re.MULTILINE)
    words = shlex.split(line.replace(SERVED_AT, address))
    with subprocess.Popen(
        [*words, "--script", str(directory / "script.json")], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert any(f" listens on {address}".encode() in told for told in iter(server.stdout.readline, b""))
        yield run
        server.terminate()
        server.communicate(timeout=30)


Run = Callable[[str], "subprocess.CompletedProcess[str]"]


def test_a_run_at_a_server_does_the_job(served: Run) -> None:
    (line,) = re.findall(rf"^    (\.venv/bin/unreal-agent run --server {SERVED_AT} .*)$", README, re.MULTILINE)
    done = served(line)
    assert (done.returncode, done.stderr) == (0, "")
    assert "✓ $ echo one" in done.stdout
    assert "It was the median." in done.stdout
    found = served(".venv/bin/unreal-agent sessions list")
    assert found.returncode == 0, found.stderr
    assert re.search(r"session (\S+)$", done.stdout, re.MULTILINE)[1] in found.stdout  # type: ignore[index]


def test_the_client_in_python_is_a_program_that_runs(served: Run) -> None:
    program = (ROOT / "examples" / "client.py").read_text(encoding="utf-8")
    snippet = re.search(r"# \[client\]\n(.*?)# \[/client\]", program, re.DOTALL)
    assert snippet is not None
    assert snippet[1].strip("\n") + "\n" in blocks("python")
    done = served(f"{sys.executable} examples/client.py {SERVED_AT} hi")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("It was the median.\n")


@pytest.mark.parametrize("line", re.findall(r"^    (.*/buf curl .*)$", README, re.MULTILINE))
def test_services_are_called_by_hand(served: Run, line: str) -> None:
    done = served(line)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (
        answer.get("status") == "SERVING" if line.endswith("/Check") else answer.keys() <= {"sessions", "nextPageToken"}
    )


def test_the_client_in_node_is_called_as_its_own_usage_says() -> None:
    usage = "node ask.js ADDRESS WORKSPACE PROMPT"  # tests/integration/test_node_client.py runs it
    assert usage in (ROOT / "clients" / "node" / "ask.js").read_text()
    (line,) = re.findall(r"^    (node ask\.js .*)$", README, re.MULTILINE)
    assert len(shlex.split(line)) == len(usage.split())


def test_what_others_can_reach_is_refused(tmp_path: Path) -> None:
    """The rest of that chapter: tests/integration/test_tokens.py and test_secured_services.py."""
    flags = ["--listen", "0.0.0.0:0", "--state-dir", str(tmp_path)]
    command = [str(PROGRAM), "serve", "session-store", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "allow it in so many words with --insecure" in done.stderr


def test_certificates_for_development_are_made_and_renewed(tmp_path: Path) -> None:
    for _ in range(2):
        made = subprocess.run(
            [sys.executable, "-m", "deploy.certificates", str(tmp_path / "certs")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert made.returncode == 0, made.stderr
    names = {path.name for path in (tmp_path / "certs").iterdir()}
    assert {"ca.pem", "coordinator.pem", "coordinator.key", "client.pem"} <= names
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "certs").iterdir())


def test_every_command_that_is_named_exists() -> None:
    known = {
        "sessions": "list|show|watch|context|fork|stop|export|import|storage|delete",
        "operations": "list|show|cancel|output|abandon",
    }
    served = subprocess.run([str(PROGRAM), "serve", "--help"], capture_output=True, text=True, check=True).stdout
    for name in re.findall(r"`serve ([\w-]+)`", README):
        assert re.search(rf"^  {name} ", served.partition("Commands:")[2], re.MULTILINE)
    for group, commands in known.items():
        assert f"{group} {commands}" in README
        told = subprocess.run([str(PROGRAM), group, "--help"], capture_output=True, text=True, check=True).stdout
        listed = re.findall(r"^  (\w+) ", told.partition("Commands:")[2], re.MULTILINE)
        assert sorted(listed) == sorted(commands.split("|"))
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("line", re.findall(r"^    (\w+=.*unreal-agent run -p .*)$", README, re.MULTILINE))
def test_a_way_to_name_a_provider_is_understood(line: str) -> None:
    """What the line sets is enough for the doctor: a provider, an address, a model."""
    variables = dict(re.findall(r"(\w+)=(\S+)", line.partition(".venv/bin/")[0]))
    told = subprocess.run(
        [str(PROGRAM), "doctor"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "HOME": "/tmp", "LANG": "C.UTF-8"}
        | {k: v.replace("…", "x") for k, v in variables.items()},
    )
    provider = variables.get("UNREAL_AGENT_LLM_PROVIDER", "openai")
    assert re.search(rf"✓ model provider  {provider}, \S+, http", told.stdout), told.stdout


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists()
    for path in re.findall(r"`((?:examples|docs|proto|clients)/[\w./]*)`", README):
        assert (ROOT / path).exists()
