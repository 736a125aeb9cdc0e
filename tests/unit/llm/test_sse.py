from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.llm.sse import Leftover, ServerSentEvent, SSEDecoder, SSEError

TEXTS = "é世界👩‍👩‍👧‍👦 \u2028 \u0085 ﷽ \U0001f468\u200d\U0001f4bb"
STREAM = (
    b"\xef\xbb\xbf: a comment\r\n\r\n"
    + f"event: first\r\ndata: {TEXTS}\r\n\r\n".encode()
    + b"data: one\ndata:two\ndata\n\n"
    + b"id: 7\rretry: 10\rdata:  kept space\r\r"
    + b"event: no-data\n\n"
    + b"unknown: x\ndata: last\n\n"
)
EVENTS = [
    ServerSentEvent(number=1, name="first", data=TEXTS),
    ServerSentEvent(number=2, name="", data="one\ntwo\n"),
    ServerSentEvent(number=3, name="", data=" kept space"),
    ServerSentEvent(number=4, name="", data="last"),
]


def decode(*chunks: bytes) -> tuple[list[ServerSentEvent], Leftover]:
    decoder = SSEDecoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    return events, decoder.finish()


NOTHING_LEFT = Leftover(event=None, is_inside_character=False)


def test_every_single_cut_gives_the_same_events() -> None:
    for cut in range(len(STREAM) + 1):
        assert decode(STREAM[:cut], STREAM[cut:]) == (EVENTS, NOTHING_LEFT), cut


def test_one_byte_per_chunk_gives_the_same_events() -> None:
    assert decode(*(STREAM[place : place + 1] for place in range(len(STREAM)))) == (EVENTS, NOTHING_LEFT)


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_any_cuts_give_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    assert decode(*chunks) == (EVENTS, NOTHING_LEFT)


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="\r\n", codec="utf-8")), st.sampled_from(["\n", "\r\n", "\r"])
        )
    ),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_what_is_written_as_events_is_read_back(payloads: list[tuple[str, str]], cuts: list[int]) -> None:
    stream = "".join(f"data: {text}{end}{end}" for text, end in payloads).encode()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    events, leftover = decode(*(stream[start:end] for start, end in zip(edges, edges[1:], strict=False)))
    assert [event.data for event in events] == [text for text, _ in payloads]
    assert leftover == NOTHING_LEFT


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_arbitrary_bytes_give_events_or_a_format_error(chunks: list[bytes]) -> None:
    try:
        events, _ = decode(*chunks)
    except SSEError:
        return
    assert [event.number for event in events] == list(range(1, len(events) + 1))


def test_forty_events_in_one_chunk_and_one_event_in_forty_chunks() -> None:
    many, _ = decode(b"data: x\n\n" * 40)
    assert len(many) == 40
    one, _ = decode(b"data: ", *([b"abc"] * 38), b"\n\n")
    assert [event.data for event in one] == ["abc" * 38]


@pytest.mark.parametrize(
    ("stream", "leftover"),
    [
        (b"data: half", Leftover(event=ServerSentEvent(number=1, name="", data="half"), is_inside_character=False)),
        (b"data: whole\n", Leftover(event=ServerSentEvent(number=1, name="", data="whole"), is_inside_character=False)),
        (b"data: caf\xc3", Leftover(event=None, is_inside_character=True)),
        (b"data: \xf0\x9f\x98", Leftover(event=None, is_inside_character=True)),
        (b"data: x\n\n: comment", NOTHING_LEFT),
        (b"event: name\n", NOTHING_LEFT),
    ],
)
def test_the_end_of_a_stream_tells_what_was_left(stream: bytes, leftover: Leftover) -> None:
    decoder = SSEDecoder()
    list(decoder.feed(stream))
    assert decoder.finish() == leftover


def test_bytes_that_are_not_utf8_are_refused_at_their_place() -> None:
    with pytest.raises(SSEError, match=r"event 2 is not UTF-8 at byte 2"):
        decode(b"data: ok\n\ndata: ab\xffcd\n\n")


def test_what_came_before_broken_bytes_in_one_chunk_is_not_lost() -> None:
    events = SSEDecoder().feed(b"data: whole\n\ndata: \xff\n\n")
    assert next(events).data == "whole"
    with pytest.raises(SSEError):
        next(events)


@pytest.mark.parametrize("chunk", [b"data: " + b"x" * 60, b"data: 1234567890\n" * 6])
def test_an_event_over_the_bound_is_refused_before_it_ends(chunk: bytes) -> None:
    decoder = SSEDecoder(max_event_bytes=50)
    with pytest.raises(SSEError, match="event 1 is larger than 50 bytes"):
        list(decoder.feed(chunk))


def test_many_small_events_may_exceed_the_bound_of_one() -> None:
    decoder = SSEDecoder(max_event_bytes=50)
    assert len(list(decoder.feed(b"data: 1234567890\n\n: comment\n\n" * 100))) == 100
