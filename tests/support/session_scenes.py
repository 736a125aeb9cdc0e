"""Ready situations of a driven session, and what tests ask of it again and again."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from harness.coordinator import CoordinatorConfig
from harness.coordinator.protocol import Answer, Decision, Refusal
from tests.support.histories import CheckedDriver
from tests.support.session_driver import SessionDriver, calls, control_input, says, session
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

HARD = item_pb2.STOP_MODE_HARD
WHEN_IDLE = item_pb2.STOP_MODE_WHEN_IDLE

AWAITING = operation_pb2.OPERATION_STATUS_AWAITING
CANCELING = operation_pb2.OPERATION_STATUS_CANCELING
COMPLETED = operation_pb2.OPERATION_STATUS_COMPLETED
FAILED = operation_pb2.OPERATION_STATUS_FAILED
CANCELED = operation_pb2.OPERATION_STATUS_CANCELED
OUTCOME_UNKNOWN = operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN


def idle_session(
    *, config: CoordinatorConfig | None = None, limits: session_pb2.SessionLimits | None = None
) -> CheckedDriver:
    """Return a session whose first input is answered."""
    driver = asked_session(config=config, limits=limits)
    driver.answer(says("ready"))
    return driver


def asked_session(
    *, config: CoordinatorConfig | None = None, limits: session_pb2.SessionLimits | None = None
) -> CheckedDriver:
    """Return a session whose first request is in flight."""
    driver = CheckedDriver(session(limits=limits), config=config)
    driver.say("do it")
    return driver


def session_with_calls(*call_ids: str, config: CoordinatorConfig | None = None) -> CheckedDriver:
    """Return a session whose first response made these calls; they run, in their grace period."""
    driver = asked_session(config=config)
    driver.answer(*(calls(call_id) for call_id in call_ids))
    return driver


def settings_input(
    input_id: str, **changes: str | session_pb2.ToolSelection | session_pb2.SessionLimits
) -> item_pb2.Input:
    """Return a change of settings."""
    # The names are those of the message's fields.
    patch = session_pb2.SettingsPatch(**changes)  # type: ignore[arg-type]
    return control_input(input_id, item_pb2.Control(settings=patch))


def cancel_input(
    input_id: str, operation_id: str, *, reason: str = "", abandon_after_s: int | None = None
) -> item_pb2.Input:
    """Return a cancellation."""
    request = item_pb2.CancelOperation(operation_id=operation_id, reason=reason)
    if abandon_after_s is not None:
        request.abandon_after.CopyFrom(Duration(seconds=abandon_after_s))
    return control_input(input_id, item_pb2.Control(cancel_operation=request))


def abandon_input(input_id: str, operation_id: str, *, reason: str = "") -> item_pb2.Input:
    """Return an abandonment."""
    request = item_pb2.AbandonOperation(operation_id=operation_id, reason=reason)
    return control_input(input_id, item_pb2.Control(abandon_operation=request))


def retry_input(input_id: str, *, omit_new: bool = False) -> item_pb2.Input:
    """Return a retry."""
    return control_input(input_id, item_pb2.Control(retry_turn=item_pb2.RetryTurn(omit_new=omit_new)))


def results(driver: SessionDriver) -> dict[str, tuple[str, str]]:
    """Return outcome and text of each final result, by call."""
    return {
        status.call_id: (
            item_pb2.CallOutcome.Name(status.result.outcome).removeprefix("CALL_OUTCOME_"),
            "".join(part.text.text for part in status.result.parts),
        )
        for status in (item.tool_call_status for item in driver.items)
        if status.HasField("result")
    }


def standing(driver: SessionDriver) -> tuple[str, str]:
    """Return the session's state and its reason, as the latest commit says them."""
    rest = driver.commits[-1].rest
    return session_pb2.SessionState.Name(rest.session_state).removeprefix("SESSION_STATE_"), rest.reason


def status_of(driver: SessionDriver, call_id: str) -> tuple[str, str]:
    """Return status and error reason of a call's operation, as they are recorded."""
    operation = driver.operations[driver.operation_of(call_id)]
    name = operation_pb2.OperationStatus.Name(operation.status).removeprefix("OPERATION_STATUS_")
    return name, operation.error.reason


def refusals(driver: SessionDriver) -> list[str]:
    """Return the reasons of all refusals so far."""
    return [one.error.reason for one in driver.answers if isinstance(one, Refusal)]


def accepted(driver: SessionDriver) -> list[tuple[int, bool]]:
    """Return sequence and whether it was a duplicate of all accepted submissions so far."""
    return [(one.sequence, one.is_duplicate) for one in driver.answers if isinstance(one, Answer)]


def nothing_happened(decision: Decision) -> bool:
    """Return whether a decision wrote nothing and did nothing."""
    return not decision.has_commit and not decision.effects
