"""`view_image` version 1: an image file of the workspace, made to fit. PURE."""

from __future__ import annotations

from harness.operations.operations import Step
from harness.operations.types.computing import advance_computation
from harness.operations.types.validating import find_fault, find_path_fault
from harness.primitives.image_pool import REQUEST_TIMEOUT_S, view_image
from harness.primitives.images import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_HEIGHT,
    DEFAULT_MAX_WIDTH,
    MAX_RESULT_BYTES,
    MAX_SIDE,
    ImageFacts,
)
from harness.primitives.primitives import Compute, ComputeCompleted, Dispatch, Event
from unreal_agent.operation.v1 import operation_pb2

COMPUTE_TIMEOUT_S = 2 * REQUEST_TIMEOUT_S + 5
"""Waiting for a free worker, then for its answer; both end by themselves before this."""


class ViewImageMachine:
    """Reads and prepares in a worker process; the prepared bytes are the update's attachment."""

    operation_type = "view_image"
    type_version = 1
    effect_classes = (operation_pb2.EFFECT_CLASS_PURE,)

    def validate(self, operation: operation_pb2.Operation) -> str | None:
        """Refuse paths that can't be one and results larger than any provider takes."""
        fault = find_fault(operation, "view_image", self.effect_classes)
        if fault is not None:
            return fault
        state = operation.view_image
        if state.max_width > MAX_SIDE or state.max_height > MAX_SIDE:
            return f"max_width and max_height are at most {MAX_SIDE:,}"
        if state.max_bytes > MAX_RESULT_BYTES:
            return f"max_bytes is at most {MAX_RESULT_BYTES:,}"
        return find_path_fault(state.path)

    def advance(self, operation: operation_pb2.Operation, event: Event) -> Step[Dispatch]:
        """Compute, then complete or fail."""
        state = operation.view_image

        def compute(workspace: str) -> Compute:
            return Compute(
                function=view_image,
                arguments=(
                    workspace,
                    state.path,
                    state.max_width or DEFAULT_MAX_WIDTH,
                    state.max_height or DEFAULT_MAX_HEIGHT,
                    state.max_bytes or DEFAULT_MAX_BYTES,
                ),
                timeout_s=COMPUTE_TIMEOUT_S,
            )

        return advance_computation(operation, event, compute=compute, complete=_complete)


def _complete(successor: operation_pb2.Operation, event: ComputeCompleted) -> bool:
    facts = event.value
    if not isinstance(facts, ImageFacts) or len(event.attachments) != 1:
        return False
    state = successor.view_image
    state.image.CopyFrom(event.attachments[0])
    state.width = facts.width
    state.height = facts.height
    state.original_media_type = facts.original_media_type
    state.original_width = facts.original_width
    state.original_height = facts.original_height
    return True
