"""Owns the image workers: starts them on demand, ends what hangs, and turns their answers into results.

Blocking and safe to call from several threads. A worker that crashes, hangs or answers nonsense fails the one request
that it had.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import cast

from harness.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    HarnessError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from harness.primitives.image_worker import FRAME_HEADER
from harness.primitives.images import ImageFacts, ImageRequest, PreparedImage
from harness.primitives.primitives import Attachment, ComputeError, ComputeOutcome

REQUEST_TIMEOUT_S = 20.0
"""A 32-megapixel file takes about two seconds on a busy machine."""

IDLE_S = 60.0
"""An idle worker holds about 40 MB and costs a fifth of a second to start."""

MAX_WORKERS = 2

_MAX_ANSWER_BYTES = 64 * 1024
# Less than a pipe holds, so that a request is written whole and without waiting.
_MAX_REQUEST_BYTES = 60 * 1024


class _WorkerGoneError(Exception):
    """Raised when a worker's answer ends early."""


class _WorkerTimeoutError(Exception):
    """Raised when a worker's answer does not come in time."""


class ImagePool:
    """Up to `max_workers` processes, each with one request at a time."""

    def __init__(
        self, *, max_workers: int = MAX_WORKERS, timeout_s: float = REQUEST_TIMEOUT_S, idle_s: float = IDLE_S
    ) -> None:
        """Start nothing yet."""
        self._slots = threading.BoundedSemaphore(max_workers)
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._is_closed = False

    def prepare(self, request: ImageRequest) -> PreparedImage:
        """Return the prepared image; waits for a free worker at most as long as for the image.

        Raises:
            HarnessError: The worker's own reasons, see `image_preparation`.
            ResourceExhaustedError: IMAGE_WORKERS_BUSY.
            DeadlineExceededError: IMAGE_TIMEOUT.
            FailedPreconditionError: IMAGE_WORKER_CRASHED.
        """
        if not self._slots.acquire(timeout=self._timeout_s):
            raise ResourceExhaustedError("other images are being decoded", reason="IMAGE_WORKERS_BUSY")
        try:
            return self._prepare(request)
        finally:
            self._slots.release()

    def close(self) -> None:
        """End the idle workers, and each busy one once it has answered; idempotent. A later request still works."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()

    def _prepare(self, request: ImageRequest) -> PreparedImage:
        while True:
            worker = self._take()
            is_fresh = worker is None
            if worker is None:
                worker = _Worker(idle_s=self._idle_s, budget_s=self._timeout_s)
            is_usable = False
            try:
                image = worker.ask(request, time.monotonic() + self._timeout_s)
                is_usable = True
                return image
            except HarnessError:
                is_usable = True
                raise
            except _WorkerTimeoutError:
                message = f"file {request.path!r} took longer than {self._timeout_s:g} s to decode"
                raise DeadlineExceededError(message, reason="IMAGE_TIMEOUT") from None
            except _WorkerGoneError as error:
                # A worker that had been idle may have ended between two requests; that says nothing of this one.
                if is_fresh or worker.end() != 0:
                    message = f"the process that decodes images ended on file {request.path!r}: {error}"
                    raise FailedPreconditionError(message, reason="IMAGE_WORKER_CRASHED") from None
            finally:
                self._give_back(worker, is_usable=is_usable)

    def _take(self) -> _Worker | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, worker: _Worker, *, is_usable: bool) -> None:
        with self._lock:
            keep = is_usable and not self._is_closed
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.end()


class _Worker:
    """One process. Used by one thread at a time."""

    def __init__(self, *, idle_s: float, budget_s: float) -> None:
        # Whatever its owner could import the worker can; of its owner's environment it gets nothing else.
        search_path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        # The second is for a request that its owner gave up at the same moment.
        arguments = [f"{idle_s:g}", str(int(budget_s) + 1)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "harness.primitives.image_worker", *arguments],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PYTHONPATH": search_path, "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            # A Ctrl-C at the terminal is its owner's to handle.
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests = self._process.stdin
        self._answers = self._process.stdout

    def ask(self, request: ImageRequest, deadline: float) -> PreparedImage:
        body = json.dumps(asdict(request)).encode()
        if len(body) > _MAX_REQUEST_BYTES:
            raise InvalidArgumentError("the path is too long", reason="PATH_INVALID")
        try:
            self._requests.write(FRAME_HEADER.pack(len(body)) + body)
        except BrokenPipeError as error:
            raise _WorkerGoneError("it was gone before the request") from error
        answer = self._read_answer(deadline)
        if isinstance(answer, HarnessError):
            raise answer
        return PreparedImage(content=self._read_frame(request.max_bytes, deadline), facts=answer)

    def end(self) -> int:
        """End the process, whatever it does, and return its exit code; may be called twice."""
        self._requests.close()
        self._answers.close()
        try:
            # It has either ended or deserves no patience; only its exit code may need a moment.
            return self._process.wait(0.5 if self._process.poll() is None else None)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _read_answer(self, deadline: float) -> ImageFacts | HarnessError:
        try:
            # A foreign process's word: anything unexpected in it raises here, and not later.
            answer = cast(dict[str, dict[str, str]], json.loads(self._read_frame(_MAX_ANSWER_BYTES, deadline)))
            if "error" in answer:
                return FailedPreconditionError(str(answer["error"]["message"]), reason=str(answer["error"]["reason"]))
            facts = answer["facts"]
            return ImageFacts(
                media_type=str(facts["media_type"]),
                width=int(facts["width"]),
                height=int(facts["height"]),
                original_media_type=str(facts["original_media_type"]),
                original_width=int(facts["original_width"]),
                original_height=int(facts["original_height"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _WorkerGoneError("its answer can't be read") from error

    def _read_frame(self, max_bytes: int, deadline: float) -> bytes:
        (length,) = FRAME_HEADER.unpack(self._read_exactly(FRAME_HEADER.size, deadline))
        if length > max_bytes:
            raise _WorkerGoneError("its answer is too long")
        return self._read_exactly(length, deadline)

    def _read_exactly(self, count: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < count:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not _wait_readable(self._answers.fileno(), remaining_s):
                raise _WorkerTimeoutError
            piece = os.read(self._answers.fileno(), min(count - len(content), 1024 * 1024))
            if not piece:
                raise _WorkerGoneError("its answer ended early")
            content += piece
        return bytes(content)


def _wait_readable(descriptor: int, timeout_s: float) -> bool:
    # Not select(): a manager with many files open has descriptors beyond its 1,024.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


_POOL = ImagePool()
atexit.register(_POOL.close)


def view_image(workspace: str, path: str, max_width: int, max_height: int, max_bytes: int) -> ComputeOutcome:
    """Return an image's `ImageFacts` with its bytes as the attachment; a compute function.

    Raises:
        ComputeError: The reason and message of any error of `ImagePool.prepare`.
    """
    request = ImageRequest(
        workspace=workspace, path=path, max_width=max_width, max_height=max_height, max_bytes=max_bytes
    )
    try:
        image = _POOL.prepare(request)
    except HarnessError as error:
        raise ComputeError(error.reason, error.message) from error
    return ComputeOutcome(
        value=image.facts, attachments=(Attachment(data=image.content, media_type=image.facts.media_type),)
    )
