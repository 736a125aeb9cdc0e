"""A model that goes round in circles is told, then stopped; one that was cut off goes on."""

from __future__ import annotations

from harness.coordinator import CoordinatorConfig
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, calls, says
from tests.support.session_scenes import asked_session, standing
from unreal_agent.llm.v1 import llm_pb2

CUT_OFF = llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS
THREE = CoordinatorConfig(repeated_rounds=3)


class Circles:
    """A model that makes calls, each round numbered anew."""

    def __init__(self, config: CoordinatorConfig = THREE) -> None:
        self.driver: CheckedDriver = asked_session(config=config)
        self.made = 0

    def round(self, *commands: str, text: str = "the same") -> None:
        ids = []
        for _ in commands:
            self.made += 1
            ids.append(f"c{self.made}")
        wanted = [
            calls(one, arguments=f'{{"command": "{command}"}}') for one, command in zip(ids, commands, strict=True)
        ]
        self.driver.answer(*wanted)
        for call_id in ids:
            self.driver.report(self.driver.operation_of(call_id), text=text)

    @property
    def hints(self) -> list[str]:
        beats = [item.input.control.heartbeat for item in self.driver.items]
        return [one.reason for one in beats if one.reason.startswith("[hint]")]


def test_the_model_is_told_before_anything_else_happens() -> None:
    circles = Circles()
    for _ in range(2):
        circles.round("make")
    assert circles.hints == []
    circles.round("make")
    (hint,) = circles.hints
    assert "3 times in a row" in hint
    assert circles.driver.sent()[-1] == ("user", hint)


def test_then_the_session_is_stopped_with_the_reason() -> None:
    circles = Circles()
    for _ in range(6):
        circles.round("make")
    assert len(circles.hints) == 1
    assert standing(circles.driver) == (
        "STOPPED",
        "STALLED: the same calls with the same results, 6 times in a row",
    )
    circles.driver.say("do something else")
    assert circles.driver.volatile.request_turn_id


def test_a_round_that_differs_begins_anew() -> None:
    circles = Circles()
    for _ in range(4):
        circles.round("make")
        circles.round("make")
        circles.round("make", "make test")
        circles.round("make", text=f"result {circles.made}")
    assert circles.hints == []


def test_a_circle_of_two_rounds_is_one_too() -> None:
    circles = Circles()
    for _ in range(3):
        circles.round("make", text="broken")
        circles.round("cat log", text="nothing")
    assert len(circles.hints) == 1


def test_the_same_call_with_other_results_is_none() -> None:
    circles = Circles()
    for number in range(20):
        circles.round("git status", text=f"changed {number}")
    assert circles.hints == []


def test_the_order_of_the_arguments_does_not_matter() -> None:
    driver = asked_session(config=THREE)
    for number in range(3):
        pair = ['"command": "make"', '"timeout_seconds": 5']
        arguments = "{" + ", ".join(pair if number % 2 else pair[::-1]) + "}"
        driver.answer(calls(f"c{number}", arguments=arguments))
        driver.report(driver.operation_of(f"c{number}"), text="the same")
    assert any("[hint]" in text for _, text in driver.sent())


def test_a_users_input_begins_anew() -> None:
    circles = Circles()
    for number in range(5):
        circles.round("make")
        circles.driver.say(f"try again {number}")
    assert circles.hints == []


def test_a_model_that_changes_its_way_and_falls_back_is_told_again() -> None:
    circles = Circles()
    for way in ("make", "ninja"):
        for _ in range(4):
            circles.round(way)
    assert len(circles.hints) == 2
    assert standing(circles.driver)[0] == "RUNNING"


def test_rejected_calls_are_calls_too() -> None:
    driver = asked_session(config=THREE)
    for number in range(6):
        driver.answer(calls(f"c{number}", name="Nope"))
    assert standing(driver)[1].startswith("STALLED")


def test_it_can_be_switched_off() -> None:
    circles = Circles(CoordinatorConfig(repeated_rounds=0))
    for _ in range(30):
        circles.round("make")
    assert (circles.hints, standing(circles.driver)[0]) == ([], "RUNNING")


def test_another_process_counts_on() -> None:
    circles = Circles()
    for _ in range(5):
        circles.round("make")
        circles.driver.restart()
        circles.driver.connect(INSTANCE)
    assert len(circles.hints) == 1
    circles.round("make")
    assert standing(circles.driver)[1].startswith("STALLED")


def test_an_answer_that_is_cut_off_is_kept_and_gone_on_with() -> None:
    driver = asked_session()
    driver.answer(says("First, I will"), stop=CUT_OFF)
    assert driver.sent()[-2] == ("assistant", "First, I will")
    assert driver.sent()[-1][1].startswith("[hint] Your answer was cut off at the output limit.")
    driver.answer(says("then do it."))
    assert standing(driver) == ("IDLE", "")


def test_it_is_told_once_for_each_answer_whatever_dies() -> None:
    driver = asked_session()
    driver.answer(says("First, I will"), stop=CUT_OFF)
    driver.restart(was_taken_over=True)
    driver.connect(INSTANCE)
    assert sum(text.startswith("[hint]") for _, text in driver.sent()) == 1


def test_a_model_that_is_cut_off_again_and_again_is_stopped() -> None:
    driver = asked_session()
    for _ in range(5):
        driver.answer(says("and so on, and so on"), stop=CUT_OFF)
    assert standing(driver) == ("STOPPED", "OUTPUT_LIMIT: 5 answers in a row were cut off")
    driver.say("be brief")
    driver.answer(says("yes"))
    assert standing(driver) == ("IDLE", "")


def test_a_call_cut_off_is_never_run_and_the_model_told() -> None:
    driver = asked_session()
    decision = driver.answer(says("now"), calls("c1", arguments='{"command": "rm -rf /tmp/x'), stop=CUT_OFF)
    assert decision.operations == ()
    assert "cut off at the output limit" in driver.sent()[-1][1]
    assert not any("[hint]" in text for _, text in driver.sent())


def test_it_is_told_beside_an_input_that_waits() -> None:
    driver = asked_session()
    driver.say("and this", after_turn=True)
    driver.answer(says("First, I will"), stop=CUT_OFF)
    said, waiting, hint = [text for _, text in driver.sent()][-3:]
    assert (said, waiting, hint.startswith("[hint]")) == ("First, I will", "and this", True)
