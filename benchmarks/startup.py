"""Measures how long the command line takes: `--help`, and `run` until its first request reaches a model provider.

`python -m benchmarks.startup`. Each is a process of its own, with a state directory of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.results import COLUMNS, Latencies, Result, Size, Table
from benchmarks.suite import run_alone
from tests.support.provider import Hang, Reply, scripted_provider


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How much is measured."""

    runs: int


PARAMETERS: dict[Size, Parameters] = {
    "tiny": Parameters(runs=1),
    "quick": Parameters(runs=2),
    "full": Parameters(runs=20),
}


async def measure(parameters: Parameters) -> Result:
    """Start both again and again."""
    helps, requests = Latencies(), Latencies()
    for number in range(parameters.runs + 1):
        help_s, request_s = await _help(), await _first_request()
        # The first start reads files that no cache holds.
        if number or parameters.runs == 1:
            helps.record(help_s)
            requests.record(request_s)
    rows: list[list[str | float]] = [["--help", *helps.row()], ["run to first model request", *requests.row()]]
    return Result(
        suite="startup",
        figures={"help p50 s": helps.ms(50) / 1000, "first request p50 s": requests.ms(50) / 1000},
        tables=[Table(title="command line", columns=("what", *COLUMNS), rows=rows)],
    )


async def _help() -> float:
    begin = time.perf_counter()
    process = await _start({}, "--help")
    await process.wait()
    return time.perf_counter() - begin


async def _first_request() -> float:
    async with scripted_provider(lambda _: Reply(before_headers=[Hang()])) as provider:
        with tempfile.TemporaryDirectory() as directory:
            environment = {
                "UNREAL_AGENT_LLM_PROVIDER": "openai",
                "UNREAL_AGENT_LLM_MODEL": "m",
                "UNREAL_AGENT_LLM_API_KEY": "k",
                "UNREAL_AGENT_LLM_BASE_URL": provider.base_url,
            }
            begin = time.perf_counter()
            process = await _start(
                environment, "run", "-p", "hi", "--state-dir", f"{directory}/state", "--workspace", directory
            )
            async with asyncio.timeout(30):
                await provider.request_arrived.wait()
            elapsed = time.perf_counter() - begin
            process.kill()
            await process.wait()
            return elapsed


async def _start(environment: Mapping[str, str], *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "clients.cli", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


if __name__ == "__main__":
    run_alone(measure, PARAMETERS)
