"""What may be done after a crash between start and result: every type and class, here, through a server, elsewhere."""

from __future__ import annotations

import contextlib
import json
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import pytest
from PIL import Image

from harness.coordinator.protocol import ManagerLost
from harness.operations.local_manager import LocalOperationManager
from harness.operations.machines import default_machines
from harness.operations.operations import OperationManager
from harness.tools.registry import ToolRegistry
from harness.tools.rendering import render_operations
from tests.support.counting_handler import PLAN_TYPE
from tests.support.histories import CheckedDriver
from tests.support.manager_process import SETTINGS, start
from tests.support.manager_service import served_manager
from tests.support.operations import SESSION, acknowledging, adding, end_of
from tests.support.session_driver import INSTANCE, MANAGER, calls
from tests.support.session_scenes import asked_session, results, status_of
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2

PURE = operation_pb2.EFFECT_CLASS_PURE
IDEMPOTENT = operation_pb2.EFFECT_CLASS_IDEMPOTENT
PROBEABLE = operation_pb2.EFFECT_CLASS_PROBEABLE
AT_MOST_ONCE = operation_pb2.EFFECT_CLASS_AT_MOST_ONCE
COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
UNKNOWN = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN

EffectClass: TypeAlias = operation_pb2.EffectClass.ValueType

KINDS: list[tuple[str, EffectClass]] = [
    (machine.operation_type, effect_class) for machine in default_machines() for effect_class in machine.effect_classes
]
# Each needs a process that dies; what is PURE and computed is all the same to a manager.
DYING_KINDS = [
    pytest.param(kind, effect_class, marks=[] if kind in ("bash", "remote_job", "value") else pytest.mark.long)
    for kind, effect_class in KINDS
]
IDS = [f"{kind}-{operation_pb2.EffectClass.Name(effect_class)[13:].lower()}" for kind, effect_class in KINDS]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace" / ".harness" / "skills" / "know").mkdir(parents=True)
    skill = tmp_path / "workspace" / ".harness" / "skills" / "know" / "SKILL.md"
    skill.write_text("---\nname: know\ndescription: Knows.\n---\nIt is so.\n")
    Image.new("RGB", (4, 3)).save(tmp_path / "workspace" / "a.png")
    return tmp_path / "workspace"


def of_kind(kind: str, effect_class: EffectClass, workspace: Path, *, first: str = "ends") -> operation_pb2.Operation:
    """Return a READY operation whose effect, if it has one, is a line in the workspace's file "count"."""
    operation = operation_pb2.Operation(
        schema_version=1,
        operation_id=uuid.uuid4().hex,
        session_id=SESSION,
        type=kind,
        type_version=1,
        status=operation_pb2.OPERATION_STATUS_READY,
        step=1,
        effect_class=effect_class,
        idempotency_key="key-1" if effect_class == IDEMPOTENT else "",
    )
    plan = json.dumps({"file": str(workspace / "count"), "first": first})
    match kind:
        case "bash":
            operation.bash.command = "echo x >> count"
        case "view_image":
            operation.view_image.path = "a.png"
        case "skill_use":
            operation.skill_use.name = "know"
        case "inspect_workspace":
            operation.inspect_workspace.SetInParent()
        case "timer":
            operation.timer.fire_time.GetCurrentTime()
        case "value":
            operation.value.value_json = "1"
        case "remote_job":
            operation.remote_job.plan_type, operation.remote_job.plan_version = PLAN_TYPE, 1
            operation.remote_job.plan_json = plan
        case _:
            raise AssertionError(f"type {kind} has no operation here")
    return operation


def counted(workspace: Path) -> list[str]:
    file = workspace / "count"
    return file.read_text().splitlines() if file.exists() else []


@contextlib.asynccontextmanager
async def opened_here(state: Path) -> AsyncIterator[OperationManager]:
    async with LocalOperationManager.open(state, name="local", settings=SETTINGS) as manager:
        yield manager


@contextlib.asynccontextmanager
async def opened_through_a_server(state: Path) -> AsyncIterator[OperationManager]:
    async with served_manager(state, SETTINGS) as (_, proxy):
        yield proxy


Opening = Callable[[Path], contextlib.AbstractAsyncContextManager[OperationManager]]
PLACES = pytest.mark.parametrize("opening", [opened_here, opened_through_a_server], ids=["local", "proxy"])
FEWER_PLACES = pytest.mark.parametrize(
    "opening", [opened_here, pytest.param(opened_through_a_server, marks=pytest.mark.long)], ids=["local", "proxy"]
)
"""Through a server it is the same manager that recovers."""


async def recovered(
    opening: Opening, workspace: Path, operation: operation_pb2.Operation, kill_at: str
) -> operation_pb2.Operation:
    """Run a manager until it is killed, then another over the same state; return the operation's end."""
    state = workspace.with_name("state")
    assert await (await start(state, workspace, operation, kill_at=kill_at)).wait() == -signal.SIGKILL
    async with opening(state) as manager:
        again = (await manager.add_operations(adding([operation], workspace))).results[0]
        assert again.WhichOneof("result") == "operation"
        ended = await end_of(manager, operation.operation_id)
        await manager.acknowledge_updates(acknowledging(ended))
    return ended


@FEWER_PLACES
@pytest.mark.parametrize(("kind", "effect_class"), DYING_KINDS, ids=IDS)
async def test_every_type_keeps_its_class_when_the_manager_dies_before_the_start(
    kind: str, effect_class: EffectClass, opening: Opening, workspace: Path
) -> None:
    operation = of_kind(kind, effect_class, workspace)
    ended = await recovered(opening, workspace, operation, "operations.dispatch.before")
    if (kind, effect_class) == ("remote_job", AT_MOST_ONCE):
        # Nothing proves that the host's handler was not called; of a command the claim does.
        assert (ended.status, ended.error.reason, counted(workspace)) == (UNKNOWN, "MANAGER_RESTARTED", [])
        return
    assert ended.status == COMPLETED, ended
    assert len(counted(workspace)) == (1 if kind in ("bash", "remote_job") else 0)


@FEWER_PLACES
@pytest.mark.parametrize(("kind", "effect_class"), DYING_KINDS, ids=IDS)
async def test_every_type_keeps_its_class_when_the_manager_dies_after_the_start(
    kind: str, effect_class: EffectClass, opening: Opening, workspace: Path
) -> None:
    is_job = kind == "remote_job"
    operation = of_kind(kind, effect_class, workspace, first="dies")
    # The job's handler kills the process itself, once it was called.
    ended = await recovered(opening, workspace, operation, "" if is_job else "operations.dispatch.after")
    if not is_job:
        assert ended.status == COMPLETED, ended
        assert counted(workspace) == (["x"] if kind == "bash" else [])
    elif effect_class == AT_MOST_ONCE:
        assert (ended.status, ended.error.reason, len(counted(workspace))) == (UNKNOWN, "MANAGER_RESTARTED", 1)
        assert "may or may not have run" in render_operations([ended]).parts[0].text.text
    else:
        key = "key-1" if effect_class == IDEMPOTENT else "-"
        assert (ended.status, counted(workspace)) == (COMPLETED, [f"- {key}", f"- {key}"])


@PLACES
@pytest.mark.parametrize("effect_class", [PURE, IDEMPOTENT, PROBEABLE, AT_MOST_ONCE])
async def test_job_that_has_a_name_is_watched_and_not_started_again(
    effect_class: EffectClass, opening: Opening, workspace: Path
) -> None:
    operation = of_kind("remote_job", effect_class, workspace, first="waits")
    ended = await recovered(opening, workspace, operation, "operations.update.before:2")
    assert (ended.status, ended.remote_job.result_json) == (COMPLETED, '"done"')
    assert [line.split()[0] for line in counted(workspace)] == ["-", "job-1"]


# --- the instance is gone ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A host's tool that plans one operation."""

    operation: operation_pb2.Operation

    @property
    def definition(self) -> llm_pb2.ToolDefinition:
        return llm_pb2.ToolDefinition(name="Own", description="Plans.", parameters_json='{"type": "object"}')

    def is_offered(self, inspection: operation_pb2.InspectWorkspaceState) -> bool:
        return True

    def translate(self, call: llm_pb2.ToolCall) -> list[operation_pb2.Operation]:
        return [self.operation]

    def render(self, call: llm_pb2.ToolCall, operations: Sequence[operation_pb2.Operation]) -> item_pb2.CallResult:
        return render_operations(operations)


def session_with(operation: operation_pb2.Operation) -> CheckedDriver:
    driver = asked_session()
    driver.environment = replace(driver.environment, tools=ToolRegistry([Own(operation=operation)]))
    driver.answer(calls("c1", "Own", "{}"))
    return driver


@pytest.mark.parametrize(("kind", "effect_class"), KINDS, ids=IDS)
def test_only_what_may_run_again_goes_to_another_instance(
    kind: str, effect_class: EffectClass, workspace: Path
) -> None:
    planned = operation_pb2.Operation()
    planned.CopyFrom(of_kind(kind, effect_class, workspace))
    for name in ("schema_version", "operation_id", "session_id", "status", "step"):
        planned.ClearField(name)
    driver = session_with(planned)
    operation_id = driver.operation_of("c1")
    assert driver.operations[operation_id].instance_id == INSTANCE
    driver.step(ManagerLost(manager_name=MANAGER))
    driver.connect("instance-2")
    if effect_class in (PURE, IDEMPOTENT):
        again = driver.operations[operation_id]
        assert (again.instance_id, again.idempotency_key) == ("instance-2", planned.idempotency_key)
        assert driver.dispatched()[-1] == operation_id
    else:
        assert status_of(driver, "c1") == ("OUTCOME_UNKNOWN", "INSTANCE_GONE")
        assert "may or may not have" in results(driver)["c1"][1]


@PLACES
@pytest.mark.parametrize(("kind", "effect_class"), KINDS, ids=IDS)
async def test_operation_of_another_class_is_refused(
    kind: str, effect_class: EffectClass, opening: Opening, workspace: Path
) -> None:
    wrong = of_kind(kind, effect_class, workspace)
    wrong.effect_class = operation_pb2.EFFECT_CLASS_UNSPECIFIED
    keyed = of_kind(kind, effect_class, workspace)
    keyed.idempotency_key = "" if effect_class == IDEMPOTENT else "key-1"
    async with opening(workspace.with_name("state")) as manager:
        answer = await manager.add_operations(adding([wrong, keyed], workspace))
    assert [result.refusal.reason for result in answer.results] == ["INVALID_OPERATION"] * 2
