"""How a session stands, derived from its durable state and the request in flight. Pure."""

from __future__ import annotations

from harness.clock import timestamp
from harness.coordinator.protocol import Now, Volatile
from harness.coordinator.state import SessionState
from harness.operations import is_terminal
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

_RESTING = frozenset(
    {session_pb2.SESSION_STATE_IDLE, session_pb2.SESSION_STATE_STOPPED, session_pb2.SESSION_STATE_FAILED}
)


def rest_of(state: SessionState, volatile: Volatile, now: Now) -> session_pb2.Rest:
    """Return what a commit says of the session that it leaves."""
    session_state, reason = _session_state(state, volatile)
    rest = session_pb2.Rest(session_state=session_state, reason=reason)
    if session_state in _RESTING:
        rest.state = session_pb2.REST_STATE_AT_REST
    elif session_state == session_pb2.SESSION_STATE_WAITING_FOR_PROVIDER and state.failure is not None:
        rest.state = session_pb2.REST_STATE_WAITING_UNTIL
        rest.wake_time.CopyFrom(state.failure.resume_time)
    else:
        rest.state = session_pb2.REST_STATE_WORKING
    if session_state == session_pb2.SESSION_STATE_WAITING_FOR_OPERATIONS:
        rest.manager_names.extend(sorted({one.manager_name for one in state.unsettled()}))
    before = volatile.rest
    if before is not None and before.session_state == session_state and before.reason == reason:
        rest.since_time.CopyFrom(before.since_time)
    else:
        rest.since_time.CopyFrom(timestamp(now.wall_time))
    return rest


def failure_reason(state: SessionState) -> str:
    """Return why a session that starts nothing by itself has failed, or an empty text."""
    if state.is_over_recovery_limit:
        return f"RECOVERY_LIMIT: crashed {state.crashes} times in a row"
    if state.failure is not None:
        failure = state.failure.failure
        return f"{llm_pb2.ErrorClass.Name(failure.error_class).removeprefix('ERROR_CLASS_')}: {failure.message}"
    refused = state.operations.get(state.inspection_id)
    if state.prompt is None and state.pending and refused is not None and is_terminal(refused):
        if refused.error.reason:
            return f"{refused.error.reason}: {refused.error.message}"
        if not refused.inspect_workspace.exists:
            missing = f"the workspace {state.settings.workspace!r} is not a directory"
            problems = refused.inspect_workspace.problems
            return f"WORKSPACE_NOT_FOUND: {problems[0].reason if problems else missing}"
    return ""


def _session_state(state: SessionState, volatile: Volatile) -> tuple[session_pb2.SessionState.ValueType, str]:
    if state.stop is not None:
        if state.stop.mode == item_pb2.STOP_MODE_HARD:
            is_complete = state.is_stop_complete and next(state.unsettled(), None) is None
            kind = session_pb2.SESSION_STATE_STOPPED if is_complete else session_pb2.SESSION_STATE_STOPPING
            return kind, state.stop.reason
        if state.is_stop_complete and not volatile.request_turn_id:
            return session_pb2.SESSION_STATE_STOPPED, state.stop.reason
    if state.failure is not None and state.failure.HasField("resume_time"):
        return session_pb2.SESSION_STATE_WAITING_FOR_PROVIDER, failure_reason(state)
    reason = failure_reason(state)
    if reason:
        return session_pb2.SESSION_STATE_FAILED, reason
    if volatile.request_turn_id:
        return session_pb2.SESSION_STATE_RUNNING, ""
    if state.calls or next(state.unsettled(), None) is not None:
        return session_pb2.SESSION_STATE_WAITING_FOR_OPERATIONS, ""
    if state.is_held or not state.has_work:
        return session_pb2.SESSION_STATE_IDLE, ""
    return session_pb2.SESSION_STATE_RUNNING, ""
