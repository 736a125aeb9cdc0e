"""What an arriving input does to a session: acceptance, duplicates, stops, cancellations, retries. Pure."""

from __future__ import annotations

from harness.coordinator import operation_rules, window_rules
from harness.coordinator.apply import merged_settings
from harness.coordinator.draft import Draft
from harness.coordinator.protocol import Answer, InputArrived, Refusal
from harness.coordinator.rest import failure_reason
from harness.coordinator.settings import check_fallback, check_prices
from harness.errors import AlreadyExistsError, FailedPreconditionError, HarnessError, InvalidArgumentError
from harness.inbox import fingerprint
from harness.operations import is_terminal
from unreal_agent.session.v1 import item_pb2, session_pb2


def take_input(draft: Draft, arrived: InputArrived) -> None:
    """Record an input, or answer that it is known or refused."""
    message = arrived.message
    seen = draft.state.inputs.get(message.input_id)
    if seen is not None:
        if seen.fingerprint == fingerprint(message):
            draft.answers.append(Answer(ticket=arrived.ticket, sequence=seen.sequence, is_duplicate=True))
        else:
            draft.answers.append(Refusal(ticket=arrived.ticket, error=_conflict(message.input_id, seen.sequence)))
        return
    error = _refusal(draft, message)
    if error is not None:
        draft.answers.append(Refusal(ticket=arrived.ticket, error=error))
        return
    draft.keep_blobs(message, arrived.blobs)
    sequence = draft.append(item_pb2.Item(input=message))
    draft.answers.append(Answer(ticket=arrived.ticket, sequence=sequence))
    _follow_up(draft, message)


def record_crash(draft: Draft) -> None:
    """Record that the session was taken over from a process that did not release it."""
    crash = item_pb2.CrashReport(kind="EPOCH", message="the former owner did not release the session")
    message = item_pb2.Input(
        schema_version=1,
        input_id=_own_input_id(draft, "crash"),
        kind=item_pb2.INPUT_KIND_CRASH,
        crash=crash,
    )
    draft.append(item_pb2.Item(input=message))


def record_control(draft: Draft, name: str, control: item_pb2.Control) -> None:
    """Record a control input of the coordinator's own."""
    message = item_pb2.Input(
        schema_version=1,
        input_id=_own_input_id(draft, name),
        kind=item_pb2.INPUT_KIND_CONTROL,
        control=control,
    )
    draft.append(item_pb2.Item(input=message))


def _own_input_id(draft: Draft, name: str) -> str:
    """Return an ID for an input of the coordinator's own; a client that guessed it must not stop the session."""
    input_id = f"{name}-{draft.state.session_uid}-{draft.next_sequence()}"
    while input_id in draft.state.inputs:
        input_id += "-own"
    return input_id


def _refusal(draft: Draft, message: item_pb2.Input) -> HarnessError | None:
    control = message.control
    match control.WhichOneof("control"):
        case "cancel_operation":
            return _operation_refusal(draft, control.cancel_operation.operation_id)
        case "abandon_operation":
            return _operation_refusal(draft, control.abandon_operation.operation_id)
        case "retry_turn" if not failure_reason(draft.state):
            return FailedPreconditionError(
                f"session {draft.state.session_id!r} has no failed turn to retry", reason="SESSION_NOT_FAILED"
            )
        case "compact" if not window_rules.has_whole_turns(draft):
            return FailedPreconditionError(
                f"session {draft.state.session_id!r} has no answered turn to summarise", reason="NOTHING_TO_COMPACT"
            )
        case "settings":
            return _settings_refusal(draft, control.settings)
        case _:
            return None


def _settings_refusal(draft: Draft, patch: session_pb2.SettingsPatch) -> HarnessError | None:
    """Refuse a change whose whole, with what stays as it is, no turn could be made with."""
    if not any(patch.HasField(name) for name in ("model", "provider", "fallback_provider", "limits")):
        return None
    merged = merged_settings(draft.state.settings, patch)
    try:
        check_fallback(merged)
        check_prices(merged, draft.environment.price)
    except InvalidArgumentError as error:
        return error
    return None


def _operation_refusal(draft: Draft, operation_id: str) -> HarnessError | None:
    operation = draft.state.operations.get(operation_id)
    if operation is not None and not is_terminal(operation):
        return None
    return FailedPreconditionError(
        f"operation {operation_id!r} does not run in session {draft.state.session_id!r}",
        reason="OPERATION_TERMINAL",
        metadata={"operation_id": operation_id},
    )


def _follow_up(draft: Draft, message: item_pb2.Input) -> None:
    if message.kind == item_pb2.INPUT_KIND_EXTERNAL:
        if message.delivery != item_pb2.DELIVERY_AFTER_TURN:
            draft.interrupts = True
        return
    match message.control.WhichOneof("control"):
        case "abandon_operation":
            request = message.control.abandon_operation
            operation_rules.give_up(draft, request.operation_id, "ABANDONED", request.reason or "given up by a person")
        case "stop":
            draft.update_volatile(grace_until_s=None)
        case _:
            pass


def _conflict(input_id: str, sequence: int) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"input ID {input_id!r} was used before with other content; nothing changed",
        reason="INPUT_ID_CONFLICT",
        metadata={"input_id": input_id, "sequence": str(sequence)},
    )
