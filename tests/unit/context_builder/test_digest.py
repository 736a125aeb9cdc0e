"""The chained digest of what was sent: its form is fixed for ever, and it tells every difference."""

from __future__ import annotations

import hashlib

import pytest

from harness.context_builder import next_request
from tests.support.context_items import PROMPT, answered, built, call, final, history, image, started, text, turn, user
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2


def digest_of(*items: item_pb2.Item) -> str:
    return next_request(history(*items), provider="scripted", model="m1", prompt_digest=PROMPT).digest


def block(*fields: str) -> bytes:
    return b"".join(len(field.encode()).to_bytes(8, "big") + field.encode() for field in fields)


WHOLE = (
    *(user("go"), turn(), answered(call("c1")), started("c1")),
    final("c1", text("done"), image("bb" * 32)),
)


def test_it_chains_from_the_prompt_over_each_entry() -> None:
    expected = bytes.fromhex(PROMPT)
    for fields in (
        ("user", "text", "go"),
        ("assistant", "tool_call", "c1", "Bash", '{"command": "true"}'),
        ("tool_result", "c1", "Bash", "text", "done", "image", "bb" * 32, "image/png"),
    ):
        expected = hashlib.sha256(expected + block(*fields)).digest()
    assert digest_of(*WHOLE) == expected.hex()


def test_it_is_the_one_that_earlier_releases_recorded() -> None:
    assert digest_of(*WHOLE) == "c48b911e5cdcb450023f1b319137663746dd93c4333a399a985c786d6e0b4a06"


@pytest.mark.parametrize(
    "other",
    [
        (user("g"), user("o")),
        (user("go "),),
        (user("go"), user("")),
        (user("go"), turn(), answered(call("c2"))),
        (user("go"), turn(), answered(call("c1")), started("c1"), final("c1", text("done"))),
    ],
)
def test_it_tells_conversations_apart(other: tuple[item_pb2.Item, ...]) -> None:
    assert digest_of(*other) != digest_of(user("go"))
    assert digest_of(*other) != digest_of(*WHOLE)


def test_parts_that_only_join_to_the_same_text_differ() -> None:
    first = final("c1", text("ab"), text("c"))
    second = final("c1", text("a"), text("bc"))
    before = (user("go"), turn(), answered(call("c1")), started("c1"))
    assert digest_of(*before, first) != digest_of(*before, second)


def test_it_does_not_depend_on_where_an_entry_came_from() -> None:
    assert digest_of(user("go")) == digest_of(turn(), turn(), user("go"))


def test_it_is_that_of_the_turn_that_was_recorded() -> None:
    items = [user("go"), turn(), answered(call("c1")), started("c1"), final("c1", text("done"))]
    request = next_request(history(*items), provider="scripted", model="m1", prompt_digest=PROMPT)
    after = history(*items, turn())
    assert after.submitted == request.prefix
    assert built(after) == request.entries


def test_an_answer_extends_it_and_changes_nothing_before() -> None:
    before = history(user("go"), turn())
    after = history(user("go"), turn(), answered(llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text="so"))))
    assert list(after.submitted.entries)[:1] == list(before.submitted.entries)
    expected = hashlib.sha256(before.submitted.digest + block("assistant", "message", "so", "")).digest()
    assert after.submitted.digest == expected
