"""The context builder: what the model is sent, as a pure function of the history."""

from harness.context_builder.context_builder import (
    ContextState,
    NextRequest,
    advance,
    next_request,
    omit_new,
    report,
    totals_with_prompt,
)

__all__ = ["ContextState", "NextRequest", "advance", "next_request", "omit_new", "report", "totals_with_prompt"]
