"""Contract of the LLM adapters.

An adapter turns one request into a stream of deltas and one complete response. It owns authentication, cancellation,
timeouts, retries and error classes of one wire format; it keeps no history and decides nothing about the session.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from unreal_agent.llm.v1 import llm_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMRequest:
    """One model request. Its messages belong to the history: never mutate them."""

    session_id: str
    turn_id: str
    model: str
    effort: str
    """"low", "medium", "high", "xhigh", "max", or empty for the provider's default."""

    max_output_tokens: int
    """0: the provider's default."""

    prompt: llm_pb2.Prompt
    entries: Sequence[llm_pb2.ContextEntry]
    """The conversation: assistant, all its tool results, late results, inputs. Images and long texts name blobs."""

    cache_key: str
    """Stable for the session; names the provider's prompt cache."""

    recorded_outcomes: int
    """Responses and failures of regular turns in the history before this request: the `scripted` provider's place."""

    recorded_compactions: int
    """Compactions in the history, done or failed, before this request: the `scripted` provider's position among its
    entries for compactions."""

    is_compaction: bool
    """True: summarise; no tool may be called."""

    load_blob: Callable[[str], Awaitable[bytes]]
    """Returns a blob's bytes by digest; called just before sending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of text."""

    attempt: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """A piece of readable reasoning."""

    attempt: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of a call's arguments."""

    attempt: int
    index: int
    """Place among the response's calls, from 0."""

    name: str
    """Empty until known."""

    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """An attempt failed and another follows; its deltas are void."""

    attempt: llm_pb2.Attempt
    retry_delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The response, complete; always the last event."""

    output: llm_pb2.ModelOutput


LLMEvent = TextDelta | ReasoningDelta | ToolCallDelta | AttemptFailed | Completed


class LLMError(Exception):
    """Raised when a request failed for good.

    Attributes:
        failure: Class and one line for a person, without credentials and prompt text.
        attempts: Every attempt, the last one last.
    """

    def __init__(self, failure: llm_pb2.Failure, attempts: Sequence[llm_pb2.Attempt] = ()) -> None:
        """Keep the facts; the failure's message is the exception's text."""
        super().__init__(failure.message)
        self.failure = failure
        self.attempts = tuple(attempts)


class LLMAdapter(Protocol):
    """Asks one provider."""

    def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        """Yield deltas, then exactly one `Completed`, or raise `LLMError`.

        Consume it within `contextlib.aclosing`: cancelling the consumer, or closing the generator, closes the
        provider's connection at once, also while it connects and during a back-off.

        Raises:
            LLMError: The request failed for good. What `load_blob` raises passes through.
        """
        ...

    async def aclose(self) -> None:
        """Close connections; may be called twice."""
        ...
