"""Runs one suite alone: `python -m benchmarks.NAME [--size full]`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from benchmarks.results import Result, Size, text_of

ParametersT = TypeVar("ParametersT")


def run_alone(measure: Callable[[ParametersT], Awaitable[Result]], parameters: Mapping[Size, ParametersT]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measures one suite and prints its figures.")
    parser.add_argument("--size", choices=list(parameters), default="full")
    size: Size = parser.parse_args().size

    async def run() -> Result:
        return await measure(parameters[size])

    print_result(asyncio.run(run()))


def print_result(result: Result) -> None:
    """Print tables and figures."""
    for table in result.tables:
        print(text_of(table), end="\n\n")
    width = max(map(len, result.figures), default=0)
    for name, figure in result.figures.items():
        print(f"{name.ljust(width)}  {figure:,.3f}")
