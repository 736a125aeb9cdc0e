"""A command run with the operation manager alone: no coordinator, no model; only the manager's service and client.

Start one, and name its address:

    .venv/bin/python -m services.operation_manager --listen unix:/tmp/manager.sock --state-dir /tmp/manager
    .venv/bin/python -m examples.operation_manager_alone unix:/tmp/manager.sock 'for i in 1 2 3; do date; sleep 1; done'
"""

from __future__ import annotations

import asyncio
import sys
import uuid

from clients.operation_manager import DialledLink, ProxyOperationManager
from harness.operations import OperationManager, is_terminal
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

OWNER, SESSION = "example", "example-session"


async def run(manager: OperationManager, command: str) -> operation_pb2.Operation:
    operation = operation_pb2.Operation(
        schema_version=1,
        operation_id=uuid.uuid4().hex,
        session_id=SESSION,
        type="bash",
        type_version=1,
        status=operation_pb2.OPERATION_STATUS_READY,
        step=1,
        effect_class=operation_pb2.EFFECT_CLASS_AT_MOST_ONCE,
        bash=operation_pb2.BashState(command=command),
    )
    # The same operation again, after a lost answer, is answered from its record: a command starts at most once.
    assignment = manager_pb2.OperationAssignment(operation=operation, workspace="/tmp")
    fence = manager_pb2.Fence(session_id=SESSION, epoch=1)
    request = manager_pb2.AddOperationsRequest(owner=OWNER, fences=[fence], assignments=[assignment])
    await manager.add_operations(request)

    stdout = operation_pb2.OUTPUT_STREAM_STDOUT
    tail = manager_pb2.ReadOutputRequest(operation_id=operation.operation_id, stream=stdout, follow=True)
    async for piece in manager.read_output(tail):  # goes on by itself where the manager is restarted meanwhile
        sys.stdout.write(piece.data.decode(errors="replace"))
        sys.stdout.flush()

    async for event in manager.watch_operations(manager_pb2.WatchOperationsRequest(owner=OWNER)):
        ended = event.update.operation
        if ended.operation_id == operation.operation_id and is_terminal(ended):
            # Kept until acknowledged: whoever records results does so first.
            done = manager_pb2.Acknowledgement(operation_id=ended.operation_id, step=ended.step)
            await manager.acknowledge_updates(manager_pb2.AcknowledgeUpdatesRequest(acknowledgements=[done]))
            return ended
    raise AssertionError("a watch never ends by itself")


async def main(address: str, command: str) -> int:
    async with ProxyOperationManager(DialledLink(address)) as manager:
        ended = await run(manager, command)
    print(f"exit code {ended.bash.exit_code}, {ended.bash.stdout.total_bytes} bytes of output")
    return ended.bash.exit_code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:3])))
