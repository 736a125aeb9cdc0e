"""A result is cut to a size at characters, in the middle, and says so."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from harness.tools.presentation import text_part
from harness.tools.truncation import cut_result
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

IMAGE = llm_pb2.ContentPart(
    image=llm_pb2.ImagePart(blob=llm_pb2.BlobRef(digest="0" * 64, size_bytes=9), media_type="image/png")
)
MARKER = re.compile(r"\n\[\.\.\. (\d+) bytes left out here: window \.\.\.\]\n")


def result(*parts: llm_pb2.ContentPart) -> item_pb2.CallResult:
    return item_pb2.CallResult(outcome=item_pb2.CALL_OUTCOME_COMPLETED, parts=parts)


def texts(cut: item_pb2.CallResult) -> str:
    return "".join(part.text.text for part in cut.parts)


def test_result_that_fits_is_returned_itself() -> None:
    whole = result(text_part("x" * 100))

    assert cut_result(whole, 100, "window") is whole


def test_beginning_and_end_stay_and_the_gap_is_counted() -> None:
    cut = cut_result(result(text_part("a" * 500 + "é" * 500 + "z" * 500)), 200, "window")

    text = texts(cut)
    assert len(text) == 200
    assert text.startswith("a" * 50)
    assert text.endswith("z" * 50)
    assert cut.truncation == item_pb2.RenderedTruncation(omitted_bytes=2_000 - (200 - 44), reason="window")
    assert "[... 1844 bytes left out here: window ...]" in text


def test_images_stay_where_they_are() -> None:
    cut = cut_result(result(text_part("a" * 500), IMAGE, text_part("b" * 500), IMAGE), 100, "window")

    assert [part.WhichOneof("part") for part in cut.parts] == ["text", "image", "text", "image"]
    assert [part for part in cut.parts if part.HasField("image")] == [IMAGE, IMAGE]


def test_second_cut_adds_to_the_first() -> None:
    first = cut_result(result(text_part("a" * 1_000)), 500, "one call")

    second = cut_result(first, 200, "all calls")

    assert second.truncation.reason == "one call; all calls"
    assert second.truncation.omitted_bytes > first.truncation.omitted_bytes


@given(
    parts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=120) | st.none(), max_size=5),
    max_chars=st.integers(min_value=0, max_value=300),
)
def test_cut_keeps_a_head_and_a_tail_of_the_very_text(parts: list[str | None], max_chars: int) -> None:
    whole = result(*(IMAGE if one is None else text_part(one) for one in parts))
    before = whole.SerializeToString(deterministic=True)

    cut = cut_result(whole, max_chars, "window")

    assert whole.SerializeToString(deterministic=True) == before
    assert [part for part in cut.parts if part.HasField("image")] == [IMAGE] * parts.count(None)
    source = texts(whole)
    if len(source) <= max_chars:
        assert cut == whole
        return
    text = texts(cut)
    (marker,) = MARKER.finditer(text)
    head, tail = text[: marker.start()], text[marker.end() :]
    assert len(text) <= max(max_chars, len(marker.group()))
    assert source.startswith(head)
    assert source.endswith(tail)
    assert int(marker.group(1)) == len(source.encode()) - len((head + tail).encode()) == cut.truncation.omitted_bytes
