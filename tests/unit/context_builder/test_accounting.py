"""What a request takes: by the provider's own count as far as it goes, by sizes for what is new."""

from __future__ import annotations

from harness.context_builder import estimated_tokens, next_request
from tests.support.context_items import PROMPT, answered, call, final, history, reasoning, started, text, turn, user
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2

BLOB = llm_pb2.BlobRef(digest=PROMPT, size_bytes=4_000)


def said(value: str) -> llm_pb2.OutputItem:
    return llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text=value))


def counted(item: item_pb2.Item, **usage: int) -> item_pb2.Item:
    for name, amount in usage.items():
        setattr(item.model_response.output.usage, name, amount)
    return item


def asked() -> item_pb2.Item:
    item = turn()
    item.turn.prompt.size_bytes = BLOB.size_bytes
    return item


def tokens(*items: item_pb2.Item, model: str = "m1") -> int:
    context = history(*items)
    request = next_request(context, provider="scripted", model=model, prompt_digest=PROMPT)
    return estimated_tokens(context, request, BLOB)


def test_before_the_first_answer_sizes_are_all_there_is() -> None:
    assert tokens(user("x" * 400)) == (4_000 + 400) // 4


def test_the_providers_count_is_taken_and_what_is_new_is_added() -> None:
    items = [user("x" * 400), asked(), counted(answered(said("y" * 40)), input_tokens=1_000, output_tokens=12)]
    assert tokens(*items) == 1_012
    assert tokens(*items, user("z" * 80)) == 1_012 + 20


def test_dense_text_is_taken_to_go_on_as_dense() -> None:
    items = [user("x" * 400), asked(), counted(answered(said("y" * 40)), input_tokens=2_200, output_tokens=20)]
    assert 2_220 + 35 <= tokens(*items, user("z" * 80)) <= 2_220 + 45


def test_a_count_beyond_a_token_a_byte_is_not_believed_of_what_is_new() -> None:
    items = [user("x"), asked(), counted(answered(said("y")), input_tokens=900_000, output_tokens=1)]
    assert tokens(*items, user("z" * 80)) <= 900_001 + 80


def test_a_server_that_counts_only_what_was_new_to_it_does_not_empty_the_window() -> None:
    items = [user("x" * 40_000), asked(), counted(answered(said("y")), input_tokens=7, output_tokens=1)]
    assert tokens(*items) >= 44_000 // 16


def test_reasoning_that_is_not_sent_back_is_not_counted() -> None:
    usage = {"input_tokens": 1_100, "output_tokens": 500, "reasoning_tokens": 480}
    assert tokens(user("x" * 400), asked(), counted(answered(said("so")), **usage)) == 1_120
    kept = answered(reasoning('{"it": "thought"}'), said("so"))
    assert tokens(user("x" * 400), asked(), counted(kept, **usage)) == 1_600


def test_the_latest_count_wins() -> None:
    first = [user("x" * 400), asked(), counted(answered(call("c1")), input_tokens=1_100, output_tokens=5)]
    second = [started("c1"), final("c1", text("r" * 400)), asked()]
    assert tokens(*first, *second, counted(answered(said("so")), input_tokens=1_300, output_tokens=7)) == 1_307


def test_a_provider_that_does_not_count_changes_nothing() -> None:
    items = [user("x" * 400), asked(), answered(said("y" * 40))]
    assert tokens(*items) == (4_000 + 400 + 40) // 4


def test_after_a_break_the_density_stays() -> None:
    thought = answered(reasoning("r" * 400), said("y" * 40))
    items = [user("x" * 400), asked(), counted(thought, input_tokens=2_200, output_tokens=220)]
    # Another model gets no reasoning; 4,440 bytes at twice the usual density are left.
    assert 2_100 <= tokens(*items, model="m2") <= 2_300
