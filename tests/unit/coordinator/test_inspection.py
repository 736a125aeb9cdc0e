"""The workspace is looked at before the first turn; what was found is recorded and decides the prompt."""

from __future__ import annotations

from harness.context_builder.prompt import decode_prompt
from harness.coordinator.protocol import ManagerLost
from tests.support.histories import CheckedDriver
from tests.support.session_driver import INSTANCE, MANAGER, text_input
from tests.support.session_scenes import (
    FAILED,
    abandon_input,
    idle_session,
    nothing_happened,
    settings_input,
    standing,
)
from unreal_agent.operation.v1 import operation_pb2

FOUND = operation_pb2.InspectWorkspaceState(
    workspace="/work", exists=True, is_writable=True, shell="/bin/bash", platform="linux/x86_64"
)


def inspecting_session() -> CheckedDriver:
    driver = CheckedDriver()
    driver.submit(text_input("i1", "do it"))
    return driver


def test_it_runs_before_the_first_turn_and_its_result_starts_it() -> None:
    driver = inspecting_session()
    (operation,) = driver.state.unsettled()
    assert (operation.operation_id, operation.type, operation.call_id) == ("uid-s1-i1", "inspect_workspace", "")
    assert (driver.dispatched(), driver.kinds()) == (["uid-s1-i1"], ["input"])
    assert standing(driver) == ("WAITING_FOR_OPERATIONS", "")
    decision = driver.report("uid-s1-i1", inspection=FOUND)
    assert [item.WhichOneof("item") for item in decision.items] == ["turn"]
    assert [one.inspect_workspace for one in decision.operations] == [FOUND]


def test_what_it_found_is_in_the_prompt_that_the_commit_holds() -> None:
    driver = inspecting_session()
    decision = driver.report("uid-s1-i1", inspection=FOUND)
    (source,) = decision.blobs
    assert source.blob == decision.items[0].turn.prompt
    assert source.data is not None
    prompt = decode_prompt(source.data)
    assert "- Directory: /work" in prompt.system_text
    assert [tool.name for tool in prompt.tools] == ["Bash", "ViewImage"]


def test_inputs_that_come_meanwhile_wait_for_it() -> None:
    driver = inspecting_session()
    driver.submit(text_input("i2", "and this"))
    assert driver.dispatched() == ["uid-s1-i1"]
    driver.report("uid-s1-i1", inspection=FOUND)
    assert driver.sent() == [("user", "do it"), ("user", "and this")]


def test_a_session_without_input_is_not_inspected() -> None:
    assert CheckedDriver().commits == []


def test_a_missing_workspace_fails_the_session_and_the_next_input_looks_again() -> None:
    driver = inspecting_session()
    driver.report("uid-s1-i1", inspection=operation_pb2.InspectWorkspaceState())
    assert standing(driver) == ("FAILED", "WORKSPACE_NOT_FOUND: the workspace '/work' is not a directory")
    assert nothing_happened(driver.wait(1000.0))
    driver.submit(text_input("i2", "now it is there"))
    assert driver.dispatched() == ["uid-s1-i1", "uid-s1-i2"]
    driver.report("uid-s1-i2", inspection=FOUND)
    assert driver.sent() == [("user", "do it"), ("user", "now it is there")]


def test_an_inspection_that_fails_says_why() -> None:
    driver = inspecting_session()
    driver.report("uid-s1-i1", FAILED, text="permission denied")
    assert standing(driver) == ("FAILED", "TEST: permission denied")


def test_one_that_was_given_up_can_be_made_again() -> None:
    driver = inspecting_session()
    driver.submit(abandon_input("x1", "uid-s1-i1"))
    assert standing(driver)[0] == "FAILED"
    driver.submit(text_input("i2", "again"))
    driver.report("uid-s1-i3", inspection=FOUND)
    assert driver.sent() == [("user", "do it"), ("user", "again")]


def test_the_newest_one_counts() -> None:
    driver = inspecting_session()
    for number in range(2, 12):
        driver.report(f"uid-s1-i{number - 1}", inspection=operation_pb2.InspectWorkspaceState())
        driver.submit(text_input(f"i{number}", "again"))
    driver.report("uid-s1-i11", inspection=FOUND)
    assert driver.state.inspection == FOUND
    assert len(driver.sent()) == 11


def test_it_waits_for_a_manager_that_is_away() -> None:
    driver = CheckedDriver()
    driver.step(ManagerLost(manager_name=MANAGER))
    driver.submit(text_input("i1", "do it"))
    assert (standing(driver), list(driver.commits[-1].rest.manager_names)) == (
        ("WAITING_FOR_OPERATIONS", ""),
        [MANAGER],
    )
    driver.connect(INSTANCE)
    driver.report("uid-s1-i1", inspection=FOUND)
    assert driver.sent() == [("user", "do it")]


def test_a_later_prompt_is_made_from_what_is_known() -> None:
    driver = idle_session()
    driver.restart()
    driver.connect(INSTANCE)
    driver.submit(settings_input("s1", system_prompt="be brief"))
    driver.submit(text_input("i9", "go on"))
    assert driver.dispatched() == ["uid-s1-i1"]
    assert driver.sent()[-1] == ("user", "go on")
