"""Whatever happens in whatever order, a session keeps its rules, replays to the same state and is never dead."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.histories import Chaos
from tests.support.session_oracle import assert_shown_exactly_once
from unreal_agent.session.v1 import item_pb2, session_pb2

ACTIONS = st.lists(st.tuples(st.sampled_from(Chaos.actions()), st.integers(0, 2**20)), max_size=60)
RESTING = {session_pb2.SESSION_STATE_IDLE, session_pb2.SESSION_STATE_STOPPED, session_pb2.SESSION_STATE_FAILED}


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=80)
@given(st.booleans(), ACTIONS)
def test_a_session_survives_whatever_happens(is_inspected: bool, actions: list[tuple[str, int]]) -> None:
    _live(is_inspected, actions)


@pytest.mark.long
@pytest.mark.timeout(600)
@settings(max_examples=1_000)
@given(st.booleans(), ACTIONS)
def test_a_session_survives_whatever_happens_for_long(is_inspected: bool, actions: list[tuple[str, int]]) -> None:
    _live(is_inspected, actions)


@pytest.mark.slow
@pytest.mark.timeout(120)
@settings(max_examples=6)
@given(st.integers(0, 2**32))
def test_a_long_session_survives_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    actions = [(rng.choice(Chaos.actions()), rng.randrange(2**20)) for _ in range(150)]
    _live(True, actions)


def _live(is_inspected: bool, actions: list[tuple[str, int]]) -> None:
    chaos = Chaos()
    chaos.begin(is_inspected=is_inspected)
    for name, pick in actions:
        chaos.act(name, pick)
    chaos.driver.check_replay()
    chaos.drain()
    rest = chaos.driver.commits[-1].rest
    assert (rest.state, rest.session_state in RESTING) == (session_pb2.REST_STATE_AT_REST, True)
    _assert_a_further_input_is_answered(chaos)
    chaos.driver.check_replay()
    _assert_calls_are_settled(chaos)
    assert_shown_exactly_once(chaos.driver.turns.answered, chaos.driver.items, chaos.driver.turns.covered)


def _assert_a_further_input_is_answered(chaos: Chaos) -> None:
    chaos.say("and now?")
    chaos.drain()
    # A stop "when idle" that was still waiting for the session's end of work is complete now.
    assert chaos.driver.commits[-1].rest.session_state in {
        session_pb2.SESSION_STATE_IDLE,
        session_pb2.SESSION_STATE_STOPPED,
    }
    assert chaos.driver.state.pending == 0
    last = chaos.driver.turns.answered[-1].entry
    assert last.user.parts[0].text.text == "and now?"


def _assert_calls_are_settled(chaos: Chaos) -> None:
    made: list[str] = []
    first: Counter[str] = Counter()
    final: Counter[str] = Counter()
    for decision in chaos.driver.commits:
        opened = [
            one.tool_call.call_id
            for item in decision.items
            for one in item.model_response.output.items
            if one.HasField("tool_call")
        ]
        made += opened
        statuses = [item.tool_call_status for item in decision.items if item.HasField("tool_call_status")]
        assert set(opened) <= {one.call_id for one in statuses}, "a call's first status is in another commit"
        first.update(one.call_id for one in statuses if not one.HasField("result"))
        final.update(one.call_id for one in statuses if one.HasField("result"))
    assert final == Counter(made)
    assert set(first) <= set(made)
    assert max(first.values(), default=1) == 1
    outcomes = [item.tool_call_status.result.outcome for item in chaos.driver.items]
    assert item_pb2.CALL_OUTCOME_NOT_CARRIED_OVER not in outcomes
