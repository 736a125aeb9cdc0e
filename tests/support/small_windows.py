"""Sessions whose model has little room, driven until they need more."""

from __future__ import annotations

from dataclasses import replace

from harness.coordinator import CoordinatorConfig
from tests.support.histories import CheckedDriver
from tests.support.session_driver import calls, says, session
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

WINDOW = 16_000
COMPACTION = item_pb2.TURN_KIND_COMPACTION


def small_session(
    window: int = WINDOW,
    *,
    config: CoordinatorConfig | None = None,
    limits: session_pb2.SessionLimits | None = None,
) -> CheckedDriver:
    """Return a new session whose model takes `window` tokens."""
    driver = CheckedDriver(session(limits=limits), config=config)
    driver.environment = replace(driver.environment, window_tokens=lambda _: window)
    driver.usage = llm_pb2.Usage(output_tokens=5)  # this provider does not count what it is sent
    return driver


def answered_session(inputs: int = 3, *, window: int = WINDOW, chars: int = 400) -> CheckedDriver:
    """Return a session at rest after so many inputs, each answered in `chars` characters."""
    driver = small_session(window)
    for number in range(inputs):
        driver.say(f"question {number}")
        driver.answer(says(f"answer {number} " + "a" * chars))
    return driver


def compaction_session(inputs: int = 3, *, chars: int = 400) -> CheckedDriver:
    """Return a session whose request for a summary is in flight, because the one before it did not fit."""
    driver = answered_session(inputs, chars=chars)
    driver.say("the newest question")
    driver.fail_with_overflow()
    assert is_compacting(driver)
    return driver


def is_compacting(driver: CheckedDriver) -> bool:
    """Return whether a summary is being asked for."""
    latest = driver.state.latest_turn
    return latest is not None and latest.kind == COMPACTION and driver.volatile.request_turn_id == latest.turn_id


def tool_round(driver: CheckedDriver, call_id: str, text: str) -> None:
    """Let the model make one call and give it its result."""
    driver.answer(calls(call_id))
    driver.report(driver.operation_of(call_id), text=text)


def compactions(driver: CheckedDriver) -> list[item_pb2.Compaction]:
    """Return the compactions so far."""
    return [item.compaction for item in driver.items if item.HasField("compaction")]
