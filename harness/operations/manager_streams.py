"""The manager's long answers: watches with their attachments, and output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from harness.errors import InvalidArgumentError, NotFoundError, UnavailableError
from harness.operations import output_files
from harness.operations.engine import Engine, Entry
from harness.operations.operations import is_terminal
from harness.operations.watch_hub import Watcher, WatchHub
from harness.primitives import process_records
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStreams:
    """Watches and reads of one manager."""

    instance_id: str
    engine: Engine
    hub: WatchHub
    keepalive_s: float
    closing: asyncio.Event
    """Set once the manager closes: watches end, followed output is not followed further."""

    async def watch(
        self, request: manager_pb2.WatchOperationsRequest
    ) -> AsyncIterator[manager_pb2.WatchOperationsResponse]:
        """Yield a hello, what is not acknowledged, then each new state."""
        missed = sorted(
            (entry for entry in self.engine.entries.values() if self._is_missed(entry, request)),
            key=lambda entry: entry.position,
        )
        with self.hub.watch(request.owner, [entry.operation_id for entry in missed]) as watcher:
            hello = manager_pb2.WatchHello(instance_id=self.instance_id, position=self.engine.position)
            yield manager_pb2.WatchOperationsResponse(hello=hello)
            while not self.closing.is_set():
                async for response in self._new_states(watcher):
                    yield response
                if not await watcher.wait(self.keepalive_s):
                    yield manager_pb2.WatchOperationsResponse(keepalive=manager_pb2.Keepalive())
        raise UnavailableError("the operation manager closes", reason="MANAGER_CLOSED", retry_after_s=1.0)

    def _is_missed(self, entry: Entry, request: manager_pb2.WatchOperationsRequest) -> bool:
        return (
            entry.accepted is None
            and entry.position > request.after_position
            and entry.durable.step > entry.acknowledged_step
            and not entry.is_discarded
            and request.owner in ("", self.engine.owner_of(entry.session_id))
        )

    async def _new_states(self, watcher: Watcher) -> AsyncIterator[manager_pb2.WatchOperationsResponse]:
        while (operation_id := watcher.pop()) is not None:
            entry = self.engine.entries.get(operation_id)
            if entry is None or entry.is_discarded:
                continue
            operation, position = entry.durable, entry.position
            for ref in output_files.find_attachments(operation, self.engine.attachments(operation_id)):
                async for chunk in self._attachment(operation_id, ref):
                    yield manager_pb2.WatchOperationsResponse(attachment=chunk)
            update = manager_pb2.OperationUpdate(position=position, operation=operation)
            yield manager_pb2.WatchOperationsResponse(update=update)

    async def _attachment(self, operation_id: str, ref: llm_pb2.BlobRef) -> AsyncIterator[manager_pb2.AttachmentChunk]:
        path = self.engine.attachments(operation_id) / ref.digest
        offset = 0
        while offset < ref.size_bytes:
            data = await asyncio.to_thread(output_files.read_piece, path, offset, output_files.PIECE_BYTES)
            if not data:
                return
            yield manager_pb2.AttachmentChunk(operation_id=operation_id, blob=ref, offset=offset, data=data)
            offset += len(data)

    async def read(
        self, request: manager_pb2.ReadOutputRequest, operation: operation_pb2.Operation, attempt: int
    ) -> AsyncGenerator[manager_pb2.ReadOutputResponse, None]:
        """Yield the output or an attachment of an operation whose state was `operation` a moment ago."""
        operation_id = request.operation_id
        if request.attachment_digest:
            path = self._attachment_path(operation_id, request.attachment_digest)
        else:
            path = self._output_path(operation, attempt, request.stream)

        def current() -> operation_pb2.Operation:
            entry = self.engine.entries.get(operation_id)
            return entry.durable if entry else operation

        def is_growing() -> bool:
            return operation_id in self.engine.entries and not is_terminal(current()) and not self.closing.is_set()

        def frozen_bytes() -> int | None:
            if request.attachment_digest or not current().bash.has_exit:
                return None
            is_error = request.stream == operation_pb2.OUTPUT_STREAM_STDERR
            return (current().bash.stderr if is_error else current().bash.stdout).total_bytes

        output = output_files.OutputFile(path=path, is_growing=is_growing, frozen_bytes=frozen_bytes)
        async for response in output_files.read_file(output, request):
            yield response

    def _attachment_path(self, operation_id: str, digest: str) -> Path:
        if len(digest) != 64 or not digest.isalnum():
            raise InvalidArgumentError("attachment_digest must be a SHA-256 in hexadecimal", reason="INVALID_DIGEST")
        return self.engine.attachments(operation_id) / digest

    def _output_path(
        self, operation: operation_pb2.Operation, attempt: int, stream: operation_pb2.OutputStream.ValueType
    ) -> Path:
        names = {
            operation_pb2.OUTPUT_STREAM_STDOUT: process_records.STDOUT,
            operation_pb2.OUTPUT_STREAM_STDERR: process_records.STDERR,
        }
        if stream not in names:
            raise InvalidArgumentError("stream must be STDOUT or STDERR", reason="INVALID_STREAM")
        if attempt == 0:
            raise NotFoundError(f"operation {operation.operation_id!r} has written nothing", reason="OUTPUT_NOT_FOUND")
        return self.engine.directory / operation.operation_id / str(attempt) / names[stream]
