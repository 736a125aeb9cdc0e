"""The context builder: what the model is sent, as a pure function of the history."""

from harness.context_builder.context_builder import (
    ContextState,
    NextRequest,
    advance,
    awaited_calls,
    estimated_tokens,
    next_request,
    omit_new,
    rebased,
    report,
    totals_with_prompt,
)

__all__ = [
    "ContextState",
    "NextRequest",
    "advance",
    "awaited_calls",
    "estimated_tokens",
    "next_request",
    "omit_new",
    "rebased",
    "report",
    "totals_with_prompt",
]
