"""What a watch tells a person: everything recorded, once, whatever became of the deltas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clients.cli.view import SessionView
from clients.cli.view_events import (
    CallEnded,
    CallStarted,
    Noted,
    TextEnded,
    TextPiece,
    TextVoided,
    TurnStarted,
    UserSaid,
    ViewEvent,
)
from tests.support.watches import RUNNING, Watch, ended, exited, response, running, started, turn, user
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2


def feed(view: SessionView, *messages: coordinator_pb2.WatchSessionResponse) -> list[ViewEvent]:
    return [event for message in messages for event in view.feed(message)]


def shown_text(events: list[ViewEvent]) -> str:
    """Return the words that stand in the end: what was voided is gone."""
    texts: list[str] = []
    pieces = ""
    for event in events:
        match event:
            case TextPiece():
                pieces += event.text
            case TextVoided():
                pieces = ""
            case TextEnded():
                texts.append(pieces)
                pieces = ""
            case _:
                pass
    return "|".join(texts)


def test_streamed_words_are_told_once() -> None:
    view, watch = SessionView(), Watch()
    events = feed(
        view,
        watch.change(user("hi"), turn("t1"), rest=RUNNING),
        watch.text("t1", "Hel"),
        watch.text("t1", "lo."),
        watch.change(response("t1", "Hello.")),
    )
    assert [type(event) for event in events[:2]] == [UserSaid, TurnStarted]
    assert [event.text for event in events if isinstance(event, TextPiece)] == ["Hel", "lo."]
    assert shown_text(events) == "Hello."


def test_words_that_overtake_their_turn_wait_for_it() -> None:
    view, watch = SessionView(), Watch()
    early = watch.text("t1", "Hello.")
    assert feed(view, early) == []
    events = feed(view, watch.change(user("hi"), turn("t1")), watch.change(response("t1", "Hello.")))
    assert [type(event) for event in events] == [UserSaid, TurnStarted, TextPiece, TextEnded]


def test_lost_and_repeated_deltas_do_not_garble_the_words() -> None:
    view, watch = SessionView(), Watch()
    events = feed(
        view,
        watch.change(turn("t1")),
        watch.text("t1", "Hello"),
        watch.text("t1", "llo", offset=2),
        watch.text("t1", "lost before this", offset=40),
        watch.change(response("t1", "Hello, world.")),
    )
    assert shown_text(events) == "Hello, world."
    assert not any(isinstance(event, TextVoided) for event in events)


def test_a_repeated_attempt_voids_the_words_of_the_first() -> None:
    view, watch = SessionView(), Watch()
    events = feed(
        view,
        watch.change(turn("t1")),
        watch.text("t1", "I thi"),
        watch.text("t1", "No. ", attempt=2),
        watch.text("t1", "nk", attempt=1),
        watch.change(response("t1", "No. Yes.")),
    )
    assert shown_text(events) == "No. Yes."


def test_an_interrupted_turn_voids_its_words() -> None:
    view, watch = SessionView(), Watch()
    events = feed(
        view, watch.change(turn("t1")), watch.text("t1", "I was about"), watch.change(user("stop that"), turn("t2"))
    )
    assert [type(event) for event in events] == [TurnStarted, TextPiece, UserSaid, TextVoided, TurnStarted]


def test_a_watch_that_begins_again_tells_no_item_twice() -> None:
    view, watch = SessionView(), Watch()
    change = watch.change(user("hi"), turn("t1"), response("t1", "Hello."))
    assert feed(view, change)
    assert feed(view, change) == []


def test_a_call_is_told_at_start_and_end_with_what_it_ran() -> None:
    view, watch = SessionView(), Watch()
    feed(view, watch.change(turn("t1")))
    begin = feed(view, watch.change(response("t1", commands=[("c1", "make\ntest")]), started("c1", "o1")))
    assert [event.call.title for event in begin if isinstance(event, CallStarted)] == ["$ make  (+1 line)"]
    feed(view, watch.change(operations=[running("o1", "c1")]), watch.output("o1", b"one\n"))
    feed(view, watch.output("o1", b"one\n", offset=0))
    assert [call.tail for call in view.running_calls] == ["one\n"]
    end = feed(view, watch.change(ended("c1", "o1"), operations=[exited("o1", "c1", took_s=2.5)]))
    assert [event.call.elapsed_s for event in end if isinstance(event, CallEnded)] == [2.5]
    assert view.running_calls == []


def test_history_before_a_run_is_known_but_not_counted() -> None:
    view, watch = SessionView(), Watch()
    feed(view, watch.change(turn("t1"), response("t1", commands=[("c1", "sleep 9")]), started("c1", "o1")))
    view.begin_run(watch.sequence, watch.sequence)
    assert (view.turns, view.output_tokens) == (0, 0)
    assert [call.title for call in view.running_calls] == ["$ sleep 9"]
    assert view.has_pending_work


def test_an_answer_without_calls_leaves_nothing_pending() -> None:
    view, watch = SessionView(), Watch()
    feed(view, watch.change(user("hi"), turn("t1"), response("t1", "Hello.")))
    assert not view.has_pending_work


def test_a_result_that_comes_after_the_last_answer_is_pending() -> None:
    view, watch = SessionView(), Watch()
    feed(view, watch.change(turn("t1"), response("t1", commands=[("c1", "sleep 9")]), started("c1", "o1")))
    feed(view, watch.change(turn("t2"), response("t2", "I wait.")))
    assert not view.has_pending_work
    feed(view, watch.change(ended("c1", "o1"), operations=[exited("o1", "c1")]))
    assert view.has_pending_work


@given(st.lists(st.text(max_size=8), min_size=1, max_size=12), st.data())
def test_whatever_of_the_deltas_arrives_the_recorded_words_are_told(pieces: list[str], data: st.DataObject) -> None:
    view, watch = SessionView(), Watch()
    whole = "".join(pieces) + "."
    deltas = [watch.text("t1", piece) for piece in pieces]
    arrived = [delta for delta in deltas if data.draw(st.booleans())]
    repeated = [delta for delta in arrived for _ in range(data.draw(st.integers(1, 2)))]
    events = feed(view, watch.change(turn("t1")), *repeated, watch.change(response("t1", whole)))
    assert shown_text(events) == whole


def compaction_turn(turn_id: str) -> item_pb2.Item:
    return item_pb2.Item(turn=item_pb2.Turn(turn_id=turn_id, kind=item_pb2.TURN_KIND_COMPACTION))


def test_a_summary_is_noted_and_not_taken_for_the_models_words() -> None:
    view, watch = SessionView(), Watch()
    summary = item_pb2.Compaction(turn_id="t2", through_sequence=3, summary="long and dull")
    events = feed(
        view,
        watch.change(user("hi"), compaction_turn("t2"), rest=RUNNING),
        watch.text("t2", "long and "),
        watch.change(response("t2", "long and dull"), item_pb2.Item(compaction=summary), turn("t3")),
        watch.text("t3", "Hello."),
        watch.change(response("t3", "Hello.")),
    )
    assert shown_text(events) == "Hello."
    assert [event.text for event in events if isinstance(event, Noted)] == [
        "summarising older turns, to make room in the model's context",
        "turns up to item 3 are replaced by a summary",
    ]
    assert view.turns == 1


def test_limits_and_hints_are_told_for_what_they_are() -> None:
    stop = item_pb2.Stop(
        mode=item_pb2.STOP_MODE_HARD, reason="LIMIT_TURNS: the limit of 2 turns is reached", is_limit=True
    )
    hint = item_pb2.Heartbeat(reason="[hint] Try another way. This note comes from the harness.")
    events = feed(
        SessionView(),
        Watch().change(
            *(
                item_pb2.Item(input=item_pb2.Input(input_id=name, control=control))
                for name, control in (("a", item_pb2.Control(stop=stop)), ("b", item_pb2.Control(heartbeat=hint)))
            )
        ),
    )
    assert [event.text for event in events if isinstance(event, Noted)] == [
        "stopped by a limit of the session: LIMIT_TURNS: the limit of 2 turns is reached",
        "the model is told: Try another way",
    ]
