"""Requests: what is taken, and that what is wrong is named with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.cli.failures import UsageError
from clients.cli.request import Message, RunRequest, parse_request, prompt_request, read_request_file, with_options


def test_a_whole_request_is_taken() -> None:
    text = json.dumps(
        {
            "messages": [{"content": "one", "message_id": "m1"}, {"content": "two", "message_id": "m2"}],
            "system_prompt": "Be brief.",
            "model": "m",
            "provider": "p",
            "session_id": "s",
            "effort": "high",
            "tools": ["Bash"],
            "max_turns": 3,
            "workspace": "/w",
        }
    )
    assert parse_request(text, "r.json", None) == RunRequest(
        messages=(Message(content="one", input_id="m1"), Message(content="two", input_id="m2")),
        system_prompt="Be brief.",
        model="m",
        provider="p",
        session_id="s",
        effort="high",
        tools=("Bash",),
        max_turns=3,
        workspace="/w",
    )


def test_an_input_id_names_the_prompt() -> None:
    assert prompt_request("x", "i1").messages == (Message(content="x", input_id="i1"),)
    assert parse_request('{"prompt": "x"}', "r", "i1").messages == (Message(content="x", input_id="i1"),)


def test_prompts_without_an_id_get_different_ones() -> None:
    ids = {prompt_request("x", None).messages[0].input_id for _ in range(3)}
    assert len(ids) == 3


def test_options_go_before_fields() -> None:
    request = with_options(parse_request('{"prompt": "x", "model": "a"}', "r", None), model="b", provider=None)
    assert (request.model, request.provider) == ("b", None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"promt": "x"}', "'promt'"),
        ('{"prompt": ""}', "prompt"),
        ('{"prompt": "  "}', "blank"),
        ('{"prompt": 1}', "prompt"),
        ('{"prompt": "x", "messages": []}', "both"),
        ('{"messages": "x"}', "messages is not a list"),
        ('{"messages": ["x"]}', "messages[0]"),
        ('{"messages": [{"content": "x", "role": "user"}]}', "'role'"),
        ('{"messages": [{"content": "x"}, {"content": " "}]}', "messages[1]"),
        ('{"messages": [{"content": "x", "message_id": "m"}, {"content": "y", "message_id": "m"}]}', "message_id"),
        ('{"prompt": "x", "tools": "Bash"}', "tools"),
        ('{"prompt": "x", "tools": [1]}', "tools"),
        ('{"prompt": "x", "max_turns": 0}', "max_turns"),
        ('{"prompt": "x", "max_turns": true}', "max_turns"),
        ('{"prompt": "x", "effort": "huge"}', "'huge'"),
        ('{"prompt": "x", "workspace": null}', "workspace"),
    ],
)
def test_a_wrong_request_is_refused_with_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_request(text, "r.json", None)
    line = f"{refusal.value} {refusal.value.what_to_do}"
    assert named in line
    assert "r.json" in line
    assert "\n" not in line


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_json_breaks_the_reading(value: object) -> None:
    try:
        parse_request(json.dumps({"messages": [value], "tools": value}), "r", None)
    except UsageError:
        return


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            read_request_file(str(path), None)
    (tmp_path / "latin.json").write_bytes(b'{"prompt": "\xe4"}')
    with pytest.raises(UsageError, match="UTF-8"):
        read_request_file(str(tmp_path / "latin.json"), None)
