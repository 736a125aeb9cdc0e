"""Builds operations and drives a manager the way a coordinator does."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from pathlib import Path

import psutil
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from harness.operations.operations import OperationManager, is_terminal
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

SESSION = "session-1"
OWNER = "coordinator-1"


def bash(
    command: str,
    *,
    session_id: str = SESSION,
    operation_id: str | None = None,
    working_directory: str = "",
    timeout_s: float = 0.0,
    max_output_chars: int = 0,
) -> operation_pb2.Operation:
    """Return a READY shell command."""
    operation = operation_pb2.Operation(
        schema_version=1,
        operation_id=operation_id or uuid.uuid4().hex,
        session_id=session_id,
        type="bash",
        type_version=1,
        status=operation_pb2.OPERATION_STATUS_READY,
        step=1,
        effect_class=operation_pb2.EFFECT_CLASS_AT_MOST_ONCE,
        call_id="call-1",
        bash=operation_pb2.BashState(command=command, working_directory=working_directory),
    )
    operation.limits.max_output_chars = max_output_chars
    if timeout_s:
        operation.limits.timeout.CopyFrom(Duration(nanos=int(timeout_s * 1e9) % 10**9, seconds=int(timeout_s)))
    return operation


def other(operation_type: str, state: Message) -> operation_pb2.Operation:
    """Return a READY operation of another type, without an effect outside."""
    operation = operation_pb2.Operation(
        schema_version=1,
        operation_id=uuid.uuid4().hex,
        session_id=SESSION,
        type=operation_type,
        type_version=1,
        status=operation_pb2.OPERATION_STATUS_READY,
        step=1,
        effect_class=operation_pb2.EFFECT_CLASS_PURE,
    )
    held = getattr(operation, operation_type)
    held.SetInParent()
    held.MergeFrom(state)
    return operation


def adding(
    operations: Iterable[operation_pb2.Operation], workspace: Path, *, epoch: int = 1, owner: str = OWNER
) -> manager_pb2.AddOperationsRequest:
    """Return the request that adds operations in one workspace."""
    listed = list(operations)
    return manager_pb2.AddOperationsRequest(
        owner=owner,
        fences=[
            manager_pb2.Fence(session_id=session_id, epoch=epoch)
            for session_id in sorted({operation.session_id for operation in listed})
        ],
        assignments=[
            manager_pb2.OperationAssignment(operation=operation, workspace=str(workspace)) for operation in listed
        ],
    )


def cancelling(operation_id: str, *, epoch: int = 1, discard: bool = False) -> manager_pb2.CancelOperationRequest:
    """Return the request that cancels an operation."""
    fence = manager_pb2.Fence(session_id=SESSION, epoch=epoch)
    return manager_pb2.CancelOperationRequest(operation_id=operation_id, fence=fence, reason="stop it", discard=discard)


def acknowledging(*operations: operation_pb2.Operation) -> manager_pb2.AcknowledgeUpdatesRequest:
    """Return the request that acknowledges states."""
    return manager_pb2.AcknowledgeUpdatesRequest(
        acknowledgements=[
            manager_pb2.Acknowledgement(operation_id=operation.operation_id, step=operation.step)
            for operation in operations
        ]
    )


async def states(
    manager: OperationManager, operation_id: str, *, after_position: int = 0
) -> list[operation_pb2.Operation]:
    """Watch one operation to its end; return every state that was sent."""
    seen = []
    async for response in manager.watch_operations(manager_pb2.WatchOperationsRequest(after_position=after_position)):
        if response.HasField("update") and response.update.operation.operation_id == operation_id:
            seen.append(response.update.operation)
            if is_terminal(response.update.operation):
                break
    return seen


async def end_of(manager: OperationManager, operation_id: str) -> operation_pb2.Operation:
    """Watch an operation to its end; return its last state."""
    return (await states(manager, operation_id))[-1]


async def run(
    manager: OperationManager, operation: operation_pb2.Operation, workspace: Path
) -> operation_pb2.Operation:
    """Add one operation and return its terminal state; it is not acknowledged."""
    response = await manager.add_operations(adding([operation], workspace))
    assert response.results[0].WhichOneof("result") == "operation", response
    return await end_of(manager, operation.operation_id)


async def running(manager: OperationManager, operation_id: str) -> operation_pb2.Operation:
    """Watch until an operation's command runs; return that state."""
    async for response in manager.watch_operations(manager_pb2.WatchOperationsRequest()):
        operation = response.update.operation
        if operation.operation_id == operation_id and operation.bash.process_id:
            return operation
    raise AssertionError("the watch ended")


async def read_all(
    manager: OperationManager, request: manager_pb2.ReadOutputRequest
) -> tuple[bytes, list[manager_pb2.ReadOutputResponse]]:
    """Return what a read yields, joined and one by one."""
    responses = [response async for response in manager.read_output(request)]
    return b"".join(response.data for response in responses), responses


def carriers(operation_id: str) -> list[psutil.Process]:
    """Return the processes that carry an operation's marker."""
    marker = f"UNREAL_AGENT_OPERATION={operation_id}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                variables = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                if marker in variables and Path(f"/proc/{name}/stat").read_bytes().rpartition(b") ")[2][:1] != b"Z":
                    found.append(psutil.Process(int(name)))
            except (OSError, psutil.NoSuchProcess):
                continue
    return found
