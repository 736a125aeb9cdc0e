"""The session store is of use by itself: examples/session_store_alone.py."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.support.stack import STORE, three_services

ROOT = Path(__file__).resolve().parents[2]

OUTPUT = """\
page:
  note 1
  note 2
page:
  note 3
  note 4
page:
  note 5
watched up to revision 1: 5 items
"""


async def test_the_example_keeps_a_history_with_the_store_alone(tmp_path: Path) -> None:
    async with three_services(tmp_path, starts=False) as stack:
        await stack.start(STORE)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.session_store_alone", stack.addresses[STORE]),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        output, errors = await process.communicate()
    assert (process.returncode, output.decode(), errors.decode()) == (0, OUTPUT, "")
