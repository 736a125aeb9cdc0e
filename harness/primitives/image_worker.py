"""The process that decodes images: `python -m harness.primitives.image_worker IDLE_SECONDS BUDGET_SECONDS`.

Speaks frames on its standard streams, one request at a time, and ends by itself: when its standard input ends (its
owner is gone), when it has been idle for long, when a request takes longer than its budget, or after memory ran out. It
holds no credential, writes no file, and its memory is bounded: a hostile image costs its owner one failed request.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import sys
from dataclasses import asdict
from typing import BinaryIO

from harness.errors import HarnessError
from harness.primitives.images import ImageRequest, PreparedImage

FRAME_HEADER = struct.Struct(">I")
"""Length of the frame that follows, in bytes."""

MAX_MEMORY_BYTES = 1024 * 1024 * 1024
"""32,000,000 pixels of four bytes, with source, scaled copy and the decoder's own buffers, take about half."""


def main() -> int:
    """Answer requests until the input ends or stays silent."""
    idle_s, budget_s = float(sys.argv[1]), int(sys.argv[2])
    _confine()
    # What a decoder prints must not mix with the frames.
    with os.fdopen(os.dup(1), "wb") as answers, os.fdopen(os.dup(0), "rb", buffering=0) as requests:
        os.dup2(2, 1)
        while select.select([requests], [], [], idle_s)[0]:
            request = _read_request(requests)
            if request is None:
                break
            # The default action ends the process, also inside a decoder, and also when the owner no longer watches.
            signal.alarm(budget_s)
            is_usable = _answer(request, answers)
            signal.alarm(0)
            if not is_usable:
                break
    return 0


def _confine() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _read_request(requests: BinaryIO) -> ImageRequest | None:
    header = requests.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    (length,) = FRAME_HEADER.unpack(header)
    body = b""
    while len(body) < length:
        piece = requests.read(length - len(body))
        if not piece:
            return None
        body += piece
    return ImageRequest(**json.loads(body))


def _answer(request: ImageRequest, answers: BinaryIO) -> bool:
    """Prepare one image and write the answer; return whether the process is still good for another."""
    # Not at the top: the owner imports this module for its constants, and must not pay for the image library.
    from harness.primitives.image_preparation import prepare_file

    try:
        _write_image(answers, prepare_file(request))
    except HarnessError as error:
        _write_error(answers, error.reason, error.message)
    except MemoryError:
        message = f"file {request.path!r} takes too much memory to decode"
        _write_error(answers, "IMAGE_TOO_MUCH_MEMORY", message)
        return False
    return True


def _write_image(answers: BinaryIO, image: PreparedImage) -> None:
    _write_frame(answers, json.dumps({"facts": asdict(image.facts)}).encode())
    _write_frame(answers, image.content)
    answers.flush()


def _write_error(answers: BinaryIO, reason: str, message: str) -> None:
    _write_frame(answers, json.dumps({"error": {"reason": reason, "message": message}}).encode())
    answers.flush()


def _write_frame(answers: BinaryIO, body: bytes) -> None:
    answers.write(FRAME_HEADER.pack(len(body)))
    answers.write(body)


if __name__ == "__main__":
    sys.exit(main())
