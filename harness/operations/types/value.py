"""`value` version 1: completes at once with the value that it was given. PURE."""

from __future__ import annotations

from harness.operations.operations import Step, is_terminal
from harness.operations.types.computing import cancel, fail_unexpected
from harness.operations.types.stepping import succeed
from harness.operations.types.validating import find_fault, find_json_fault
from harness.primitives.primitives import Begin, CancelRequested, Dispatch, Event, Recovered
from unreal_agent.operation.v1 import operation_pb2


class ValueMachine:
    """Dispatches nothing."""

    operation_type = "value"
    type_version = 1
    effect_classes = (operation_pb2.EFFECT_CLASS_PURE,)

    def validate(self, operation: operation_pb2.Operation) -> str | None:
        """Refuse a value that is not JSON."""
        fault = find_fault(operation, "value", self.effect_classes)
        return fault or find_json_fault("value_json", operation.value.value_json)

    def advance(self, operation: operation_pb2.Operation, event: Event) -> Step[Dispatch]:
        """Complete."""
        if is_terminal(operation):
            return Step(operation=operation)
        match event:
            case Begin() | Recovered():
                return Step(operation=succeed(operation, operation_pb2.OPERATION_STATUS_COMPLETED))
            case CancelRequested():
                return Step(operation=cancel(operation, event))
            case _:
                return Step(operation=fail_unexpected(operation, event))
