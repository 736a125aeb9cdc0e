"""The README says nothing that is not so: its transcript, its commands, its snippets."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.cli import PROGRAM
from tests.support.demo import ROOT, run_demo

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def normalised(line: str) -> str:
    """Return a line without what differs from run to run: places, pids, times, which of the runs it was."""
    line = re.sub(r"/tmp/agent-demo-\w+", "/tmp/agent-demo", line)
    line = re.sub(r"kill -9 \d+", "kill -9 PID", line)
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


def test_every_command_that_is_named_exists() -> None:
    known = {
        "sessions": "list|show|watch|context|fork|stop|export|import|delete",
        "operations": "list|show|cancel|output|abandon",
    }
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
    for path in re.findall(r"`((?:examples|docs|proto)/[\w./]*)`", README):
        assert (ROOT / path).exists()
