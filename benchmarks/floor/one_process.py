"""One tool turn with nothing but its calls, in one process: four durable commits, two model answers, one bash."""

from __future__ import annotations

import asyncio
from pathlib import Path

from benchmarks.floor.group_commit import GroupCommitWriter
from harness.llm import Completed, LLMAdapter, LLMRequest
from unreal_agent.llm.v1 import llm_pb2

ROW = (b"x" * 1024,)


class OneProcessFloor:
    """A bare pipeline over the same scripted adapter as the product's."""

    def __init__(self, directory: Path, adapter: LLMAdapter) -> None:
        """Open its store in a directory of its own."""
        self._writer = GroupCommitWriter(directory / "floor.sqlite")
        self._adapter = adapter

    async def turn(self, session: int, number: int) -> None:
        """Run one tool turn to its end."""
        await self._writer.write(ROW)
        await ask(self._adapter, session, 2 * number)
        await self._writer.write(ROW)
        await run_true()
        await self._writer.write(ROW)
        await ask(self._adapter, session, 2 * number + 1)
        await self._writer.write(ROW)

    async def close(self) -> None:
        """Close the store."""
        await self._writer.close()


async def run_true() -> None:
    """Run `true` in a bash of its own."""
    process = await asyncio.create_subprocess_exec(
        "/bin/bash",
        "-c",
        "true",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    await process.wait()


async def ask(adapter: LLMAdapter, session: int, position: int) -> None:
    """Get one answer."""
    request = LLMRequest(
        session_id=f"floor-{session}",
        turn_id=f"t{position}",
        model="scripted",
        effort="",
        max_output_tokens=0,
        prompt=llm_pb2.Prompt(),
        entries=[],
        cache_key="",
        recorded_outcomes=position,
        recorded_compactions=0,
        is_compaction=False,
        load_blob=_no_blob,
    )
    async for event in adapter.respond(request):
        if isinstance(event, Completed):
            return


async def _no_blob(digest: str) -> bytes:
    raise KeyError(digest)
