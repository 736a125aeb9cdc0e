"""A coordinator ends when it is asked to, also where its store is gone and what it holds can't be given back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.support.eventually import eventually
from tests.support.stack import COORDINATOR, STORE, three_services
from tests.support.world import Script, bash


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [[{"text": "hello"}], [{"tool_calls": [bash("touch began; sleep 0.5")]}, {"text": "done"}]],
    ids=["at rest", "at work"],
)
async def test_a_coordinator_whose_store_is_gone_ends_soon(tmp_path: Path, script: Script) -> None:
    async with three_services(tmp_path, script) as stack:
        async with stack.world() as world:
            await world.create()
            await world.say("hi")
            if "tool_calls" in script[0]:
                await eventually((stack.workspace / "began").exists, within_s=10.0)
            else:
                await world.until_rest()
        await stack.kill(STORE)
        begin_s = time.monotonic()
        async with asyncio.timeout(12.0):
            assert await stack.terminate(COORDINATOR) == 0
        assert time.monotonic() - begin_s < 10.0
        assert "Traceback" not in stack.log(COORDINATOR)
