"""A host's own tool that breaks costs its call a result, and never the session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.tools import Rejection
from harness.tools.registry import ToolRegistry
from tests.support.histories import CheckedDriver
from tests.support.session_driver import calls, says
from tests.support.session_scenes import asked_session, results, standing
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenTool:
    """Breaks where it is told to."""

    breaks_at: str

    @property
    def definition(self) -> llm_pb2.ToolDefinition:
        return llm_pb2.ToolDefinition(name="Own", description="It is broken.", parameters_json='{"type": "object"}')

    def is_offered(self, inspection: operation_pb2.InspectWorkspaceState) -> bool:
        return True

    def translate(self, call: llm_pb2.ToolCall) -> Sequence[operation_pb2.Operation] | Rejection:
        if self.breaks_at == "translate":
            raise ZeroDivisionError
        if self.breaks_at == "nothing":
            return []
        value = operation_pb2.ValueState(value_json='"a value"')
        return [
            operation_pb2.Operation(
                type="value", type_version=1, effect_class=operation_pb2.EFFECT_CLASS_PURE, value=value
            )
        ]

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        if self.breaks_at == "render":
            raise ZeroDivisionError
        return item_pb2.CallResult()


def session_with_call(breaks_at: str) -> CheckedDriver:
    driver = asked_session()
    driver.environment = replace(driver.environment, tools=ToolRegistry([BrokenTool(breaks_at=breaks_at)]))
    driver.answer(calls("c1", "Own", "{}"))
    return driver


def test_one_that_can_not_translate_is_told_to_the_model() -> None:
    for breaks_at in ("translate", "nothing"):
        driver = session_with_call(breaks_at)
        expected = "The tool Own is broken in this host; nothing was run. Go on without it."
        assert results(driver) == {"c1": ("REJECTED", expected)}
        driver.answer(says("without it, then"))
        assert standing(driver) == ("IDLE", "")


def test_one_that_can_not_render_or_shows_nothing_is_rendered_by_its_operations() -> None:
    for breaks_at in ("render", "empty"):
        driver = session_with_call(breaks_at)
        driver.report(driver.operation_of("c1"))
        assert results(driver) == {"c1": ("COMPLETED", '"a value"')}
