"""Sessions that live through anything: a driver that checks every step, and a world that does whatever can happen."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from harness.clock import timestamp
from harness.coordinator import CoordinatorConfig
from harness.coordinator.apply import apply, apply_all
from harness.coordinator.decide import decide
from harness.coordinator.protocol import (
    Acknowledge,
    CancelRequest,
    Decision,
    Dispatch,
    InputArrived,
    Loaded,
    ManagerConnected,
    ManagerLost,
    ModelAnswered,
    ModelFailed,
    OperationRefused,
    OperationReported,
    SendCancel,
    SendRequest,
    Stimulus,
    Volatile,
)
from harness.coordinator.state import initial_state
from harness.operations import is_terminal
from harness.session_store.forks import OpenCall, fork_items
from tests.support.session_driver import MANAGER, SessionDriver, control_input, says, session, text_input
from tests.support.session_oracle import (
    StoreRules,
    TurnsSent,
    assert_counters_agree,
    assert_same_request,
    frozen,
    loaded_state,
    scrambled,
)
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

TERMINAL = (
    operation_pb2.OPERATION_STATUS_COMPLETED,
    operation_pb2.OPERATION_STATUS_FAILED,
    operation_pb2.OPERATION_STATUS_CANCELED,
    operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN,
)


class CheckedDriver(SessionDriver):
    """A driver that fails at the first step after which something does not hold."""

    def __init__(
        self, record: session_pb2.Session | None = None, *, config: CoordinatorConfig | None = None, load: bool = True
    ) -> None:
        """Load a new session, its manager connected."""
        own = record or session()
        self.replayed = initial_state(own)
        self.turns = TurnsSent()
        self.rng = random.Random(0)
        self._rules = StoreRules(own.session_id)
        self._handed_over: set[str] = set()
        super().__init__(own, config=config, load=load)

    def step(self, *stimuli: Stimulus) -> Decision:
        """Decide, adopt, and check."""
        state, volatile = self.state, self.volatile
        before = frozen((state, volatile, stimuli))
        decision = super().step(*stimuli)
        assert frozen((state, volatile, stimuli)) == before, "a value that was given was changed"
        again = decide(self.environment, state, volatile, stimuli, self.now)
        assert (again.items, again.operations, again.effects) == (decision.items, decision.operations, decision.effects)
        if decision.has_commit:
            self._rules.commit(decision)
        self.replayed = apply_all(self.replayed, [*decision.items, *decision.operations])
        assert self.replayed == self.state, "replay differs from living through it"
        assert_counters_agree(self.state)
        self.turns.follow(self.state, decision)
        self._check_effects(decision, volatile, stimuli)
        return decision

    def check_replay(self) -> None:
        """Replay everything as a fresh process would, and with operations dropped and moved at random."""
        replayed = apply_all(initial_state(self.record), scrambled(self.changes, self.rng))
        assert replayed == self.state
        assert_same_request(self.state, replayed)
        assert loaded_state(self.record, self.changes) == self.state

    def restart(self, *, was_taken_over: bool = False) -> None:
        """End the process and load the session into another one, which knows no manager yet."""
        self.check_replay()
        self.state = self.replayed = loaded_state(self.record, self.changes)
        self.volatile = Volatile(rest=self.commits[-1].rest if self.commits else None)
        self._handed_over.clear()
        self.step(Loaded(was_taken_over=was_taken_over))

    def connect(self, instance_id: str) -> Decision:
        """Let the manager answer, as this instance."""
        return self.step(ManagerConnected(manager_name=MANAGER, instance_id=instance_id))

    def _check_effects(self, decision: Decision, before: Volatile, stimuli: Sequence[Stimulus]) -> None:
        if any(isinstance(one, ManagerConnected) for one in stimuli):
            self._handed_over.clear()
        in_flight = before.request_turn_id
        if any(isinstance(one, ModelAnswered | ModelFailed) and one.turn_id == in_flight for one in stimuli):
            in_flight = in_flight if any(isinstance(one, CancelRequest) for one in decision.effects) else ""
        for effect in decision.effects:
            match effect:
                case CancelRequest():
                    assert effect.turn_id == in_flight, "a request is cancelled that is not in flight"
                    in_flight = ""
                case SendRequest():
                    assert not in_flight, "two requests at once"
                    latest = self.state.latest_turn
                    assert latest is not None and latest.turn_id == effect.turn_id
                    in_flight = effect.turn_id
                case Dispatch():
                    assert effect.instance_id == self.volatile.instances[effect.manager_name]
                    for operation in effect.operations:
                        self._check_dispatch(effect, operation)
                case SendCancel():
                    recorded = self.operations[effect.operation_id]
                    assert recorded.instance_id, "cancelled before it was sent"
                case Acknowledge():
                    assert is_terminal(self.operations[effect.operation_id]), "acknowledged before it is recorded"
                case _:
                    pass

    def _check_dispatch(self, effect: Dispatch, operation: operation_pb2.Operation) -> None:
        recorded = self.operations[operation.operation_id]
        assert recorded.instance_id == operation.instance_id == effect.instance_id, "sent before it was assigned"
        assert operation.operation_id not in self._handed_over, "dispatched twice over one connection"
        self._handed_over.add(operation.operation_id)


class _ForkDriver(SessionDriver):
    """A driver whose input IDs are none of its parent's."""

    def __init__(self, record: session_pb2.Session, *, first_ticket: int) -> None:
        super().__init__(record, load=False)
        self._tickets = itertools.count(first_ticket)


def fork_of(parent: SessionDriver, *, cut_sequence: int = 0, session_id: str = "child") -> SessionDriver:
    """Return a fork that is loaded and connected; a cut inside a response's statuses moves behind them."""
    cut = cut_sequence or parent.items[-1].sequence
    while cut < len(parent.items) and parent.items[cut].HasField("tool_call_status"):
        first = parent.items[cut].tool_call_status
        if first.HasField("result") and first.operation_ids:
            break
        cut += 1
    inherited = [item for item in parent.items if item.sequence <= cut]
    at_cut = apply_all(initial_state(parent.record), inherited)
    record = session_pb2.Session()
    record.CopyFrom(parent.record)
    record.session_id, record.session_uid = session_id, f"uid-{session_id}"
    record.initial_settings.CopyFrom(at_cut.settings)
    open_calls = [OpenCall(turn_id=one.turn_id, call_id=call_id) for call_id, one in sorted(at_cut.calls.items())]
    origin = session_pb2.ForkOrigin(parent_session_id=parent.record.session_id, cut_sequence=cut)
    own = fork_items(origin, "fork-1", open_calls, 1, parent.now.wall_time)
    child = _ForkDriver(record, first_ticket=1000 * len(inherited))
    child.monotonic_s = parent.monotonic_s
    child.items = [*inherited, *own]
    child.changes = list(child.items)
    for item in child.items:
        child.state = apply(child.state, item)
    child.step(Loaded(was_taken_over=False), ManagerConnected(manager_name=MANAGER, instance_id="instance-1"))
    return child


@dataclass(slots=True)
class ScriptedManager:
    """An operation manager by its contract: it keeps what it accepted, steps it on, and forgets no ID."""

    instance_id: str
    known: dict[str, operation_pb2.Operation] = field(default_factory=dict)
    discarded: set[str] = field(default_factory=set)
    cancels: set[str] = field(default_factory=set)
    history: list[operation_pb2.Operation] = field(default_factory=list)

    def running(self) -> list[str]:
        """Return what is not terminal here, in the order in which it came."""
        return [key for key, one in self.known.items() if not is_terminal(one) and key not in self.discarded]

    def advance(self, operation_id: str, status: operation_pb2.OperationStatus.ValueType) -> OperationReported:
        """Step an operation on and report it."""
        operation = operation_pb2.Operation()
        operation.CopyFrom(self.known[operation_id])
        operation.status = status
        operation.step += 1
        if status == operation_pb2.OPERATION_STATUS_COMPLETED:
            _fill(operation)
        elif is_terminal(operation):
            operation.error.reason, operation.error.message = "TEST", "it did not complete"
        self.known[operation_id] = operation
        self.history.append(operation)
        return OperationReported(operation=operation)


def _fill(operation: operation_pb2.Operation) -> None:
    match operation.WhichOneof("state"):
        case "bash":
            operation.bash.has_exit = True
            # Some results are worth pruning, some are not.
            operation.bash.stdout.head = f"output of {operation.operation_id}" * (
                1 + 200 * (sum(operation.operation_id.encode()) % 3)
            )
        case "inspect_workspace":
            found = operation.inspect_workspace
            found.workspace, found.exists, found.is_writable, found.shell = "/work", True, True, "/bin/bash"
            found.skills.add(name="testing", description="how to test", path="SKILL.md")
        case "skill_use":
            operation.skill_use.content = "a skill"
        case _:
            pass


class Chaos:
    """Lets anything happen to one session, one action at a time, chosen by numbers that a test draws."""

    def __init__(self) -> None:
        """Begin with a new session, its manager connected."""
        self.driver = CheckedDriver(load=False)
        self.manager = ScriptedManager(instance_id="instance-1")
        self.is_connected = False
        self._input_numbers = itertools.count(1)
        self._instance_numbers = itertools.count(2)
        self._added = itertools.count(1)
        self._refuses = True
        self._submitted: list[item_pb2.Input] = []
        self._do(Loaded(was_taken_over=False))
        self._reconnect(self.manager)

    def begin(self, *, is_inspected: bool) -> None:
        """Submit a first text; let the inspection of the workspace be done, or leave it to what happens."""
        self.say("begin")
        if is_inspected:
            (operation_id,) = self.manager.running()
            self._do(self.manager.advance(operation_id, operation_pb2.OPERATION_STATUS_COMPLETED))

    def act(self, name: str, pick: int) -> None:
        """Do one action; one that makes no sense now does nothing."""
        action: Callable[[random.Random], None] = getattr(self, f"_act_{name}")
        action(random.Random(pick))

    @classmethod
    def actions(cls) -> list[str]:
        """Return the names of all actions, those that move a session on more than once."""
        names = sorted(name.removeprefix("_act_") for name in dir(cls) if name.startswith("_act_"))
        return [*names, *["answer"] * 5, *["end_operation"] * 3, *["connect"] * 2, "step_operation", "wait"]

    def drain(self) -> None:
        """Let everything that is under way come to its end; from now on the manager takes what it is given."""
        self._refuses = False
        for _ in range(400):
            if not self.is_connected:
                self._reconnect(self.manager)
            elif self.driver.volatile.request_turn_id:
                self._do(ModelAnswered(turn_id=self.driver.volatile.request_turn_id, output=_output([says("so")])))
            elif running := self.manager.running():
                self._do(self.manager.advance(running[0], operation_pb2.OPERATION_STATUS_COMPLETED))
            elif self.driver.decision is not None and self.driver.decision.wake_s is not None:
                self.driver.monotonic_s = max(self.driver.monotonic_s, self.driver.decision.wake_s)
                self._do()
            else:
                return
        raise AssertionError("the session does not come to rest")

    def say(self, text: str) -> None:
        """Submit a text that interrupts."""
        self._submit(text_input(f"i{next(self._input_numbers)}", text))

    # What happens after a decision.

    def _do(self, *stimuli: Stimulus, is_performed: bool = True) -> None:
        decision = self.driver.step(*stimuli)
        follow_ups: list[Stimulus] = []
        for effect in decision.effects if is_performed else ():
            match effect:
                case Dispatch():
                    follow_ups += [self._accepted(one) for one in effect.operations]
                case SendCancel():
                    self.manager.cancels.add(effect.operation_id)
                case Acknowledge():
                    known = self.manager.known.get(effect.operation_id)
                    if effect.is_discarded or known is None or not is_terminal(known):
                        self.manager.discarded.add(effect.operation_id)
                case _:
                    pass
        if follow_ups:
            self._do(*follow_ups)

    def _accepted(self, operation: operation_pb2.Operation) -> Stimulus:
        known = self.manager.known.get(operation.operation_id)
        if known is not None:
            return OperationReported(operation=known)
        if self._refuses and next(self._added) % 11 == 10:
            error = operation_pb2.OperationError(reason="REFUSED", message="this manager does not take it")
            return OperationRefused(operation_id=operation.operation_id, error=error)
        self.manager.known[operation.operation_id] = operation
        return OperationReported(operation=operation)

    def _submit(self, message: item_pb2.Input, *, is_performed: bool = True) -> None:
        self._submitted.append(message)
        self._do(InputArrived(ticket=0, message=message), is_performed=is_performed)

    def _control(self, **control: object) -> None:
        message = item_pb2.Control(**control)  # type: ignore[arg-type]  # the caller names one field of the choice
        self._submit(control_input(f"c{next(self._input_numbers)}", message))

    def _reconnect(self, manager: ScriptedManager) -> None:
        self.manager = manager
        self.is_connected = True
        self._do(ManagerConnected(manager_name=MANAGER, instance_id=manager.instance_id))

    # Actions. Each is named in a test's list of actions.

    def _act_interrupt(self, rng: random.Random) -> None:
        self.say(f"text {rng.randint(0, 9)}")

    def _act_after_turn(self, rng: random.Random) -> None:
        self._submit(text_input(f"i{next(self._input_numbers)}", "when you are done", after_turn=True))

    def _act_inputs_together(self, rng: random.Random) -> None:
        texts = [text_input(f"i{next(self._input_numbers)}", "one of many") for _ in range(rng.randint(2, 3))]
        self._do(*(InputArrived(ticket=0, message=one) for one in texts))

    def _act_repeat_input(self, rng: random.Random) -> None:
        if self._submitted:
            self._do(InputArrived(ticket=0, message=rng.choice(self._submitted)))

    def _act_conflicting_input(self, rng: random.Random) -> None:
        if self._submitted:
            self._do(InputArrived(ticket=0, message=text_input(rng.choice(self._submitted).input_id, "other words")))

    def _act_stop(self, rng: random.Random) -> None:
        stop = item_pb2.Stop(mode=rng.choice([item_pb2.STOP_MODE_HARD, item_pb2.STOP_MODE_WHEN_IDLE]), reason="enough")
        if rng.random() < 0.3:
            stop.abandon_after.CopyFrom(Duration(seconds=rng.choice([0, 5])))
        self._control(stop=stop)

    def _act_cancel(self, rng: random.Random) -> None:
        unsettled = list(self.driver.state.unsettled())
        if unsettled:
            request = item_pb2.CancelOperation(operation_id=rng.choice(unsettled).operation_id, reason="not needed")
            if rng.random() < 0.5:
                request.abandon_after.CopyFrom(Duration(seconds=2))
            self._control(cancel_operation=request)

    def _act_abandon(self, rng: random.Random) -> None:
        unsettled = list(self.driver.state.unsettled())
        if unsettled:
            self._control(abandon_operation=item_pb2.AbandonOperation(operation_id=rng.choice(unsettled).operation_id))

    def _act_retry(self, rng: random.Random) -> None:
        self._control(retry_turn=item_pb2.RetryTurn(omit_new=rng.random() < 0.5))

    def _act_settings(self, rng: random.Random) -> None:
        patch = rng.choice(
            [
                session_pb2.SettingsPatch(model=rng.choice(["m1", "m2"])),
                session_pb2.SettingsPatch(system_prompt=rng.choice(["be brief", "be kind"])),
                session_pb2.SettingsPatch(enabled_tools=session_pb2.ToolSelection(names=["Bash"])),
                session_pb2.SettingsPatch(effort="high"),
            ]
        )
        self._control(settings=patch)

    def _act_compact(self, rng: random.Random) -> None:
        self._control(compact=item_pb2.Compact(reason="make room"))

    def _act_overflow(self, rng: random.Random) -> None:
        turn_id = self.driver.volatile.request_turn_id
        if turn_id:
            failure = llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_CONTEXT_OVERFLOW, message="too large")
            self._do(ModelFailed(turn_id=turn_id, failure=failure))

    def _act_window(self, rng: random.Random) -> None:
        """Another release, or another model of the name, has another window."""
        window = rng.choice([2_000, 4_000, 8_000, 12_000, 0])
        self.driver.environment = replace(self.driver.environment, window_tokens=lambda _: window)

    def _act_answer(self, rng: random.Random) -> None:
        turn_id = self.driver.volatile.request_turn_id
        if turn_id:
            self._do(ModelAnswered(turn_id=turn_id, output=random_output(rng)))

    def _act_answer_and_input(self, rng: random.Random) -> None:
        turn_id = self.driver.volatile.request_turn_id
        if turn_id:
            raced = text_input(f"i{next(self._input_numbers)}", "it raced", after_turn=rng.random() < 0.5)
            stimuli: list[Stimulus] = [
                InputArrived(ticket=0, message=raced),
                ModelAnswered(turn_id=turn_id, output=random_output(rng)),
            ]
            rng.shuffle(stimuli)
            self._do(*stimuli)

    def _act_late_answer(self, rng: random.Random) -> None:
        turns = [item.turn.turn_id for item in self.driver.items if item.HasField("turn")]
        if len(turns) > 1:
            self._do(ModelAnswered(turn_id=rng.choice(turns[:-1]), output=random_output(rng)))

    def _act_fail(self, rng: random.Random) -> None:
        turn_id = self.driver.volatile.request_turn_id
        if turn_id:
            classes = [value for value in llm_pb2.ErrorClass.values() if value]
            failure = llm_pb2.Failure(error_class=rng.choice(classes), message="it failed")
            if rng.random() < 0.3:
                moment = self.driver.now.wall_time + timedelta(seconds=rng.choice([-60, 20]))
                failure.retry_time.CopyFrom(timestamp(moment))
            self._do(ModelFailed(turn_id=turn_id, failure=failure))

    def _act_step_operation(self, rng: random.Random) -> None:
        running = self.manager.running()
        if self.is_connected and running:
            status = rng.choice([operation_pb2.OPERATION_STATUS_AWAITING, operation_pb2.OPERATION_STATUS_CANCELING])
            self._do(self.manager.advance(rng.choice(running), status))

    def _act_end_operation(self, rng: random.Random) -> None:
        running = self.manager.running()
        if self.is_connected and running:
            self._do(self.manager.advance(rng.choice(running), rng.choice(TERMINAL)))

    def _act_end_operations_together(self, rng: random.Random) -> None:
        running = self.manager.running()
        if self.is_connected and running:
            rng.shuffle(running)
            self._do(*(self.manager.advance(one, rng.choice(TERMINAL)) for one in running))

    def _act_end_unsaid(self, rng: random.Random) -> None:
        """The operation ends, and its report is lost with the connection."""
        if self.manager.running():
            self.manager.advance(rng.choice(self.manager.running()), rng.choice(TERMINAL))
            self._act_lose_manager(rng)

    def _act_stale_report(self, rng: random.Random) -> None:
        mine = [one for one in self.manager.history if one.operation_id not in self.manager.discarded]
        if self.is_connected and mine:
            self._do(OperationReported(operation=rng.choice(mine)))

    def _act_lose_manager(self, rng: random.Random) -> None:
        self.is_connected = False
        self._do(ManagerLost(manager_name=MANAGER))

    def _act_connect(self, rng: random.Random) -> None:
        self._reconnect(self.manager)

    def _act_connect_new_instance(self, rng: random.Random) -> None:
        self._reconnect(ScriptedManager(instance_id=f"instance-{next(self._instance_numbers)}"))

    def _act_wait(self, rng: random.Random) -> None:
        self.driver.monotonic_s += rng.choice([0.3, 1.1, 6.0, 31.0, 601.0])
        self._do()

    def _act_restart(self, rng: random.Random) -> None:
        self._restart(was_taken_over=rng.random() < 0.5)

    def _act_die_after_commit(self, rng: random.Random) -> None:
        """A commit is durable, and the process dies before any of its effects."""
        self._submit(text_input(f"i{next(self._input_numbers)}", "then it died"), is_performed=False)
        self._restart(was_taken_over=True)

    def _act_die_after_answer(self, rng: random.Random) -> None:
        turn_id = self.driver.volatile.request_turn_id
        if turn_id:
            self._do(ModelAnswered(turn_id=turn_id, output=random_output(rng)), is_performed=False)
            self._restart(was_taken_over=True)

    def _restart(self, *, was_taken_over: bool) -> None:
        self.driver.restart(was_taken_over=was_taken_over)
        self.is_connected = False


def random_output(rng: random.Random) -> llm_pb2.ModelOutput:
    """Return a response with up to three calls, some of which are no good."""
    items = [says("let me see")] if rng.random() < 0.7 else []
    if rng.random() < 0.2:
        reasoning = llm_pb2.Reasoning(raw_json='{"it": "thought"}', wire_format="scripted")
        items.insert(0, llm_pb2.OutputItem(reasoning=reasoning))
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        name, arguments = rng.choice(
            [
                ("Bash", '{"command": "true"}'),
                ("Bash", '{"command": "true"}'),
                ("Bash", "not json"),
                ("SkillUse", '{"name": "testing"}'),
                ("Nope", "{}"),
            ]
        )
        call_id = rng.choice(["", "c1", "c2", f"c{rng.randint(3, 10**9)}", f"c{rng.randint(3, 10**9)}", "x" * 100])
        items.append(
            llm_pb2.OutputItem(tool_call=llm_pb2.ToolCall(call_id=call_id, name=name, arguments_json=arguments))
        )
    stops = [llm_pb2.STOP_REASON_COMPLETE] * 8 + [llm_pb2.STOP_REASON_MAX_OUTPUT_TOKENS, llm_pb2.STOP_REASON_REFUSED]
    output = _output(items, rng.choice(stops))
    output.usage.input_tokens = rng.choice([0, 0, 10, 5_000])
    return output


def _output(
    items: Sequence[llm_pb2.OutputItem], stop: llm_pb2.StopReason.ValueType = llm_pb2.STOP_REASON_COMPLETE
) -> llm_pb2.ModelOutput:
    usage = llm_pb2.Usage(input_tokens=10, output_tokens=5)
    return llm_pb2.ModelOutput(items=items, stop_reason=stop, usage=usage)
