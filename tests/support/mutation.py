"""Makes hostile bytes out of sound ones: the same seed gives the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

MAX_BYTES = 256 * 1024
"""Of what is made: enough for deep nesting and long numbers, little enough to be quick."""

_NUMBERS = (
    b"0",
    b"-1",
    b"1e999",
    b"-0.0",
    b"1e-400",
    b"9" * 400,
    b"9" * 5_000,
    b"18446744073709551616",
    b"2147483648",
    b"NaN",
)
JSON_TOKENS: Sequence[bytes] = (
    *_NUMBERS,
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"true", b"{}", b"[]", b'""'),
    *(rb'"\ud800"', rb'"\u0000"', rb"\udc00", b"\xed\xa0\x80", b"\xff", b"\0", b"\xef\xbb\xbf"),
    *(b"[" * 2_000, b'{"a":' * 2_000, b'"' + b"x" * 70_000 + b'"', b'"a":1,"a":2'),
)
YAML_TOKENS: Sequence[bytes] = (
    *JSON_TOKENS,
    *(b"---\n", b"\n...\n", b"&a ", b"*a", b"!!python/object:os.system ", b"!!binary ", b"<<: *a\n", b"? ", b"- "),
    *(b"|\n", b">-\n", b"\t", b"%YAML 9.9\n", b"!<tag:x> ", b"2001-01-01", b'"\\UFFFFFFFF"', b"\xc2\x85", b"1:2:3"),
    *(b"- " * 300, b"  " * 400 + b"a:\n", b"&a [*a, *a]\n", b"# \xe2\x80\xa8"),
)
# Lengths, groups, unknown fields, over-long varints, deep nesting.
PROTOBUF_TOKENS: Sequence[bytes] = (
    *(b"\xff" * 9 + b"\x01", b"\xff" * 5 + b"\x0f", b"\x80" * 9 + b"\x02", b"\xf8\xff\xff\xff\x0f", b"\0", b"\x7f"),
    *(b"\x0b", b"\x0c", b"\xc2\x3e\x00", b"\xa2\x06\x00", b"\x0a\xff\xff\xff\xff\x0f", b"\x08\x96\x01", b"\x12\0"),
    b"\x0b" * 300,
)
TEXT_TOKENS: Sequence[bytes] = (
    *_NUMBERS,
    *(b"\r\n", b"\r", b"\n\n", b"\0", b"\x1b[", b"\x1b]0;", b"\x07", b"\xff\xfe", b"\xe2\x82", b"\xf0\x9f\x98", b": "),
    *(b"x" * 5_000, b"\xef\xbb\xbf", b"(", b")", b" ", b"exit 0\n", b"%s", b"../"),
)
IMAGE_TOKENS: Sequence[bytes] = (
    *(b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\0\0\x75\x30", b"\xff\xd9", b"\xff\xd8", b"\xff\xda"),
    *(b"IEND", b"IDAT", b"iCCP", b"eXIf", b"acTL", b"fcTL", b"zTXt", b"Exif\0\0", b"\x2c", b"\x3b", b"VP8X", b"ANIM"),
)


class Mutator:
    """Draws one hostile input after the other."""

    def __init__(self, seeds: Sequence[bytes], tokens: Sequence[bytes], seed: int) -> None:
        """Take sound inputs, and pieces that matter to their decoder."""
        self._seeds = [one for one in seeds if one] or [b"\0"]
        self._tokens = tokens or (b"\0",)
        self._random = random.Random(seed)
        self._changes: Sequence[Callable[[bytearray], bytearray]] = (
            self._flip_bit,
            self._flip_bit,
            self._set_byte,
            self._cut,
            self._truncate,
            self._insert_token,
            self._insert_token,
            self._replace_by_token,
            self._replace_by_token,
            self._repeat,
            self._splice,
            self._swap,
            self._number,
        )

    def draw(self) -> bytes:
        """Return a seed with one change, a few, or many."""
        made = bytearray(self._random.choice(self._seeds))
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 8))):
            made = self._random.choice(self._changes)(made)
            if not made:
                made = bytearray(self._random.choice(self._tokens))
        return bytes(made[:MAX_BYTES])

    def _span(self, made: bytearray) -> tuple[int, int]:
        start = self._random.randrange(len(made))
        length = self._random.choice((1, 1, 2, 4, 8, 32, len(made)))
        return start, min(len(made), start + length)

    def _flip_bit(self, made: bytearray) -> bytearray:
        made[self._random.randrange(len(made))] ^= 1 << self._random.randrange(8)
        return made

    def _set_byte(self, made: bytearray) -> bytearray:
        made[self._random.randrange(len(made))] = self._random.choice((0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x0D, 0x20))
        return made

    def _cut(self, made: bytearray) -> bytearray:
        start, end = self._span(made)
        return made[:start] + made[end:]

    def _truncate(self, made: bytearray) -> bytearray:
        return made[: self._random.randrange(len(made))]

    def _insert_token(self, made: bytearray) -> bytearray:
        place = self._random.randrange(len(made) + 1)
        return made[:place] + self._random.choice(self._tokens) + made[place:]

    def _replace_by_token(self, made: bytearray) -> bytearray:
        start, end = self._span(made)
        return made[:start] + self._random.choice(self._tokens) + made[end:]

    def _repeat(self, made: bytearray) -> bytearray:
        start, end = self._span(made)
        times = min(self._random.choice((2, 3, 50, 2_000)), 1 + MAX_BYTES // (end - start))
        return made[:end] + made[start:end] * times + made[end:]

    def _splice(self, made: bytearray) -> bytearray:
        other = self._random.choice(self._seeds)
        return made[: self._random.randrange(len(made) + 1)] + other[self._random.randrange(len(other)) :]

    def _swap(self, made: bytearray) -> bytearray:
        (first, end), other = self._span(made), self._random.randrange(len(made))
        piece = made[first:end]
        rest = made[:first] + made[end:]
        return rest[:other] + piece + rest[other:]

    def _number(self, made: bytearray) -> bytearray:
        """Overwrite what may be a length or a count with an extreme, in either byte order."""
        value = self._random.choice((0, 1, 0x7F, 0x80, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF))
        size = self._random.choice((1, 2, 4))
        start = self._random.randrange(len(made))
        order = self._random.choice(("big", "little"))
        number = (value & (256**size - 1)).to_bytes(size, "big")
        made[start : start + size] = number if order == "big" else number[::-1]
        return made
