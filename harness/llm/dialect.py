"""What a wire format is to the code that does the I/O: two pure translations, of requests and of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from harness.llm.llm import LLMRequest, ReasoningDelta, TextDelta, ToolCallDelta
from harness.llm.sse import ServerSentEvent
from unreal_agent.llm.v1 import llm_pb2

Delta = TextDelta | ReasoningDelta | ToolCallDelta


class ResponseFold(Protocol):
    """Folds one attempt's events into a response. Pure; made anew for each attempt."""

    @property
    def is_whole(self) -> bool:
        """True once the answer can be taken although the stream may break off now."""
        ...

    @property
    def is_ended(self) -> bool:
        """True once nothing that may follow matters."""
        ...

    @property
    def ignored(self) -> Mapping[str, int]:
        """How many unknown events and items were ignored, by name."""
        ...

    def feed(self, event: ServerSentEvent) -> Sequence[Delta]:
        """Take one event and return what it adds.

        Raises:
            AttemptError: It reports an error, or cannot be decoded.
        """
        ...

    def feed_whole(self, text: str) -> Sequence[Delta]:
        """Take a whole answer, from a server that sends no events, and return what it says.

        Raises:
            AttemptError: It reports an error, or is no answer of this format.
        """
        ...

    def resume(self) -> Sequence[llm_pb2.OutputItem] | None:
        """Return what came so far where the provider paused its answer, and await the rest; None: it did not.

        The caller asks again with these items at the end of the conversation, and feeds what comes.
        """
        ...

    def usage(self) -> llm_pb2.Usage | None:
        """Return what was counted so far, also after a failure."""
        ...

    def output(self) -> llm_pb2.ModelOutput:
        """Return the response, without attempts and provider; only once it is whole."""
        ...


class Dialect(Protocol):
    """Translates between neutral messages and one wire format. Pure."""

    def url(self, base_url: str) -> str:
        """Return where requests go; `base_url` has no trailing slash."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers that the format itself demands."""
        ...

    def body(self, request: LLMRequest, blobs: Mapping[str, bytes]) -> bytes:
        """Return the request body: the same bytes for the same request."""
        ...

    def fold(self, attempt: int) -> ResponseFold:
        """Return a new fold whose deltas carry the attempt's number."""
        ...
