"""From a model's call to operations, and back to a result."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from google.protobuf import duration_pb2

from harness.errors import InvalidArgumentError
from harness.tools import Rejection, ToolRegistry, ToolTranslator, default_registry
from harness.tools.bash import BashTranslator
from harness.tools.presentation import text_part
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

REGISTRY = default_registry()
INSPECTION = operation_pb2.InspectWorkspaceState(
    workspace="/w", exists=True, shell="/bin/bash", skills=[operation_pb2.Skill(name="deploy")]
)


def call(name: str, arguments: object) -> llm_pb2.ToolCall:
    return llm_pb2.ToolCall(call_id="c1", name=name, arguments_json=json.dumps(arguments))


def names(definitions: Sequence[llm_pb2.ToolDefinition]) -> list[str]:
    return [definition.name for definition in definitions]


class NamedTool:
    """A host's own tool, as far as the registry looks at it."""

    def __init__(self, name: str, parameters_json: str = '{"type":"object"}') -> None:
        self._definition = llm_pb2.ToolDefinition(name=name, parameters_json=parameters_json)

    @property
    def definition(self) -> llm_pb2.ToolDefinition:
        return self._definition

    def is_offered(self, inspection: operation_pb2.InspectWorkspaceState) -> bool:
        return True

    def translate(self, call: llm_pb2.ToolCall) -> Sequence[operation_pb2.Operation] | Rejection:
        return ()

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        return item_pb2.CallResult(outcome=item_pb2.CALL_OUTCOME_COMPLETED, parts=[text_part(call.name)])


@pytest.mark.parametrize(
    ("tool_call", "operation"),
    [
        (
            call("Bash", {"command": "echo '\u2500'\n"}),
            operation_pb2.Operation(
                type="bash",
                type_version=1,
                effect_class=operation_pb2.EFFECT_CLASS_AT_MOST_ONCE,
                limits=operation_pb2.OperationLimits(
                    timeout=duration_pb2.Duration(seconds=600), max_output_chars=40_000
                ),
                bash=operation_pb2.BashState(command="echo '\u2500'\n"),
            ),
        ),
        (
            call(
                "Bash",
                {
                    "command": "ls",
                    "working_directory": "src",
                    "timeout_seconds": 86_400,
                    "max_output_length": 1_000_000,
                },
            ),
            operation_pb2.Operation(
                type="bash",
                type_version=1,
                effect_class=operation_pb2.EFFECT_CLASS_AT_MOST_ONCE,
                limits=operation_pb2.OperationLimits(
                    timeout=duration_pb2.Duration(seconds=86_400), max_output_chars=1_000_000
                ),
                bash=operation_pb2.BashState(command="ls", working_directory="src"),
            ),
        ),
        (
            call("ViewImage", {"path": "a.png"}),
            operation_pb2.Operation(
                type="view_image",
                type_version=1,
                effect_class=operation_pb2.EFFECT_CLASS_PURE,
                view_image=operation_pb2.ViewImageState(path="a.png"),
            ),
        ),
        (
            call("SkillUse", {"name": "deploy"}),
            operation_pb2.Operation(
                type="skill_use",
                type_version=1,
                effect_class=operation_pb2.EFFECT_CLASS_PURE,
                skill_use=operation_pb2.SkillUseState(name="deploy"),
            ),
        ),
    ],
)
def test_call_becomes_one_operation(tool_call: llm_pb2.ToolCall, operation: operation_pb2.Operation) -> None:
    before = tool_call.SerializeToString(deterministic=True)

    assert REGISTRY.translate(tool_call, REGISTRY.names) == (operation,)
    assert tool_call.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("tool_call", "problem"),
    [
        (call("Bash", {}), '"command" is required'),
        (call("Bash", {"command": " \n"}), '"command" must not be blank'),
        (call("Bash", {"command": "a\0b"}), "holds a NUL"),
        (call("Bash", {"command": "ls", "timeout_seconds": 86_401}), "at most 86400"),
        (call("Bash", {"command": "ls", "max_output_length": 0}), "at least 1"),
        (
            call("Bash", {"cmd": "ls"}),
            "known arguments: command, working_directory, timeout_seconds, max_output_length",
        ),
        (call("ViewImage", {"path": "a\0"}), "holds a NUL"),
        (call("SkillUse", {"name": ""}), '"name" must have at least 1'),
    ],
)
def test_wrong_arguments_are_told_and_nothing_is_run(tool_call: llm_pb2.ToolCall, problem: str) -> None:
    rejection = REGISTRY.translate(tool_call, REGISTRY.names)

    assert isinstance(rejection, Rejection)
    assert problem in rejection.message


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Browse", ""),
        ("", ""),
        ("bash", ' If you meant "Bash", call it by exactly that name, without prefix.'),
        ("functions.Bash", ' If you meant "Bash", call it by exactly that name, without prefix.'),
        ("default_api:Bash", ' If you meant "Bash", call it by exactly that name, without prefix.'),
        ("mcp__local__ViewImage", ' If you meant "ViewImage", call it by exactly that name, without prefix.'),
        ("functions.SkillUse", ""),
    ],
)
def test_unknown_tool_is_answered_with_those_that_exist(name: str, hint: str) -> None:
    rejection = REGISTRY.translate(call(name, {"command": "ls"}), ["Bash", "ViewImage", "Gone"])

    assert rejection == Rejection(
        message=f'There is no tool named "{name}"; nothing was run. Available tools: Bash, ViewImage.{hint}'
    )


def test_tool_that_the_session_was_not_offered_is_unknown_to_it() -> None:
    rejection = REGISTRY.translate(call("Bash", {"command": "ls"}), [])

    assert rejection == Rejection(
        message='There is no tool named "Bash"; nothing was run. No tools are available in this session.'
    )


def test_offer_keeps_the_hosts_order_and_passes_over_what_is_gone() -> None:
    assert names(REGISTRY.offered([], INSPECTION)) == ["Bash", "ViewImage", "SkillUse"]
    assert names(REGISTRY.offered(["ViewImage", "Gone", "Bash"], INSPECTION)) == ["Bash", "ViewImage"]


def test_offer_suits_the_workspace() -> None:
    bare = operation_pb2.InspectWorkspaceState(workspace="/w", exists=True)
    uninspected = operation_pb2.InspectWorkspaceState()

    assert names(REGISTRY.offered([], bare)) == ["ViewImage"]
    assert names(REGISTRY.offered([], uninspected)) == ["Bash", "ViewImage"]


def test_names_that_the_host_does_not_have_are_refused_with_those_it_has() -> None:
    REGISTRY.check(["Bash", "SkillUse"])
    REGISTRY.check([])

    with pytest.raises(InvalidArgumentError) as caught:
        REGISTRY.check(["Bash", "Browse"])

    assert caught.value.reason == "UNKNOWN_TOOL"
    assert caught.value.message == "this host has no tool named 'Browse'; its tools: Bash, ViewImage, SkillUse"


@pytest.mark.parametrize(
    "translators",
    [
        [BashTranslator(), BashTranslator()],
        [NamedTool("two words")],
        [NamedTool("x" * 65)],
        [NamedTool("T", "[]")],
        [NamedTool("T", "{")],
    ],
)
def test_faulty_set_of_tools_is_the_hosts_error(translators: list[ToolTranslator]) -> None:
    with pytest.raises(ValueError, match=r"tool|Expecting"):
        ToolRegistry(translators)


def test_tool_that_makes_no_operation_breaks_the_contract() -> None:
    with pytest.raises(ValueError, match="no operation"):
        ToolRegistry([NamedTool("Empty")]).translate(call("Empty", {}), ["Empty"])


def test_tools_own_rendering_is_used_and_the_generic_one_where_the_tool_is_gone() -> None:
    operation = operation_pb2.Operation(
        status=operation_pb2.OPERATION_STATUS_COMPLETED,
        bash=operation_pb2.BashState(has_exit=True, exit_code=1, stdout=operation_pb2.CapturedOutput(head="hi\n")),
    )
    registry = ToolRegistry([NamedTool("Own")])

    assert registry.render(call("Own", {}), [operation]).parts[0].text.text == "Own"
    assert registry.render(call("Bash", {}), [operation]).parts[0].text.text == "hi\n[exit code 1]"


@pytest.mark.parametrize("definition", REGISTRY.offered([], INSPECTION), ids=lambda definition: definition.name)
def test_definition_is_fixed_json_that_says_what_each_argument_is(definition: llm_pb2.ToolDefinition) -> None:
    schema = json.loads(definition.parameters_json)

    assert definition.parameters_json == json.dumps(schema, separators=(",", ":"))
    assert definition.description
    assert schema["additionalProperties"] is False
    assert all(parameter["description"] for parameter in schema["properties"].values())
