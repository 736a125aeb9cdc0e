"""What the commands about operations do, over the protocol `Coordinator`; each prints, and returns the exit code."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

from google.protobuf import json_format

from clients.cli.failures import CommandError
from clients.cli.jsonl_display import json_line
from clients.cli.opened_session import all_operations
from clients.cli.request import new_input_id
from clients.cli.tables import ago, print_table, took
from clients.cli.text import clean, clip, enum_word, one_line
from harness.coordinator import Coordinator
from harness.errors import NotFoundError
from harness.operations import is_terminal
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

SETTLE_TIMEOUT_S = 60.0

MAX_SUBJECT_CELLS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWish:
    """Which output to write."""

    session_id: str
    operation_id: str
    is_stderr: bool
    follows: bool
    tail_bytes: int
    """0: from the beginning."""


async def list_operations(coordinator: Coordinator, session_id: str, *, is_unsettled: bool, output: str) -> int:
    """Print a session's operations."""
    await coordinator.get_session(coordinator_pb2.GetSessionRequest(session_id=session_id))
    wish = store_pb2.ListOperationsRequest(session_id=session_id)
    if is_unsettled:
        wish.filter = store_pb2.OPERATION_FILTER_UNSETTLED
    found = [
        operation
        async for operation in all_operations(coordinator, wish)
        # The harness's own operations have no call whose result could be delivered.
        if not (is_unsettled and is_terminal(operation) and not operation.call_id)
    ]
    if output == "jsonl":
        for operation in found:
            print(json_line(operation))
        return 0
    if not found:
        print("No operation runs." if is_unsettled else "No operations.")
        return 0
    now = datetime.now(UTC)
    rows = [
        (
            operation.operation_id,
            operation.type.replace("_", " "),
            status_word(operation),
            ago(operation.create_time, now),
            took(_elapsed_s(operation)),
            clip(subject(operation), MAX_SUBJECT_CELLS),
        )
        for operation in found
    ]
    print_table(("operation", "type", "status", "made", "took", "what"), rows)
    return 0


def status_word(operation: operation_pb2.Operation) -> str:
    """Return an operation's status as a person says it, with the exit code of a command."""
    name = enum_word(operation_pb2.OperationStatus.DESCRIPTOR, operation.status)
    word = {"awaiting": "running"}.get(name, name)
    if operation.bash.has_exit:
        return f"{word}, {operation.bash.signal or f'exit {operation.bash.exit_code}'}"
    return word


def subject(operation: operation_pb2.Operation) -> str:
    """Return one line that says what an operation is about."""
    match operation.WhichOneof("state"):
        case "bash":
            return one_line(operation.bash.command)
        case "view_image":
            return one_line(operation.view_image.path)
        case "skill_use":
            return one_line(operation.skill_use.name)
        case "inspect_workspace":
            return one_line(operation.inspect_workspace.workspace)
        case "remote_job":
            return one_line(f"{operation.remote_job.plan_type} {operation.remote_job.progress}")
        case _:
            return ""


def _elapsed_s(operation: operation_pb2.Operation) -> float | None:
    if not operation.HasField("start_time") or not operation.HasField("end_time"):
        return None
    return (operation.end_time.ToDatetime() - operation.start_time.ToDatetime()).total_seconds()


async def show_operation(coordinator: Coordinator, session_id: str, operation_id: str, output: str) -> int:
    """Print one operation."""
    operation = await find_operation(coordinator, session_id, operation_id)
    if output == "jsonl":
        print(json_line(operation))
    else:
        # The JSON form escapes control characters; what reorders text is left out.
        print(clean(json_format.MessageToJson(operation, preserving_proto_field_name=True, ensure_ascii=False)))
    return 0


async def find_operation(coordinator: Coordinator, session_id: str, operation_id: str) -> operation_pb2.Operation:
    """Return an operation's newest recorded state.

    Raises:
        NotFoundError: The session, or the operation in it, is unknown.
    """
    wish = store_pb2.ListOperationsRequest(session_id=session_id, operation_id=operation_id)
    async for operation in all_operations(coordinator, wish):
        return operation
    raise NotFoundError(f"session {session_id!r} has no operation {operation_id!r}", reason="OPERATION_NOT_FOUND")


async def show_output(coordinator: Coordinator, wish: OutputWish) -> int:
    """Write an operation's output."""
    streams = operation_pb2.OUTPUT_STREAM_STDERR if wish.is_stderr else operation_pb2.OUTPUT_STREAM_STDOUT
    request = manager_pb2.ReadOutputRequest(
        operation_id=wish.operation_id, stream=streams, follow=wish.follows, tail_bytes=-wish.tail_bytes
    )
    pieces = coordinator.read_output(coordinator_pb2.ReadOutputRequest(session_id=wish.session_id, request=request))
    async for response in pieces:
        sys.stdout.buffer.write(response.piece.data)
        sys.stdout.buffer.flush()
    return 0


async def cancel_operation(
    coordinator: Coordinator, session_id: str, operation_id: str, reason: str, *, is_abandoned: bool
) -> int:
    """Cancel or abandon an operation and wait until it has ended."""
    accepted = await coordinator.cancel_operation(
        coordinator_pb2.CancelOperationRequest(
            session_id=session_id,
            input_id=new_input_id(),
            operation_id=operation_id,
            reason=reason,
            abandon=is_abandoned,
        )
    )
    watch = coordinator_pb2.WatchSessionRequest(session_id=session_id, after_revision=accepted.revision - 1)
    try:
        async with asyncio.timeout(SETTLE_TIMEOUT_S):
            operation = await find_operation(coordinator, session_id, operation_id)
            if not is_terminal(operation):
                operation = await _wait_for_end(coordinator, watch, operation_id)
    except TimeoutError as error:
        raise CommandError(
            f"the operation has not ended after {SETTLE_TIMEOUT_S:.0f} s ({operation_id})",
            f"Give it up: unreal-agent operations abandon {session_id} {operation_id}.",
        ) from error
    print(f"operation {operation_id} is {status_word(operation)}")
    return 0


async def _wait_for_end(
    coordinator: Coordinator, watch: coordinator_pb2.WatchSessionRequest, operation_id: str
) -> operation_pb2.Operation:
    async for response in coordinator.watch_session(watch):
        for operation in response.change.operations:
            if operation.operation_id == operation_id and is_terminal(operation):
                return operation
    raise CommandError(f"the session ended before the operation did ({operation_id})")
