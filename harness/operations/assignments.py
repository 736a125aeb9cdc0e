"""Checks requests before anything is accepted. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from harness.errors import ConflictError, FailedPreconditionError, InvalidArgumentError
from harness.operations.journal import SessionRow
from harness.operations.operations import is_terminal
from harness.operations.registry import StepMachines
from harness.primitives.messages import find_unknown_field
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

SCHEMA_VERSION = 1
MAX_ASSIGNMENTS = 10_000

MAX_NUMBER = 2**62
"""Of epochs and steps: the journal's integers have 63 bits, and a step grows."""

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


def is_identifier(text: str) -> bool:
    """Return whether a text may be an operation's ID: one path component that is harmless everywhere."""
    return _ID.fullmatch(text) is not None and text not in (".", "..")


def page_start(token: str) -> int:
    """Return the place in the order of acceptance behind which a page begins: INVALID_PAGE_TOKEN."""
    if not token:
        return 0
    if not (token.isascii() and token.isdecimal() and len(token) <= 18):
        raise InvalidArgumentError("page_token is not one of this manager's", reason="INVALID_PAGE_TOKEN")
    return int(token)


def check_instance(wanted: str, instance_id: str) -> None:
    """Raise FailedPreconditionError(WRONG_INSTANCE) where another instance is meant."""
    if wanted and wanted != instance_id:
        raise FailedPreconditionError(
            f"this manager is instance {instance_id!r}, not {wanted!r}",
            reason="WRONG_INSTANCE",
            metadata={"instance_id": instance_id},
        )


def check_fence(fence: manager_pb2.Fence, sessions: Mapping[str, SessionRow]) -> None:
    """Raise ConflictError(STALE_EPOCH) where a higher epoch of the session was seen."""
    if not fence.session_id:
        raise InvalidArgumentError("fence.session_id must be set", reason="MISSING_FENCE")
    if fence.epoch > MAX_NUMBER:
        raise InvalidArgumentError(f"fence.epoch must be at most {MAX_NUMBER}", reason="INVALID_NUMBER")
    known = sessions.get(fence.session_id)
    if known is not None and fence.epoch < known.epoch:
        raise ConflictError(
            f"session {fence.session_id!r} has epoch {known.epoch}, the caller {fence.epoch}",
            reason="STALE_EPOCH",
            metadata={"session_id": fence.session_id, "epoch": str(known.epoch)},
        )


def check_fences(request: manager_pb2.AddOperationsRequest, sessions: Mapping[str, SessionRow]) -> None:
    """Raise where a session of the assignments has no fence, or a stale one."""
    for fence in request.fences:
        check_fence(fence, sessions)
    fenced = {fence.session_id for fence in request.fences}
    for assignment in request.assignments:
        if assignment.operation.session_id not in fenced:
            raise InvalidArgumentError(
                f"no fence for session {assignment.operation.session_id!r} of operation"
                f" {assignment.operation.operation_id!r}",
                reason="MISSING_FENCE",
            )
    if len(request.assignments) > MAX_ASSIGNMENTS:
        raise InvalidArgumentError(f"more than {MAX_ASSIGNMENTS} assignments", reason="TOO_MANY_ASSIGNMENTS")


def find_refusal(
    assignment: manager_pb2.OperationAssignment, machines: StepMachines
) -> operation_pb2.OperationError | None:
    """Return why a new operation is not accepted, or None."""
    operation = assignment.operation
    machine = machines.find(operation.type, operation.type_version)
    if operation.schema_version > SCHEMA_VERSION or machine is None:
        return operation_pb2.OperationError(
            reason="UNSUPPORTED_OPERATION_VERSION",
            message=f"this manager does not run {operation.type}/{operation.type_version}"
            f" (schema version {operation.schema_version}); it runs {', '.join(describe(machines))}",
        )
    path = find_unknown_field(assignment)
    if path is not None:
        # It asks for something that would silently not be done.
        message = f"the operation has {path}, which this manager does not know"
        return operation_pb2.OperationError(reason="UNKNOWN_FIELDS", message=message)
    if is_terminal(operation):
        return operation_pb2.OperationError(reason="TERMINAL_OPERATION", message="the operation is over")
    fault = _find_fault(assignment) or machine.validate(operation)
    return None if fault is None else operation_pb2.OperationError(reason="INVALID_OPERATION", message=fault)


def _find_fault(assignment: manager_pb2.OperationAssignment) -> str | None:
    operation = assignment.operation
    if not is_identifier(operation.operation_id):
        return "operation_id must be 1 to 128 letters, digits, '-', '_' and '.', and not '.' or '..'"
    if operation.status != operation_pb2.OPERATION_STATUS_READY:
        # It was started by somebody; to start it here might be the second time.
        return "the operation is under way and was not accepted here"
    if not 1 <= operation.step <= MAX_NUMBER:
        return f"step must be from 1 to {MAX_NUMBER}"
    if not assignment.workspace.startswith("/") or "\0" in assignment.workspace:
        return "workspace must be an absolute path"
    return None


def describe(machines: StepMachines) -> Iterable[str]:
    """Return the types that there are, each as "type/version", sorted."""
    return [f"{machine.operation_type}/{machine.type_version}" for machine in machines]
