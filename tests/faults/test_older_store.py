"""A session store that was put back to an older copy beside a manager that knows more: no result is another's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.stack import COORDINATOR, STORE, Stack, three_services
from tests.support.world import Script, bash, result_text


def told(words: str) -> Script:
    """A call that writes and prints words of its own, and an answer."""
    return [{"text": "so", "tool_calls": [bash(f"echo {words} >> effects; echo {words}")]}, {"text": "done"}]


def play(stack: Stack, script: Sequence[object]) -> None:
    (stack.directory / "script.json").write_text(json.dumps({"responses": list(script)}), encoding="utf-8")


def copy_store(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in target.glob("sessions.db*"):
        path.unlink()
    for path in source.glob("sessions.db*"):
        shutil.copy(path, target)


async def stop(stack: Stack) -> None:
    """End coordinator and store in order: sessions are given back, and the next incarnation takes over no crash."""
    for name in (COORDINATOR, STORE):
        assert await stack.terminate(name) == 0


async def start(stack: Stack) -> None:
    for name in (STORE, COORDINATOR):
        await stack.start(name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lost_leases", [1, 4])
async def test_no_earlier_command_s_result_is_shown_as_a_new_one_s(tmp_path: Path, lost_leases: int) -> None:
    """The older store names its next operation as one that ran, under a lease no higher than the manager knows."""
    older = tmp_path / "older"
    async with three_services(tmp_path, [*told("first"), *told("vanished"), {"text": "hm"}]) as stack:
        async with stack.world() as world:
            await world.create()
            await world.run("one")
        await stop(stack)
        copy_store(stack.state, older)
        await start(stack)
        async with stack.world() as world:
            await world.run("two")
        for number in range(lost_leases - 1):
            await stop(stack)
            await start(stack)
            async with stack.world() as world:
                await world.stop(input_id=f"stop-{number}")
        await stop(stack)
        copy_store(older, stack.state)
        play(stack, [*told("first"), *told("new"), *told("newer")])
        await start(stack)
        async with stack.world() as world:
            await world.run("three", within_s=40)
            await world.run("four", within_s=40)
            operations = await world.operations()
            results = {call_id: result_text(one) for call_id, one in (await world.results()).items()}
    shown = [results[one.call_id] for one in operations]
    effects = (tmp_path / "workspace" / "effects").read_text().split()
    assert effects[:2] == ["first", "vanished"]
    # What was run, was run once and shows its own words; what was not, says so.
    assert "it was not started" in shown[1], shown
    assert not any("vanished" in one.split() for one in shown), shown
    for words, text in zip(("new", "newer"), shown[1:], strict=True):
        assert (effects.count(words), words in text.split()) in {(1, True), (0, False)}, (shown, effects)
    assert effects.count("newer") == 1
