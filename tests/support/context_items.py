"""Items of a history as the context builder reads them, each in one short call."""

from __future__ import annotations

from harness.context_builder import ContextState, advance, next_request
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

PROMPT = "ab" * 32
"""Digest of the prompt of every turn here."""


def history(*items: item_pb2.Item) -> ContextState:
    """Return the context after these items, numbered from 1; a repeated item is numbered anew."""
    context = ContextState()
    for sequence, item in enumerate(items, start=1):
        numbered = item_pb2.Item()
        numbered.CopyFrom(item)
        numbered.sequence = sequence
        context = advance(context, numbered)
    return context


def built(context: ContextState) -> list[llm_pb2.ContextEntry]:
    """Return what the next turn would send."""
    return next_request(context, provider="scripted", model="m1", prompt_digest=PROMPT).entries


def text(value: str) -> llm_pb2.ContentPart:
    """Return a text part."""
    return llm_pb2.ContentPart(text=llm_pb2.TextPart(text=value))


def image(digest: str) -> llm_pb2.ContentPart:
    """Return an image part."""
    blob = llm_pb2.BlobRef(digest=digest, size_bytes=3, media_type="image/png")
    return llm_pb2.ContentPart(image=llm_pb2.ImagePart(blob=blob, media_type="image/png"))


def user(value: str) -> item_pb2.Item:
    """Return an EXTERNAL input."""
    content = item_pb2.Content(parts=[text(value)])
    return item_pb2.Item(input=item_pb2.Input(kind=item_pb2.INPUT_KIND_EXTERNAL, content=content))


def control(*, stop: item_pb2.Stop | None = None, settings: session_pb2.SettingsPatch | None = None) -> item_pb2.Item:
    """Return a CONTROL input."""
    asked = item_pb2.Control(stop=stop, settings=settings)
    return item_pb2.Item(input=item_pb2.Input(kind=item_pb2.INPUT_KIND_CONTROL, control=asked))


def heartbeat(reason: str) -> item_pb2.Item:
    """Return a heartbeat."""
    beat = item_pb2.Control(heartbeat=item_pb2.Heartbeat(reason=reason))
    return item_pb2.Item(input=item_pb2.Input(kind=item_pb2.INPUT_KIND_CONTROL, control=beat))


def crash() -> item_pb2.Item:
    """Return a CRASH input."""
    return item_pb2.Item(input=item_pb2.Input(kind=item_pb2.INPUT_KIND_CRASH, crash=item_pb2.CrashReport(kind="EPOCH")))


def turn(*, model: str = "m1", kind: item_pb2.TurnKind.ValueType = item_pb2.TURN_KIND_REGULAR) -> item_pb2.Item:
    """Return a turn."""
    prompt = llm_pb2.BlobRef(digest=PROMPT)
    return item_pb2.Item(turn=item_pb2.Turn(turn_id="t", kind=kind, provider="scripted", model=model, prompt=prompt))


def answered(*items: llm_pb2.OutputItem) -> item_pb2.Item:
    """Return a response."""
    return item_pb2.Item(model_response=item_pb2.ModelResponse(turn_id="t", output=llm_pb2.ModelOutput(items=items)))


def call(call_id: str) -> llm_pb2.OutputItem:
    """Return a tool call of a response."""
    made = llm_pb2.ToolCall(call_id=call_id, name="Bash", arguments_json='{"command": "true"}')
    return llm_pb2.OutputItem(tool_call=made)


def reasoning(raw_json: str) -> llm_pb2.OutputItem:
    """Return reasoning of a response."""
    return llm_pb2.OutputItem(reasoning=llm_pb2.Reasoning(raw_json=raw_json, wire_format="scripted"))


def started(call_id: str) -> item_pb2.Item:
    """Return a call's first status."""
    status = item_pb2.ToolCallStatus(turn_id="t", call_id=call_id, operation_ids=[f"o-{call_id}"])
    return item_pb2.Item(tool_call_status=status)


def final(call_id: str, *parts: llm_pb2.ContentPart) -> item_pb2.Item:
    """Return a call's final status."""
    result = item_pb2.CallResult(outcome=item_pb2.CALL_OUTCOME_COMPLETED, parts=parts)
    return item_pb2.Item(tool_call_status=item_pb2.ToolCallStatus(turn_id="t", call_id=call_id, result=result))


def compacted(summary: str, *, through_sequence: int) -> item_pb2.Item:
    """Return a compaction."""
    return item_pb2.Item(
        compaction=item_pb2.Compaction(turn_id="t", through_sequence=through_sequence, summary=summary)
    )
