"""The LLM adapters' contract; adapters are imported from their own modules."""

from harness.llm.llm import (
    AttemptFailed,
    Completed,
    LLMAdapter,
    LLMError,
    LLMEvent,
    LLMRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)

__all__ = [
    "AttemptFailed",
    "Completed",
    "LLMAdapter",
    "LLMError",
    "LLMEvent",
    "LLMRequest",
    "ReasoningDelta",
    "TextDelta",
    "ToolCallDelta",
]
