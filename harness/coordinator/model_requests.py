"""Carries out one model request at a time for a session: sends it, publishes its deltas, reports its end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing

from harness import context_builder
from harness.context_builder import compaction
from harness.context_builder.entries import Placed
from harness.context_builder.prompt import decode_prompt
from harness.coordinator.ephemeral import EphemeralHub
from harness.coordinator.protocol import ModelAnswered, ModelFailed
from harness.coordinator.state import SessionState
from harness.errors import HarnessError, UnavailableError
from harness.llm import (
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
from harness.session_store import SessionStore, get_blob_bytes
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

logger = logging.getLogger(__name__)

READ_RETRY_S = 0.2

MAX_DELTA_CHARS = 4096


class ModelRequests:
    """Asks models on behalf of one session."""

    def __init__(
        self,
        store: SessionStore,
        open_adapter: Callable[[str], LLMAdapter],
        hub: EphemeralHub,
    ) -> None:
        """Keep the dependencies; they stay the caller's."""
        self._store = store
        self._open_adapter = open_adapter
        self._hub = hub
        self._prompt: tuple[str, llm_pb2.Prompt] | None = None

    async def ask(self, state: SessionState, epoch: int) -> ModelAnswered | ModelFailed:
        """Return how the latest turn's request ended. Cancelling it closes the provider's connection."""
        turn = state.latest_turn
        assert turn is not None
        try:
            request = await self._request(state, turn)
            adapter = self._open_adapter(turn.provider)
            publisher = _DeltaPublisher(self._hub, state.session_id, turn.turn_id, epoch)
            async with aclosing(adapter.respond(request)) as events:
                async for event in events:
                    if isinstance(event, Completed):
                        return ModelAnswered(turn_id=turn.turn_id, output=event.output)
                    publisher.publish(event)
            failure = _failure(llm_pb2.ERROR_CLASS_MALFORMED_RESPONSE, "the adapter's stream ended without response")
            return ModelFailed(turn_id=turn.turn_id, failure=failure)
        except LLMError as error:
            return ModelFailed(turn_id=turn.turn_id, failure=error.failure, attempts=error.attempts)
        except HarnessError as error:
            failure = _failure(llm_pb2.ERROR_CLASS_INTERNAL, error.message, error.reason)
            return ModelFailed(turn_id=turn.turn_id, failure=failure)
        except Exception:
            logger.exception("model request failed unexpectedly", extra={"turn_id": turn.turn_id})
            failure = _failure(llm_pb2.ERROR_CLASS_INTERNAL, "internal error in the model adapter; see the log")
            return ModelFailed(turn_id=turn.turn_id, failure=failure)

    async def _request(self, state: SessionState, turn: item_pb2.Turn) -> LLMRequest:
        async def load_blob(digest: str) -> bytes:
            while True:
                try:
                    return await get_blob_bytes(self._store, state.session_id, digest)
                except UnavailableError as error:
                    # The store's trouble and no failure of the turn, which is recorded and waits as a commit does.
                    await asyncio.sleep(error.retry_after_s or READ_RETRY_S)

        if self._prompt is None or self._prompt[0] != turn.prompt.digest:
            self._prompt = (turn.prompt.digest, decode_prompt(await load_blob(turn.prompt.digest)))
        return LLMRequest(
            session_id=state.session_id,
            turn_id=turn.turn_id,
            model=turn.model,
            effort=turn.effort,
            max_output_tokens=state.settings.limits.max_output_tokens,
            prompt=self._prompt[1],
            entries=[placed.entry for placed in _conversation(state, turn)],
            cache_key=hashlib.sha256(state.session_uid.encode()).hexdigest(),
            recorded_outcomes=state.recorded_outcomes,
            recorded_compactions=state.recorded_compactions,
            is_compaction=turn.kind == item_pb2.TURN_KIND_COMPACTION,
            load_blob=load_blob,
        )


def _conversation(state: SessionState, turn: item_pb2.Turn) -> Sequence[Placed]:
    if turn.kind != item_pb2.TURN_KIND_COMPACTION:
        return state.context.submitted.entries
    base = context_builder.rebased(
        state.context, provider=turn.provider, model=turn.model, prompt_digest=turn.prompt.digest
    )
    return compaction.request_entries(base.entries, turn.changes)


class _DeltaPublisher:
    """Numbers a request's deltas, so that a watcher can tell a gap and a new attempt."""

    def __init__(self, hub: EphemeralHub, session_id: str, turn_id: str, epoch: int) -> None:
        self._hub = hub
        self._session_id = session_id
        self._turn_id = turn_id
        self._epoch = epoch
        self._sent: dict[tuple[int, str], int] = {}

    def publish(self, event: LLMEvent) -> None:
        """Hand a delta to the watchers; costs nothing while there are none."""
        match event:
            case TextDelta():
                for text, offset in self._pieces(event.attempt, "text", event.text):
                    self._put(event.attempt, offset, coordinator_pb2.ModelDelta(text=text))
            case ReasoningDelta():
                for text, offset in self._pieces(event.attempt, "reasoning", event.text):
                    self._put(event.attempt, offset, coordinator_pb2.ModelDelta(reasoning=text))
            case ToolCallDelta():
                for text, offset in self._pieces(event.attempt, f"call-{event.index}", event.arguments):
                    delta = coordinator_pb2.ToolCallDelta(index=event.index, name=event.name, arguments=text)
                    self._put(event.attempt, offset, coordinator_pb2.ModelDelta(tool_call=delta))
            case AttemptFailed():
                void = coordinator_pb2.ModelDelta(attempt_failure=event.attempt.failure)
                self._put(event.attempt.number, 0, void)
            case Completed():
                pass

    def _pieces(self, attempt: int, kind: str, text: str) -> list[tuple[str, int]]:
        offset = self._sent.get((attempt, kind), 0)
        self._sent[attempt, kind] = offset + len(text)
        if not self._hub.has_watchers(self._session_id):
            return []
        starts = range(0, max(len(text), 1), MAX_DELTA_CHARS)
        return [(text[start : start + MAX_DELTA_CHARS], offset + start) for start in starts]

    def _put(self, attempt: int, offset: int, delta: coordinator_pb2.ModelDelta) -> None:
        delta.turn_id, delta.epoch, delta.attempt, delta.offset = self._turn_id, self._epoch, attempt, offset
        self._hub.publish(self._session_id, coordinator_pb2.WatchSessionResponse(model_delta=delta))


def _failure(error_class: llm_pb2.ErrorClass.ValueType, message: str, code: str = "") -> llm_pb2.Failure:
    return llm_pb2.Failure(error_class=error_class, message=message, provider_code=code)
