"""SIGKILL of the whole process at any moment, then the same command again: the session ends as if undisturbed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from harness.session_store.sqlite import SqliteSessionStore
from tests.support.invariants import call_ids, check_history
from tests.support.world import bash, result_text
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

COUNTED = "echo $UNREAL_AGENT_OPERATION >> effects"
COUNTER = "for i in $(seq 1 40); do echo line $i; sleep 0.02; done"
SCRIPT = [
    {
        "text": "three at once",
        "tool_calls": [bash(f"{COUNTED}; {COUNTER}"), bash(f"{COUNTED}; echo quick"), bash(f"{COUNTED}; sleep 0.3")],
    },
    {"text": "one more", "delay_seconds": 0.1, "tool_calls": [bash(f"{COUNTED}; {COUNTER}")]},
    {"text": "one more", "tool_calls": [bash(f"{COUNTED}; echo last"), {"name": "Nope", "arguments": {}}]},
    {"text": "all is done", "delay_seconds": 0.1},
    {"text": "all is done"},
    {"text": "all is done"},
]
RUN_LIMIT_S = 25


class Agent:
    """An agent in a process of its own, started as a person starts it."""

    def __init__(self, directory: Path) -> None:
        self.workspace = directory / "workspace"
        self.workspace.mkdir()
        self.state_dir = directory / "state"
        self.script = directory / "script.json"
        self.script.write_text(json.dumps({"responses": SCRIPT}))

    async def run(self, *arguments: str, kill_after_s: float | None = None) -> int:
        """Run `unreal-agent run` to its end, or kill it after a while; return its exit code."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "clients.cli",
            "run",
            "--provider=scripted",
            f"--script={self.script}",
            f"--workspace={self.workspace}",
            f"--state-dir={self.state_dir}",
            "--session=s1",
            "--output=jsonl",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(kill_after_s or RUN_LIMIT_S):
                _, errors = await process.communicate()
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
            _, errors = await process.communicate()
            assert kill_after_s is not None, f"the run does not end: {errors.decode()}"
            return -signal.SIGKILL
        assert process.returncode is not None
        assert process.returncode == 0, errors.decode()
        return process.returncode

    async def history(self) -> tuple[list[item_pb2.Item], list[operation_pb2.Operation]]:
        """Return the recorded session."""
        async with SqliteSessionStore.open(self.state_dir / "sessions.db") as store:
            items = await store.list_items(store_pb2.ListItemsRequest(session_id="s1", page_size=1000))
            operations = await store.list_operations(store_pb2.ListOperationsRequest(session_id="s1", page_size=1000))
        return list(items.items), list(operations.operations)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(4))
async def test_killed_at_random_moments_the_session_ends_as_if_undisturbed(tmp_path: Path, seed: int) -> None:
    moments = random.Random(seed)
    agent = Agent(tmp_path)
    kills = 0
    for _ in range(6):
        arguments = ["-p", "do it", "--input-id=task"]
        if await agent.run(*arguments, kill_after_s=moments.uniform(0.4, 2.2)) == 0:
            break
        kills += 1
    await agent.run("-p", "do it", "--input-id=task")
    items, operations = await agent.history()
    check_history(items, operations)
    externals = [item for item in items if item.input.kind == item_pb2.INPUT_KIND_EXTERNAL]
    assert [item.input.input_id for item in externals] == ["task"]
    assert len(call_ids(items)) == 6
    commands = [one.operation_id for one in operations if one.type == "bash"]
    effects = Counter((agent.workspace / "effects").read_text().split())
    assert effects == Counter(commands), f"after {kills} kills a command ran twice or never"
    finals = [item.tool_call_status.result for item in items if item.tool_call_status.HasField("result")]
    counters = [text for text in map(result_text, finals) if "line 1\n" in text]
    assert len(counters) == 2
    for text in counters:
        assert re.findall(r"line (\d+)", text) == [str(number) for number in range(1, 41)]
    assert _alive_with_marker(commands) == []


def _alive_with_marker(operation_ids: list[str]) -> list[str]:
    """Return the operations of which a process still runs."""
    alive: list[str] = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or directory.name == str(os.getpid()):
            continue
        try:
            environment = (directory / "environ").read_bytes()
        except OSError:
            continue
        alive += [one for one in operation_ids if f"UNREAL_AGENT_OPERATION={one}".encode() in environment]
    return alive
