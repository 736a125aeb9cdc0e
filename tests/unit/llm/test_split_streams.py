"""Whole answers cut at every offset, through decoder and fold together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.llm.dialect import Delta
from harness.llm.providers import dialect_of
from harness.llm.request_parts import Quirks
from harness.llm.sse import SSEDecoder
from tests.support.llm import WIRE_FORMATS
from tests.support.provider_replies import whole_stream
from unreal_agent.llm.v1 import llm_pb2

TEXT = "Crème 世界 👩‍👩‍👧 ok"
CALLS = [("c1", "Bash", '{"command":"echo 世"}')]


def fold(wire_format: str, *chunks: bytes) -> tuple[list[Delta], llm_pb2.ModelOutput]:
    made = dialect_of(wire_format, Quirks()).fold(1)
    decoder = SSEDecoder()
    deltas = [delta for chunk in chunks for event in decoder.feed(chunk) for delta in made.feed(event)]
    assert made.is_whole
    return deltas, made.output()


@pytest.mark.parametrize("wire_format", WIRE_FORMATS)
def test_every_single_cut_gives_the_same_answer(wire_format: str) -> None:
    stream = whole_stream(wire_format, TEXT, CALLS)
    whole = fold(wire_format, stream)
    assert "".join(item.message.text for item in whole[1].items) == TEXT
    for cut in range(len(stream)):
        assert fold(wire_format, stream[:cut], stream[cut:]) == whole, cut


@given(st.sampled_from(WIRE_FORMATS), st.text(st.characters(codec="utf-8")), st.lists(st.integers(0, 3000), max_size=9))
def test_any_text_in_any_chunks_arrives_whole(wire_format: str, text: str, cuts: list[int]) -> None:
    stream = whole_stream(wire_format, text)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    _, output = fold(wire_format, *(stream[start:end] for start, end in zip(edges, edges[1:], strict=False)))
    assert "".join(item.message.text for item in output.items) == text
