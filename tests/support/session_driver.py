"""Drives `decide` and `apply` by hand: a session without store, manager or model, one stimulus at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from harness.context_builder import next_request
from harness.coordinator import CoordinatorConfig
from harness.coordinator.decide import decide
from harness.coordinator.protocol import (
    Answer,
    Decision,
    Dispatch,
    Effect,
    Environment,
    InputArrived,
    Loaded,
    ManagerConnected,
    ModelAnswered,
    ModelFailed,
    Now,
    OperationReported,
    Refusal,
    SendRequest,
    Stimulus,
    Volatile,
)
from harness.coordinator.state import SessionState, initial_state
from harness.inbox import normalise_input
from harness.operations import is_terminal
from harness.tools.registry import default_registry
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

START = datetime(2026, 1, 1, tzinfo=UTC)
MANAGER = "local"
INSTANCE = "instance-1"


def session(session_id: str = "s1", limits: session_pb2.SessionLimits | None = None) -> session_pb2.Session:
    """Return a new session's record."""
    settings = session_pb2.SessionSettings(provider="scripted", model="m1", manager_name=MANAGER, workspace="/work")
    if limits is not None:
        settings.limits.CopyFrom(limits)
    return session_pb2.Session(session_id=session_id, session_uid=f"uid-{session_id}", initial_settings=settings)


def text_input(input_id: str, text: str, *, after_turn: bool = False) -> item_pb2.Input:
    """Return an EXTERNAL input."""
    delivery = item_pb2.DELIVERY_AFTER_TURN if after_turn else item_pb2.DELIVERY_INTERRUPT
    parts = [llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))]
    return normalise_input(
        item_pb2.Input(
            input_id=input_id,
            kind=item_pb2.INPUT_KIND_EXTERNAL,
            delivery=delivery,
            content=item_pb2.Content(parts=parts),
        )
    )


def control_input(input_id: str, control: item_pb2.Control) -> item_pb2.Input:
    """Return a CONTROL input."""
    return normalise_input(item_pb2.Input(input_id=input_id, kind=item_pb2.INPUT_KIND_CONTROL, control=control))


def stop_input(input_id: str, mode: item_pb2.StopMode.ValueType, reason: str = "") -> item_pb2.Input:
    """Return a stop."""
    return control_input(input_id, item_pb2.Control(stop=item_pb2.Stop(mode=mode, reason=reason)))


def says(text: str) -> llm_pb2.OutputItem:
    """Return a text of the model."""
    return llm_pb2.OutputItem(message=llm_pb2.OutputMessage(text=text))


def calls(call_id: str, name: str = "Bash", arguments: str = '{"command": "true"}') -> llm_pb2.OutputItem:
    """Return a tool call of the model."""
    return llm_pb2.OutputItem(tool_call=llm_pb2.ToolCall(call_id=call_id, name=name, arguments_json=arguments))


def output(
    *items: llm_pb2.OutputItem, stop: llm_pb2.StopReason.ValueType = llm_pb2.STOP_REASON_COMPLETE
) -> llm_pb2.ModelOutput:
    """Return a response."""
    return llm_pb2.ModelOutput(items=items, stop_reason=stop, usage=llm_pb2.Usage(input_tokens=10, output_tokens=5))


class SessionDriver:
    """A session whose every commit succeeds."""

    def __init__(
        self, record: session_pb2.Session | None = None, *, config: CoordinatorConfig | None = None, load: bool = True
    ) -> None:
        """Load a new session, its manager connected."""
        self.environment = Environment(
            config=config or CoordinatorConfig(), tools=default_registry(), window_tokens=lambda _: 0
        )
        self.record = record or session()
        self.state: SessionState = initial_state(self.record)
        self.volatile = Volatile()
        self.monotonic_s = 1000.0
        self.items: list[item_pb2.Item] = []
        self.operations: dict[str, operation_pb2.Operation] = {}
        self.changes: list[item_pb2.Item | operation_pb2.Operation] = []
        self.commits: list[Decision] = []
        self.effects: list[Effect] = []
        self.answers: list[Answer | Refusal] = []
        self.decision: Decision | None = None
        self.usage = llm_pb2.Usage(input_tokens=10, output_tokens=5)
        """What the provider says of each answer."""

        self._tickets = itertools.count(1)
        if load:
            self.step(Loaded(was_taken_over=False), ManagerConnected(manager_name=MANAGER, instance_id=INSTANCE))

    @property
    def now(self) -> Now:
        """The driver's time."""
        return Now(wall_time=START + timedelta(seconds=self.monotonic_s), monotonic_s=self.monotonic_s)

    def step(self, *stimuli: Stimulus) -> Decision:
        """Decide, adopt, and keep what was written and what is to be done."""
        decision = decide(self.environment, self.state, self.volatile, stimuli, self.now)
        self.decision = decision
        self.state, self.volatile = decision.next_state, decision.next_volatile
        self.items += decision.items
        for operation in decision.operations:
            self.operations[operation.operation_id] = operation
        self.changes += [*decision.items, *decision.operations]
        if decision.has_commit:
            self.commits.append(decision)
        self.effects += decision.effects
        self.answers += decision.answers
        return decision

    def wait(self, seconds: float) -> Decision:
        """Let time pass, then decide."""
        self.monotonic_s += seconds
        return self.step()

    def submit(self, *messages: item_pb2.Input) -> Decision:
        """Submit inputs together."""
        return self.step(*(InputArrived(ticket=next(self._tickets), message=one) for one in messages))

    def say(self, text: str, *, after_turn: bool = False) -> Decision:
        """Submit a text under a fresh ID; the workspace is inspected at once where that is asked for."""
        decision = self.submit(text_input(f"i{next(self._tickets)}", text, after_turn=after_turn))
        self.finish_inspection()
        return self.decision or decision

    def finish_inspection(self) -> None:
        """Report the workspace inspection as done, if one is under way."""
        for operation in list(self.state.unsettled()):
            if operation.type == "inspect_workspace":
                found = operation_pb2.InspectWorkspaceState(
                    workspace="/work", exists=True, is_writable=True, shell="/bin/bash", platform="linux/x86_64"
                )
                self.report(operation.operation_id, operation_pb2.OPERATION_STATUS_COMPLETED, inspection=found)

    def answer(self, *items: llm_pb2.OutputItem, **kwargs: llm_pb2.StopReason.ValueType) -> Decision:
        """Let the model answer the request in flight."""
        answer = output(*items, **kwargs)
        answer.usage.CopyFrom(self.usage)
        return self.step(ModelAnswered(turn_id=self.volatile.request_turn_id, output=answer))

    def fail(self, error_class: llm_pb2.ErrorClass.ValueType) -> Decision:
        """Let the request in flight fail."""
        failure = llm_pb2.Failure(error_class=error_class, message="it failed")
        return self.step(ModelFailed(turn_id=self.volatile.request_turn_id, failure=failure))

    def fail_with_overflow(self) -> Decision:
        """Let the provider refuse the request in flight as larger than the window."""
        return self.fail(llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW)

    def reported(
        self,
        operation_id: str,
        status: operation_pb2.OperationStatus.ValueType,
        *,
        text: str = "done",
        inspection: operation_pb2.InspectWorkspaceState | None = None,
    ) -> OperationReported:
        """Return a manager's report of an operation's next state."""
        known = self.operations[operation_id]
        operation = operation_pb2.Operation()
        operation.CopyFrom(known)
        operation.status = status
        operation.step += 1
        if inspection is not None:
            operation.inspect_workspace.CopyFrom(inspection)
        elif operation.HasField("bash") and is_terminal(operation):
            operation.bash.has_exit = status == operation_pb2.OPERATION_STATUS_COMPLETED
            operation.bash.stdout.head = text
            operation.bash.stdout.total_bytes = len(text)
        if is_terminal(operation) and status != operation_pb2.OPERATION_STATUS_COMPLETED:
            operation.error.reason, operation.error.message = "TEST", text
        return OperationReported(operation=operation)

    def report(
        self,
        operation_id: str,
        status: operation_pb2.OperationStatus.ValueType = operation_pb2.OPERATION_STATUS_COMPLETED,
        *,
        text: str = "done",
        inspection: operation_pb2.InspectWorkspaceState | None = None,
    ) -> Decision:
        """Let the manager report an operation's next state."""
        return self.step(self.reported(operation_id, status, text=text, inspection=inspection))

    def operation_of(self, call_id: str) -> str:
        """Return the one operation of a call."""
        (operation_id,) = (key for key, one in self.operations.items() if one.call_id == call_id)
        return operation_id

    def requests(self) -> list[str]:
        """Return the turns whose request was sent, in order."""
        return [one.turn_id for one in self.effects if isinstance(one, SendRequest)]

    def dispatched(self) -> list[str]:
        """Return the operations that were handed to a manager, in order, repeats included."""
        return [
            operation.operation_id for one in self.effects if isinstance(one, Dispatch) for operation in one.operations
        ]

    def kinds(self) -> list[str]:
        """Return the kinds of the items so far."""
        return [str(item.WhichOneof("item")) for item in self.items]

    def sent(self) -> list[tuple[str, str]]:
        """Return the conversation of the latest turn and what is behind it, as (role, text)."""
        return [(_role(one), _text(one)) for one in (placed.entry for placed in self.state.context.submitted.entries)]

    def next_sent(self) -> list[tuple[str, str]]:
        """Return what a turn would send now."""
        digest = self.state.prompt.digest if self.state.prompt is not None else ""
        request = next_request(self.state.context, provider="scripted", model="m1", prompt_digest=digest)
        return [(_role(one), _text(one)) for one in request.entries]


def _role(entry: llm_pb2.ContextEntry) -> str:
    return str(entry.WhichOneof("entry"))


def _text(entry: llm_pb2.ContextEntry) -> str:
    match entry.WhichOneof("entry"):
        case "user":
            return _joined(entry.user.parts)
        case "tool_result":
            return f"{entry.tool_result.call_id}: {_joined(entry.tool_result.parts)}"
        case _:
            return " ".join(
                item.tool_call.call_id if item.HasField("tool_call") else item.message.text
                for item in entry.assistant.items
            )


def _joined(parts: Sequence[llm_pb2.ContentPart]) -> str:
    return "".join(part.text.text for part in parts)
