"""A host's handler whose starts can be counted: each call leaves a line in a file that the plan names."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from harness.primitives.primitives import RemoteJobEnded, RemoteJobUpdated
from unreal_agent.operation.v1 import operation_pb2

PLAN_TYPE = "count"
HANDLE = "job-1"


class CountingHandler:
    """Runs plans `{"file": PATH, "first": WHAT}`: what the first call does; every later one ends at once.

    "ends": the same. "dies": it kills the process before it has named its job. "waits": it names it and never ends.
    """

    plan_type = PLAN_TYPE
    plan_version = 1

    async def run(
        self, *, operation_id: str, plan_json: str, handle: str, idempotency_key: str
    ) -> AsyncIterator[RemoteJobUpdated | RemoteJobEnded]:
        plan = json.loads(plan_json)
        file = Path(plan["file"])
        calls = len(file.read_text().splitlines()) if file.exists() else 0
        with file.open("a") as opened:
            opened.write(f"{handle or '-'} {idempotency_key or '-'}\n")
        first = plan["first"] if calls == 0 else "ends"
        if first == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        yield RemoteJobUpdated(handle=HANDLE, progress="")
        if first == "waits":
            await asyncio.Event().wait()
        yield RemoteJobEnded(status=operation_pb2.OPERATION_STATUS_COMPLETED, result_json='"done"')

    async def cancel(self, *, operation_id: str, handle: str, reason: str) -> None:
        """Nothing runs."""
