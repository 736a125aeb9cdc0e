"""An input is accepted once, for ever; the same ID with other content is refused and changes nothing."""

from __future__ import annotations

from harness.coordinator.protocol import Answer, BlobSource, InputArrived, Refusal
from harness.errors import AlreadyExistsError
from harness.inbox import blob_ref, externalise, normalise_input
from tests.support.session_driver import INSTANCE, says, stop_input, text_input
from tests.support.session_scenes import HARD, accepted, asked_session, idle_session, nothing_happened, refusals
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2


def test_it_is_answered_with_its_place_after_the_commit_that_holds_it() -> None:
    driver = idle_session()
    decision = driver.step(InputArrived(ticket=7, message=text_input("a", "hello")))
    assert decision.answers == (Answer(ticket=7, sequence=4),)
    assert decision.items[0].input == text_input("a", "hello")


def test_the_same_again_is_a_duplicate_that_changes_nothing() -> None:
    driver = idle_session()
    driver.submit(text_input("a", "hello"))
    driver.answer(says("hi"))
    driver.restart()
    driver.connect(INSTANCE)
    assert nothing_happened(driver.submit(text_input("a", "hello")))
    assert accepted(driver)[-2:] == [(4, False), (4, True)]


def test_the_same_twice_in_one_moment_is_recorded_once() -> None:
    driver = idle_session()
    twice = [InputArrived(ticket=number, message=text_input("a", "hello")) for number in (1, 2)]
    decision = driver.step(*twice)
    assert decision.answers == (Answer(ticket=1, sequence=4), Answer(ticket=2, sequence=4, is_duplicate=True))
    assert [item.WhichOneof("item") for item in decision.items] == ["input", "turn"]


def test_a_hundred_submissions_of_one_input_are_recorded_once() -> None:
    driver = idle_session()
    driver.step(*(InputArrived(ticket=number, message=text_input("a", "hello")) for number in range(100)))
    assert driver.kinds().count("input") == 2


def test_other_content_under_a_known_id_is_refused() -> None:
    driver = idle_session()
    driver.submit(text_input("a", "hello"))
    before = driver.state
    decision = driver.step(InputArrived(ticket=7, message=text_input("a", "delete it")))
    (refusal,) = decision.answers
    assert isinstance(refusal, Refusal)
    assert (type(refusal.error), refusal.error.reason, dict(refusal.error.metadata)) == (
        AlreadyExistsError,
        "INPUT_ID_CONFLICT",
        {"input_id": "a", "sequence": "4"},
    )
    assert nothing_happened(decision)
    assert driver.state == before


def test_another_kind_or_delivery_under_a_known_id_is_refused_too() -> None:
    driver = idle_session()
    driver.submit(text_input("a", "hello"))
    driver.submit(text_input("a", "hello", after_turn=True))
    driver.submit(stop_input("a", HARD))
    assert refusals(driver) == ["INPUT_ID_CONFLICT"] * 2


def test_controls_are_deduplicated_like_texts() -> None:
    driver = asked_session()
    driver.submit(stop_input("s", HARD, "enough"))
    driver.say("go on")
    assert nothing_happened(driver.submit(stop_input("s", HARD, "enough")))
    assert driver.volatile.request_turn_id


def test_the_same_content_under_other_ids_is_two_inputs() -> None:
    driver = idle_session()
    driver.step(*(InputArrived(ticket=number, message=text_input(f"y{number}", "yes")) for number in range(2)))
    assert driver.sent()[-2:] == [("user", "yes"), ("user", "yes")]


def test_inputs_keep_their_order() -> None:
    driver = idle_session()
    driver.step(*(InputArrived(ticket=number, message=text_input(f"n{number}", str(number))) for number in range(20)))
    assert [text for _, text in driver.sent()[-20:]] == [str(number) for number in range(20)]


def test_a_refused_input_beside_good_ones_costs_them_nothing() -> None:
    driver = idle_session()
    good, bad = text_input("a", "hello"), text_input("a", "other")
    decision = driver.step(InputArrived(ticket=1, message=good), InputArrived(ticket=2, message=bad))
    assert [type(one) for one in decision.answers] == [Answer, Refusal]
    assert decision.items[0].input == good


def test_its_long_text_goes_into_the_commit_as_a_blob() -> None:
    driver = idle_session()
    text = "x" * 70_000
    message = item_pb2.Input(
        input_id="long",
        content=item_pb2.Content(parts=[llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))]),
    )
    stored, blobs = externalise(normalise_input(message))
    decision = driver.step(InputArrived(ticket=1, message=stored, blobs=blobs))
    blob = blob_ref(text.encode(), "text/plain; charset=utf-8")
    assert decision.blobs == (BlobSource(blob=blob, data=text.encode()),)
    assert decision.items[0].input.content.parts[0].text.blob == blob
    turn = driver.items[-1].turn
    assert turn.totals.text_bytes == turn.prompt.size_bytes + len("do it") + len("ready") + len(text)


def test_controls_are_not_in_context() -> None:
    driver = asked_session()
    driver.submit(stop_input("s", item_pb2.STOP_MODE_WHEN_IDLE))
    driver.say("more")
    assert driver.sent() == [("user", "do it"), ("user", "more")]
