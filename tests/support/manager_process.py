"""A manager in a process of its own, to be killed. `python -m tests.support.manager_process STATE WORKSPACE OPERATION`.

OPERATION is the file of a serialised operation. It is added, followed to its end and acknowledged; with a fourth
argument "cancel" it is cancelled once it runs.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from harness import faults
from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from tests.support.counting_handler import CountingHandler
from tests.support.operations import acknowledging, adding, cancelling, end_of, running
from unreal_agent.operation.v1 import operation_pb2

SETTINGS = LocalManagerSettings(grace_s=0.5, handlers=(CountingHandler(),))


async def follow(state: Path, workspace: Path, operation: operation_pb2.Operation, *, is_cancelled: bool) -> None:
    """Run the operation to its end."""
    async with LocalOperationManager.open(state, name="local", settings=SETTINGS) as manager:
        added = (await manager.add_operations(adding([operation], workspace))).results[0].operation
        if added.WhichOneof("state") is None:
            return
        if is_cancelled:
            await running(manager, operation.operation_id)
            await manager.cancel_operation(cancelling(operation.operation_id))
        ended = await end_of(manager, operation.operation_id)
        await manager.acknowledge_updates(acknowledging(ended))


async def start(
    state: Path, workspace: Path, operation: operation_pb2.Operation, *, kill_at: str = "", is_cancelled: bool = False
) -> asyncio.subprocess.Process:
    """Start the process; `kill_at` is "POINT" or "POINT:N"."""
    file = state.with_suffix(".operation")
    file.write_bytes(operation.SerializeToString())
    environment = {**os.environ, faults.KILL_VARIABLE: kill_at, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    arguments = [str(state), str(workspace), str(file), *(["cancel"] if is_cancelled else [])]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.manager_process", *arguments, env=environment
    )


if __name__ == "__main__":
    faults.install_from_environment()
    state, workspace, file, *rest = sys.argv[1:]
    read = operation_pb2.Operation.FromString(Path(file).read_bytes())
    asyncio.run(follow(Path(state), Path(workspace), read, is_cancelled=bool(rest)))
