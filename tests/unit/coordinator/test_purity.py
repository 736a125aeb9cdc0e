"""`apply`, `decide` and the context builder change nothing that they are given, and give the same again."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from harness.context_builder import ContextState, advance, next_request, omit_new, report
from harness.coordinator.apply import apply, apply_all
from harness.coordinator.decide import decide
from harness.coordinator.protocol import (
    InputArrived,
    Loaded,
    ManagerConnected,
    ManagerLost,
    ModelAnswered,
    ModelFailed,
    OperationRefused,
    OperationReported,
    Stimulus,
)
from harness.coordinator.rest import rest_of
from harness.coordinator.state import initial_state
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, MANAGER, calls, output, says, stop_input, text_input
from tests.support.session_oracle import frozen, scrambled
from tests.support.session_scenes import (
    AWAITING,
    COMPLETED,
    HARD,
    abandon_input,
    cancel_input,
    retry_input,
    session_with_calls,
    settings_input,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2


def eventful_session() -> CheckedDriver:
    """A session that holds one of everything."""
    driver = session_with_calls("c1", "c2", "c3")
    driver.report(driver.operation_of("c1"), AWAITING)
    driver.report(driver.operation_of("c2"), text="x" * 70_000)
    driver.submit(settings_input("s1", model="m2", system_prompt="be brief"))
    driver.submit(cancel_input("k1", driver.operation_of("c3"), abandon_after_s=3))
    driver.say("go on")
    driver.fail(llm_pb2.ERROR_CLASS_INVALID_REQUEST)
    driver.submit(retry_input("r1", omit_new=True))
    driver.say("once more")
    driver.answer(says("well"), calls("bad", name="Nope"), calls("c4"))
    return driver


STIMULI: dict[str, Callable[[CheckedDriver], Stimulus]] = {
    "loaded": lambda driver: Loaded(was_taken_over=True),
    "text": lambda driver: InputArrived(ticket=1, message=text_input("new", "hello")),
    "duplicate": lambda driver: InputArrived(ticket=1, message=driver.items[0].input),
    "stop": lambda driver: InputArrived(ticket=1, message=stop_input("stop", HARD)),
    "settings": lambda driver: InputArrived(ticket=1, message=settings_input("s9", model="m9")),
    "abandon": lambda driver: InputArrived(ticket=1, message=abandon_input("a9", driver.operation_of("c1"))),
    "retry": lambda driver: InputArrived(ticket=1, message=retry_input("r9")),
    "intermediate": lambda driver: driver.reported(driver.operation_of("c4"), AWAITING),
    "terminal": lambda driver: driver.reported(driver.operation_of("c1"), COMPLETED),
    "unknown operation": lambda driver: OperationReported(operation=operation_pb2.Operation(operation_id="x")),
    "refusal": lambda driver: OperationRefused(
        operation_id=driver.operation_of("c4"), error=operation_pb2.OperationError(reason="NO")
    ),
    "connected": lambda driver: ManagerConnected(manager_name=MANAGER, instance_id=INSTANCE),
    "another instance": lambda driver: ManagerConnected(manager_name=MANAGER, instance_id="instance-2"),
    "lost": lambda driver: ManagerLost(manager_name=MANAGER),
    "answered": lambda driver: ModelAnswered(
        turn_id=driver.volatile.request_turn_id, output=output(says("so"), calls(""), calls("c1"))
    ),
    "failed": lambda driver: ModelFailed(
        turn_id=driver.volatile.request_turn_id,
        failure=llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_OVERLOAD, message="busy"),
    ),
}


@pytest.mark.parametrize("name", STIMULI)
def test_deciding_changes_nothing_that_it_is_given_and_decides_the_same_again(name: str) -> None:
    driver = eventful_session()
    stimulus = STIMULI[name](driver)
    given = (driver.state, driver.volatile, stimulus, driver.items, driver.operations)
    before = frozen(given)
    first = decide(driver.environment, driver.state, driver.volatile, [stimulus], driver.now)
    second = decide(driver.environment, driver.state, driver.volatile, [stimulus], driver.now)
    assert frozen(given) == before
    assert (first.items, first.operations, first.blobs, first.rest, first.effects, first.wake_s) == (
        second.items,
        second.operations,
        second.blobs,
        second.rest,
        second.effects,
        second.wake_s,
    )
    assert (first.next_state, first.next_volatile) == (second.next_state, second.next_volatile)


def test_applying_changes_neither_the_state_nor_the_change() -> None:
    driver = eventful_session()
    state = initial_state(driver.record)
    for change in driver.changes:
        before = frozen((state, change))
        following = apply(state, change)
        assert frozen((state, change)) == before
        state = following
    assert state == driver.state


def test_applying_twice_what_was_applied_changes_no_operation() -> None:
    driver = eventful_session()
    operations = [one for one in driver.changes if isinstance(one, operation_pb2.Operation)]
    assert apply_all(driver.state, operations) == driver.state


@pytest.mark.parametrize("seed", range(20))
def test_the_place_of_an_operation_among_the_items_does_not_matter(seed: int) -> None:
    driver = eventful_session()
    changes = scrambled(driver.changes, random.Random(seed))
    assert apply_all(initial_state(driver.record), changes) == driver.state


def test_the_context_builder_changes_nothing_that_it_is_given() -> None:
    driver = eventful_session()
    context = ContextState()
    for item in driver.items:
        before = frozen((context, item))
        following = advance(context, item)
        for settings in (("scripted", "m1"), ("other", "m9")):
            next_request(context, provider=settings[0], model=settings[1], prompt_digest="ab" * 32)
        omit_new(context)
        report(context)
        assert frozen((context, item)) == before
        context = following


def test_saying_how_a_session_stands_changes_nothing() -> None:
    driver = eventful_session()
    before = frozen((driver.state, driver.volatile))
    rest_of(driver.state, driver.volatile, driver.now)
    assert frozen((driver.state, driver.volatile)) == before
