"""A commit while it is being decided: each change goes through `apply` at once, so that later rules see it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from harness.clock import timestamp
from harness.coordinator.apply import apply
from harness.coordinator.protocol import (
    Answer,
    BlobSource,
    Effect,
    Environment,
    Now,
    Refusal,
    Volatile,
)
from harness.coordinator.state import SessionState
from harness.session_store import ITEM_SCHEMA_VERSION, MAX_INLINE_TEXT_BYTES
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2


class Draft:
    """Gathers one decision. Lives inside one call of `decide` only."""

    def __init__(self, environment: Environment, state: SessionState, volatile: Volatile, now: Now) -> None:
        """Begin from a state and volatile facts, which are not changed."""
        self.environment = environment
        self.state = state
        self.volatile = volatile
        self.now = now
        self.items: list[item_pb2.Item] = []
        self.operations: dict[str, operation_pb2.Operation] = {}
        self.blobs: dict[str, BlobSource] = {}
        self.effects: list[Effect] = []
        self.answers: list[Answer | Refusal] = []
        self.interrupts = False
        """An input or a heartbeat asks for a turn at once."""

    def next_sequence(self) -> int:
        """Return the sequence that the next item gets."""
        return self.state.last_sequence + 1

    def append(self, item: item_pb2.Item) -> int:
        """Stamp a new item, append it and return its sequence. The draft owns `item` from now on."""
        item.schema_version = ITEM_SCHEMA_VERSION
        item.sequence = self.next_sequence()
        item.record_time.CopyFrom(timestamp(self.now.wall_time))
        self.items.append(item)
        self.state = apply(self.state, item)
        return item.sequence

    def put_operation(self, operation: operation_pb2.Operation) -> None:
        """Record an operation's new state."""
        self.operations[operation.operation_id] = operation
        self.state = apply(self.state, operation)

    def put_blob(self, data: bytes, media_type: str) -> llm_pb2.BlobRef:
        """Name new content by its digest and keep it for the commit."""
        blob = llm_pb2.BlobRef(digest=hashlib.sha256(data).hexdigest(), size_bytes=len(data), media_type=media_type)
        self.blobs[blob.digest] = BlobSource(blob=blob, data=data)
        return blob

    def keep_blobs(self, message: item_pb2.Input, contents: Mapping[str, bytes]) -> None:
        """Keep the blobs that an input's parts name."""
        for part in message.content.parts:
            body = part.image if part.WhichOneof("part") == "image" else part.text
            if body.HasField("blob"):
                digest = body.blob.digest
                self.blobs[digest] = BlobSource(blob=body.blob, data=contents.get(digest))

    def with_long_texts_as_blobs(self, result: item_pb2.CallResult) -> item_pb2.CallResult:
        """Return a result whose long texts are blobs of this commit; the same object where none is long."""
        if all(len(part.text.text.encode()) <= MAX_INLINE_TEXT_BYTES for part in result.parts):
            return result
        stored = item_pb2.CallResult()
        stored.CopyFrom(result)
        for part in stored.parts:
            data = part.text.text.encode()
            if len(data) > MAX_INLINE_TEXT_BYTES:
                part.text.blob.CopyFrom(self.put_blob(data, "text/plain; charset=utf-8"))
        return stored

    def update_volatile(self, **changes: object) -> None:
        """Change volatile facts of the decision."""
        if all(getattr(self.volatile, name) is value for name, value in changes.items()):
            return  # the usual case: a rule says again what holds anyway
        self.volatile = replace(self.volatile, **changes)  # type: ignore[arg-type]  # field names are the caller's
