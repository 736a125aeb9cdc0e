"""A program in another language, with nothing of ours but the schemas, does the main job (clients/node)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.stack import COORDINATOR, Stack, three_services
from tests.support.world import Script, bash

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "clients" / "node"
INSTALLED = ROOT / ".venv" / "node"

SCRIPT: Script = [
    {"text": "I'll look.", "tool_calls": [bash("echo 6 times 7 is $((6 * 7))")]},
    {"expect": "6 times 7 is 42", "text": "It is 42."},
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    code: int | None
    output: str
    errors: str


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return the program beside its dependencies, as `npm ci` laid them out."""
    assert (INSTALLED / ".installed").exists(), "install node and npm: `make test` then gets what clients/node needs"
    directory = tmp_path / "node"
    directory.mkdir()
    for name in ("ask.js", "package.json"):
        shutil.copy(SOURCE / name, directory)
    (directory / "node_modules").symlink_to(INSTALLED / "node_modules")
    return directory / "ask.js"


async def start(program: Path, address: str, workspace: Path | str, prompt: str) -> asyncio.subprocess.Process:
    environment = {
        "PATH": os.environ["PATH"],
        "UNREAL_AGENT_PROTO": str(ROOT / "proto"),
        "UNREAL_AGENT_LLM_PROVIDER": "scripted",
        "UNREAL_AGENT_LLM_MODEL": "m1",
        # A proxy in the environment is for the way to model providers.
        "http_proxy": "http://127.0.0.1:9",
    }
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *("node", program, address, str(workspace), prompt), stdout=pipe, stderr=pipe, env=environment
    )


async def end(process: asyncio.subprocess.Process) -> Ended:
    output, errors = await process.communicate()
    return Ended(code=process.returncode, output=output.decode(), errors=errors.decode())


async def ask(program: Path, stack: Stack, prompt: str = "How much is 6 times 7?") -> Ended:
    return await end(await start(program, stack.address, stack.workspace, prompt))


def test_the_lock_holds_hashes_and_no_hosts() -> None:
    lock = json.loads((SOURCE / "package-lock.json").read_text())
    packages = [package for path, package in lock["packages"].items() if path]
    assert packages
    assert all(package["integrity"].startswith("sha512-") and "resolved" not in package for package in packages)


@pytest.mark.slow
async def test_the_answer_is_printed(program: Path, tmp_path: Path) -> None:
    async with three_services(tmp_path, SCRIPT) as stack:
        assert await ask(program, stack) == Ended(code=0, output="It is 42.\n", errors="")


@pytest.mark.slow
async def test_a_coordinator_that_dies_in_the_middle_is_waited_for(program: Path, tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    command = f"touch {tmp_path}/began; until [ -e {go_on} ]; do sleep 0.05; done; echo 6 times 7 is 42"
    async with three_services(tmp_path, [{"tool_calls": [bash(command)]}, SCRIPT[1]]) as stack:
        process = await start(program, stack.address, stack.workspace, "How much is 6 times 7?")
        await eventually((tmp_path / "began").exists, within_s=10.0)
        await stack.kill(COORDINATOR)
        await stack.start(COORDINATOR)
        go_on.touch()
        assert await end(process) == Ended(code=0, output="It is 42.\n", errors="")


@pytest.mark.slow
async def test_a_failure_is_one_line_and_exit_code_1(program: Path, tmp_path: Path) -> None:
    async with three_services(tmp_path, [{"error": {"class": "authentication"}}]) as stack:
        failed = await ask(program, stack)
        refused = await end(await start(program, stack.address, "relative/workspace", "hi"))
    assert (failed.code, failed.output) == (1, "")
    assert "SESSION_STATE_FAILED" in failed.errors
    assert (refused.code, refused.output) == (1, "")
    assert [len(one.errors.splitlines()) for one in (failed, refused)] == [1, 1]
