"""What the step machines share: copying an operation into its next state. Pure."""

from __future__ import annotations

from unreal_agent.operation.v1 import operation_pb2

Operation = operation_pb2.Operation


def succeed(operation: Operation, status: operation_pb2.OperationStatus.ValueType) -> Operation:
    """Return a copy with the next step and a status, for the machine to fill. The manager stamps the times."""
    successor = Operation()
    successor.CopyFrom(operation)
    successor.step += 1
    successor.status = status
    return successor


def end_badly(
    operation: Operation, status: operation_pb2.OperationStatus.ValueType, reason: str, message: str
) -> Operation:
    """Return a copy that ended as FAILED, CANCELED or OUTCOME_UNKNOWN, with its error."""
    successor = succeed(operation, status)
    successor.error.reason = reason
    successor.error.message = message
    return successor
