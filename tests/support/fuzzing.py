"""Runs a decoder over a corpus and over what is made of it, and says which bytes broke which promise.

A decoder reads bytes that come from outside. Whatever they are, it returns or raises one of the errors that it
declares, in bounded time. Its corpus is `tests/corpora/NAME/`: sound inputs, and every input that once broke it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.mutation import Mutator

CORPORA = Path(__file__).resolve().parents[1] / "corpora"

SHORT_ROUNDS = 500
SHORT_S = 1.0
LONG_ROUNDS = 200_000
LONG_S = 60.0

MAX_TEXT_CHARS = 2_000
"""Of an error's text."""

_SHOWN_BYTES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One reader of bytes from outside."""

    name: str
    """Also its folder in the corpora."""

    decode: Callable[[bytes], object]
    """Decodes, and checks what comes out. Raises AssertionError where that is not what was promised."""

    errors: tuple[type[Exception], ...] = ()
    """What it may raise."""

    tokens: Sequence[bytes] = ()
    """Pieces that matter to it."""

    max_cpu_s: float = 1.0
    """Processor time that one input may take."""


def corpus(name: str) -> dict[str, bytes]:
    """Return the files of a decoder's corpus by name."""
    return {path.name: path.read_bytes() for path in sorted((CORPORA / name).iterdir())}


def try_input(decoder: Decoder, data: bytes, origin: str) -> None:
    """Decode one input and fail with what it is where the decoder breaks its promise."""
    begin_s = time.thread_time()
    try:
        decoder.decode(data)
    except decoder.errors as error:
        text = str(error)
        # What is said of bad bytes is stored, sent and shown: it must be sound and short itself.
        if not 0 < len(text) <= MAX_TEXT_CHARS or "\0" in text or not _is_storable(text):
            shown = f"{len(text)} characters that begin {text[:_SHOWN_BYTES]!r}"
            raise AssertionError(f"{decoder.name} said {shown} of {origin}") from None
    except Exception as error:
        raise AssertionError(
            f"{decoder.name} broke on {origin}: {type(error).__name__}: {str(error)[:_SHOWN_BYTES]}\n"
            f"keep it in tests/corpora/{decoder.name}/: {data[:_SHOWN_BYTES]!r}"
        ) from error
    elapsed_s = time.thread_time() - begin_s
    assert elapsed_s <= decoder.max_cpu_s, (
        f"{decoder.name} took {elapsed_s:.1f} s for {origin}: {data[:_SHOWN_BYTES]!r}"
    )


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fuzz(decoder: Decoder, *, rounds: int, within_s: float, run: int = 0) -> int:
    """Try inputs made of the corpus, always the same for a `run`; return how many there was time for."""
    seed = zlib.crc32(decoder.name.encode()) + run
    mutator = Mutator(list(corpus(decoder.name).values()), decoder.tokens, seed)
    deadline = time.monotonic() + within_s
    for number in range(rounds):
        if time.monotonic() > deadline:
            return number
        try_input(decoder, mutator.draw(), f"input {number} of run {run}")
    return rounds
