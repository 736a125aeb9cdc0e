from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.llm import json_text

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_slices_are_the_exact_text(value: Any, indent: int | str | None, is_ascii: bool) -> None:
    inner = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    text = f' {{ "a" : [1] ,\n"b":{inner} , "c":"b" }}'
    assert json_text.member(text, "b") == inner
    assert json_text.elements(f"[ {inner} , {inner}]") == [inner, inner]


def test_the_last_of_equal_members_counts_as_it_does_for_the_reader() -> None:
    text = '{"a":1,"a": 2}'
    assert (json_text.member(text, "a"), json_text.read(text)) == ("2", {"a": 2})


@pytest.mark.parametrize("text", ["", "[1]", "3", '"x"', "{}"])
def test_a_member_that_is_not_there_is_none(text: str) -> None:
    assert json_text.member(text, "a") is None


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", '{"a":Infinity}', "[" * 100_000, "1" * 5000, '{"a":1}{"b":2}', "{'a':1}", '"\n"']
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(json_text.JSONTextError):
        json_text.read(text)
    assert json_text.read_object(text) is None


@given(st.text(st.characters(), max_size=20))
def test_valid_text_can_always_be_stored(text: str) -> None:
    valid = json_text.valid_text(text + "\ud83d" + "\ude00" + "\udc00")
    valid.encode()
    assert valid.endswith("😀\ufffd")


def test_members_are_written_in_their_order_and_the_same_each_time() -> None:
    assert json_text.write({"b": 1, "a": ["é", 1.5, None]}) == '{"b":1,"a":["é",1.5,null]}'
