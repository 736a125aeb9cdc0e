"""What every type checks of an operation before it is accepted. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from harness.operations.operations import is_terminal
from unreal_agent.operation.v1 import operation_pb2

MAX_PATH_BYTES = 4_096
"""The kernel's PATH_MAX."""

MAX_JSON_BYTES = 1024 * 1024


def find_fault(
    operation: operation_pb2.Operation, state: str, effect_classes: Sequence[operation_pb2.EffectClass.ValueType]
) -> str | None:
    """Return why an operation does not fit its type, whatever its content is; None where it does."""
    if operation.WhichOneof("state") != state:
        return f"an operation of type {operation.type!r} needs the state {state!r}"
    if operation.effect_class not in effect_classes:
        names = " or ".join(operation_pb2.EffectClass.Name(each) for each in effect_classes)
        return f"an operation of type {operation.type!r} has the effect class {names}"
    if bool(operation.idempotency_key) != (operation.effect_class == operation_pb2.EFFECT_CLASS_IDEMPOTENT):
        return "an idempotency_key belongs to the effect class EFFECT_CLASS_IDEMPOTENT, and only there"
    if is_terminal(operation):
        return "the operation is terminal"
    if operation.limits.HasField("timeout"):
        try:
            is_negative = operation.limits.timeout.ToTimedelta().total_seconds() < 0
        except (ValueError, OverflowError):
            return "limits.timeout is out of range"
        if is_negative:
            return "limits.timeout is negative"
    return None


def find_path_fault(path: str) -> str | None:
    """Return why a text can't be a path, or None."""
    if not path.strip():
        return "the path is blank"
    if "\0" in path:
        return "the path holds a NUL"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"the path is longer than {MAX_PATH_BYTES:,} bytes"
    return None


def find_json_fault(field: str, text: str) -> str | None:
    """Return why a text is not one JSON value of bounded size, or None."""
    if len(text.encode()) > MAX_JSON_BYTES:
        return f"{field} is longer than {MAX_JSON_BYTES:,} bytes"
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"{field} is not JSON: {error}"
    return None
