"""A call of a host's own tool may wait for several operations: it ends once, when all of them have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.coordinator import CoordinatorConfig
from harness.coordinator.protocol import Dispatch
from harness.tools import Rejection
from harness.tools.registry import ToolRegistry
from harness.tools.rendering import render_operations
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, calls, says, stop_input
from tests.support.session_scenes import CANCELED, COMPLETED, HARD, asked_session, cancel_input, results, standing
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2


class PairTool:
    """Runs two commands for one call."""

    @property
    def definition(self) -> llm_pb2.ToolDefinition:
        return llm_pb2.ToolDefinition(name="Pair", description="Two commands.", parameters_json='{"type": "object"}')

    def is_offered(self, inspection: operation_pb2.InspectWorkspaceState) -> bool:
        return True

    def translate(self, call: llm_pb2.ToolCall) -> Sequence[operation_pb2.Operation] | Rejection:
        return [
            operation_pb2.Operation(
                type="bash",
                type_version=1,
                effect_class=operation_pb2.EFFECT_CLASS_AT_MOST_ONCE,
                bash=operation_pb2.BashState(command=command),
            )
            for command in ("first", "second")
        ]

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        return render_operations(operations)


def session_with_pair(*, config: CoordinatorConfig | None = None) -> CheckedDriver:
    driver = asked_session(config=config)
    driver.environment = replace(driver.environment, tools=ToolRegistry([PairTool()]))
    driver.answer(calls("p", "Pair", "{}"))
    return driver


def pair(driver: CheckedDriver) -> list[str]:
    return sorted(key for key, one in driver.operations.items() if one.call_id == "p")


def test_they_are_introduced_by_one_status_and_dispatched_in_its_order() -> None:
    driver = session_with_pair()
    status = driver.items[-1].tool_call_status
    assert list(status.operation_ids) == ["uid-s1-4-0", "uid-s1-4-1"] == pair(driver)
    assert driver.dispatched()[-2:] == pair(driver)


def test_the_call_is_running_until_the_last_of_them_ends() -> None:
    driver = session_with_pair()
    first, second = pair(driver)
    driver.report(second, text="of second")
    assert (results(driver), len(driver.requests())) == ({}, 1)
    driver.report(first, text="of first")
    outcome, text = results(driver)["p"]
    assert (outcome, text.index("of first") < text.index("of second")) == ("COMPLETED", True)
    driver.answer(says("done"))
    assert (standing(driver), driver.state.available) == (("IDLE", ""), 2)


def test_only_the_unfinished_half_is_handed_over_again() -> None:
    driver = session_with_pair()
    first, second = pair(driver)
    ended = driver.reported(first, COMPLETED, text="of first")
    driver.step(ended)
    driver.restart()
    (dispatch,) = driver.connect(INSTANCE).effects
    assert isinstance(dispatch, Dispatch)
    assert [one.operation_id for one in dispatch.operations] == [second]
    driver.step(ended)
    driver.report(second, text="of second")
    assert list(results(driver)) == ["p"]


def test_a_lost_instance_ends_the_unfinished_half_only() -> None:
    driver = session_with_pair()
    first, _ = pair(driver)
    driver.report(first, text="of first")
    driver.restart()
    driver.connect("instance-2")
    outcome, text = results(driver)["p"]
    assert (outcome, "of first" in text, "outcome unknown" in text) == ("UNKNOWN", True, True)


def test_cancelling_one_leaves_the_other_running() -> None:
    driver = session_with_pair()
    first, second = pair(driver)
    driver.submit(cancel_input("x1", first))
    driver.report(first, CANCELED, text="gone")
    assert results(driver) == {}
    driver.report(second)
    assert results(driver)["p"][0] == "CANCELED"


def test_a_hard_stop_waits_for_all_of_them() -> None:
    driver = session_with_pair()
    first, second = pair(driver)
    driver.submit(stop_input("s1", HARD))
    driver.report(first, CANCELED, text="gone")
    assert standing(driver)[0] == "STOPPING"
    driver.report(second, CANCELED, text="gone")
    assert standing(driver)[0] == "STOPPED"


def test_the_call_counts_for_heartbeats_until_all_have_ended() -> None:
    driver = session_with_pair(config=CoordinatorConfig(heartbeat_interval_s=10.0))
    driver.report(pair(driver)[0])
    driver.wait(1.1)
    driver.wait(10.0)
    assert driver.items[-2].input.control.heartbeat.running_calls == [
        item_pb2.RunningCall(call_id="p", tool_name="Pair")
    ]


def test_a_result_whose_tool_is_gone_is_rendered_by_its_operations() -> None:
    driver = session_with_pair()
    driver.environment = replace(driver.environment, tools=ToolRegistry([]))
    for operation_id in pair(driver):
        driver.report(operation_id, text="fine")
    assert results(driver)["p"][0] == "COMPLETED"
