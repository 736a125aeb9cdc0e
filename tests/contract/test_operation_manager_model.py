"""Whatever is asked of a manager in whatever order, and however it ends, it keeps what a small model says."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from harness.clock import timestamp
from harness.errors import ConflictError, FailedPreconditionError, HarnessError, InvalidArgumentError, NotFoundError
from harness.operations.operations import is_terminal
from tests.support.eventually import eventually
from tests.support.manager_model import AWAITING, CANCELED, ManagerModel, ModelOperation
from tests.support.manager_thread import ManagerThread, Opening, ShiftedClock, local_manager, proxied_manager
from tests.support.operations import bash
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

SESSIONS = ("session-1", "session-2")
OWNERS = ("", "coordinator-1", "coordinator-2")
KINDS = ("value", "value", "due", "due", "far", "far", "far", "skill", "bash")
PURE_KINDS = ("value", "due", "far", "skill")

sessions = st.sampled_from(SESSIONS)
owners = st.sampled_from(OWNERS)
picks = st.integers(0, 1_000)


class ManagerMachine(RuleBasedStateMachine):
    """Asks a real manager over a real journal for anything, and compares each answer with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ManagerModel()
        self.clock = ShiftedClock()
        self._temporary = tempfile.TemporaryDirectory()
        place = Path(self._temporary.name)
        self.workspace = place / "workspace"
        self.workspace.mkdir()
        self.thread = ManagerThread(self.opening(), place / "state", self.clock)

    def opening(self) -> Opening:
        raise NotImplementedError

    @initialize()
    def open(self) -> None:
        self.thread.open()
        info = self.thread.call(self.thread.manager.get_server_info(manager_pb2.GetServerInfoRequest())).info
        assert info.instance_id
        assert self.model.instance_id in ("", info.instance_id), "the instance changed with a restart"
        self.model.instance_id = info.instance_id

    def teardown(self) -> None:
        self.thread.stop()
        self._temporary.cleanup()

    # --- adding ---

    @rule(
        session=sessions,
        owner=owners,
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
        rise=st.integers(0, 1),
    )
    def add(self, session: str, owner: str, kinds: list[str], rise: int) -> None:
        operations = [self._operation(kind, session, self.model.new_id(kind)) for kind in kinds]
        epoch = self.model.epochs.get(session, 1) + rise
        response = self._add(operations, session=session, epoch=epoch, owner=owner)
        for kind, operation, result in zip(kinds, operations, response.results, strict=True):
            assert result.operation_id == operation.operation_id
            self.model.accept(operation, kind, result.operation)

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, owner=owners, is_changed=st.booleans())
    def add_again(self, pick: int, owner: str, is_changed: bool) -> None:
        held = self._pick(pick)
        again = operation_pb2.Operation()
        again.CopyFrom(held.added)
        if is_changed:
            again.value.value_json = '"other content"'
        epoch = self.model.epochs[held.session_id]
        response = self._add([again], session=held.session_id, epoch=epoch, owner=owner)
        self._show(held, response.results[0].operation)

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks)
    def add_for_another_session(self, pick: int) -> None:
        held = self._pick(pick)
        stolen = operation_pb2.Operation()
        stolen.CopyFrom(held.added)
        stolen.session_id = next(name for name in SESSIONS if name != held.session_id)
        epoch = self.model.epochs.get(stolen.session_id, 1)
        response = self._add([stolen], session=stolen.session_id, epoch=epoch, owner="coordinator-1")
        assert response.results[0].refusal.reason == "INVALID_OPERATION"

    @rule(session=sessions, fault=st.sampled_from(["value_json", "type_version", "status", "effect_class", "state"]))
    def add_what_is_refused(self, session: str, fault: str) -> None:
        operation = self._operation("value", session, self.model.new_id("refused"))
        if fault == "value_json":
            operation.value.value_json = "{"
        elif fault == "state":
            operation.ClearField("value")
        else:
            setattr(operation, fault, 4)
        response = self._add([operation], session=session, epoch=self.model.epochs.get(session, 1), owner="")
        assert response.results[0].refusal.reason
        self._refused(NotFoundError, lambda: self._get(operation.operation_id))

    @rule(session=sessions, how=st.sampled_from(["epoch", "instance", "fence"]))
    def add_under_a_wrong_fence(self, session: str, how: str) -> None:
        operation = self._operation("value", session, self.model.new_id("stale"))
        request = self._request([operation], session=session, epoch=self.model.epochs.get(session, 1), owner="")
        expected: type[HarnessError] = InvalidArgumentError
        if how == "epoch":
            request.fences[0].epoch -= 1
            expected = ConflictError
            if session not in self.model.epochs:
                return
        elif how == "instance":
            request.instance_id = "another"
            expected = FailedPreconditionError
        else:
            del request.fences[:]
        self._refused(expected, lambda: self.thread.call(self.thread.manager.add_operations(request)))
        self._refused(NotFoundError, lambda: self._get(operation.operation_id))

    @rule(session=sessions, first=st.integers(0, 3), second=st.integers(0, 3))
    def fence_twice_in_one_request(self, session: str, first: int, second: int) -> None:
        base = self.model.epochs.get(session, 1)
        request = manager_pb2.AddOperationsRequest(
            fences=[manager_pb2.Fence(session_id=session, epoch=base + rise) for rise in (first, second)]
        )
        self.thread.call(self.thread.manager.add_operations(request))
        self.model.fence(session, base + max(first, second), "")
        self.model.made_durable()

    # --- cancelling and acknowledging ---

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, rise=st.integers(0, 1), is_discarded=st.booleans())
    def cancel(self, pick: int, rise: int, is_discarded: bool) -> None:
        held = self._pick(pick)
        held.is_canceled = held.is_canceled or not is_terminal(held.seen)
        epoch = self.model.epochs[held.session_id] + rise
        answered = self._cancel(held.added.operation_id, held.session_id, epoch, is_discarded=is_discarded)
        self.model.fence(held.session_id, epoch)
        self.model.made_durable()
        if held.is_buried:
            self._show(held, answered)
            return
        if not is_discarded:
            self._show(held, answered)
            assert held.kind not in PURE_KINDS or is_terminal(answered)
            return
        self._discarded(held)

    @precondition(lambda self: self.model.operations)
    @rule(pick=picks, is_stale=st.booleans(), rise=st.integers(0, 2))
    def cancel_under_a_wrong_fence(self, pick: int, is_stale: bool, rise: int) -> None:
        held = self._pick(pick)
        name = held.added.operation_id
        if is_stale:
            epoch = self.model.epochs[held.session_id] - 1
            self._refused(ConflictError, lambda: self._cancel(name, held.session_id, epoch))
        else:
            # Whatever epoch of whatever session: it is not that session's operation.
            other = next(session for session in SESSIONS if session != held.session_id)
            epoch = self.model.epochs.get(other, 1) + rise
            self._refused(InvalidArgumentError, lambda: self._cancel(name, other, epoch))

    @rule(session=sessions, is_added=st.booleans(), is_discarded=st.booleans(), kind=st.sampled_from(KINDS))
    def cancel_before_the_add(self, session: str, is_added: bool, is_discarded: bool, kind: str) -> None:
        name = self.model.new_id(kind)
        epoch = self.model.epochs.get(session, 1)
        self._cancel(name, session, epoch, is_discarded=is_discarded)
        self.model.fence(session, epoch)
        self.model.made_durable()
        self.model.canceled_before[name] = session
        self._refused(NotFoundError, lambda: self._get(name))
        if is_added:
            self.add_what_was_canceled_before(0)

    @precondition(lambda self: self.model.canceled_before)
    @rule(pick=picks)
    def add_what_was_canceled_before(self, pick: int) -> None:
        names = sorted(self.model.canceled_before)
        name = names[pick % len(names)]
        session, kind = self.model.canceled_before[name], name.partition("-")[0]
        operation = self._operation(kind, session, name)
        response = self._add([operation], session=session, epoch=self.model.epochs[session], owner="")
        self.model.accept(operation, kind, response.results[0].operation)

    @precondition(lambda self: self.model.operations)
    @rule(
        pick=picks,
        step=st.sampled_from([0, -1, -2, 7, 2**62, 2**64]),
        is_discarded=st.sampled_from([False, False, True]),
    )
    def acknowledge(self, pick: int, step: int, is_discarded: bool) -> None:
        held = self._pick(pick)
        self._show(held, self._get(held.added.operation_id))
        number = min(max(held.seen.step + step, 0), 2**64 - 1)
        acknowledgement = manager_pb2.Acknowledgement(
            operation_id=held.added.operation_id, step=number, discarded=is_discarded
        )
        if is_discarded:
            held.is_canceled = held.is_canceled or not is_terminal(held.seen)
        elif step > 0 and not is_terminal(held.seen) and not held.waits_for_ever:
            return  # an end that nobody has seen yet may be acknowledged so, or may not
        request = manager_pb2.AcknowledgeUpdatesRequest(acknowledgements=[acknowledgement])
        for _ in range(2):
            self.thread.call(self.thread.manager.acknowledge_updates(request))
        if held.is_buried:
            return
        if is_discarded:
            self._discarded(held)
        elif is_terminal(held.seen) and number >= held.seen.step:
            held.bury()
            held.is_lazy = True
        elif not is_terminal(held.seen):
            # The state may be newer than the one that was seen, and then this is an old one.
            known = held.acknowledged_step
            held.acknowledged_step = None if known is None else max(known, min(number, held.seen.step))
            held.is_lazy = True
        elif held.acknowledged_step is not None:
            held.acknowledged_step = max(held.acknowledged_step, number)
            held.is_lazy = True

    def _discarded(self, held: ModelOperation) -> None:
        """Wait until nothing but a tombstone is left of a discarded operation."""
        held.is_discarded = True
        name = held.added.operation_id

        async def is_buried() -> bool:
            request = manager_pb2.ListOperationsRequest(session_id=held.session_id)
            listed = (await self.thread.manager.list_operations(request)).operations
            return name not in [operation.operation_id for operation in listed]

        self.thread.call(eventually(is_buried, within_s=10))
        held.bury()
        held.is_lazy = True
        self._show(held, self._get(name))

    # --- reading ---

    @rule(is_settled=st.booleans(), owner=owners, pick=picks)
    def watch(self, is_settled: bool, owner: str, pick: int) -> None:
        if is_settled:
            self.settle()
        positions = [0, *sorted({held.position for held in self.model.operations.values()})]
        after = positions[pick % len(positions)]
        # Decided before the watch: what it tells of changes what a later one must.
        must, may = self.model.missed(owner, after)
        told = self.thread.call(self._watched(owner, after))
        if is_settled:
            assert must <= told <= must | may, (must, told, may)

    async def _watched(self, owner: str, after_position: int) -> set[str]:
        told: set[str] = set()
        request = manager_pb2.WatchOperationsRequest(owner=owner, after_position=after_position)
        watch: Any = self.thread.manager.watch_operations(request)
        async with asyncio.timeout(10), aclosing(watch) as responses:
            hello = (await anext(responses)).hello
            assert hello.instance_id == self.model.instance_id
            async for response in responses:
                if response.HasField("keepalive"):
                    break
                operation = response.update.operation
                held = self.model.operations[operation.operation_id]
                assert not held.is_buried, "an acknowledged end was sent again"
                assert response.update.position >= held.position
                held.position = response.update.position
                held.show(operation)
                told.add(operation.operation_id)
        return told

    @rule(page_size=st.integers(1, 4), session=st.sampled_from(["", *SESSIONS]))
    def list_all(self, page_size: int, session: str) -> None:
        names: list[str] = []
        token = ""
        while True:
            request = manager_pb2.ListOperationsRequest(session_id=session, page_size=page_size, page_token=token)
            page = self.thread.call(self.thread.manager.list_operations(request))
            for operation in page.operations:
                held = self.model.operations[operation.operation_id]
                assert not held.is_buried
                held.show(operation)
                names.append(operation.operation_id)
            token = page.next_page_token
            if not token:
                break
        expected = {
            name
            for name, held in self.model.operations.items()
            if not held.is_buried and session in ("", held.session_id)
        }
        assert sorted(names) == sorted(expected)

    @rule()
    def settle(self) -> None:
        """Wait until everything that ends by itself has ended, and look at everything."""
        for held in self.model.operations.values():
            if not held.is_buried:
                self.thread.call(eventually(partial(self._is_settled, held), within_s=10))
        for name, held in self.model.operations.items():
            self._show(held, self._get(name))

    async def _is_settled(self, held: ModelOperation) -> bool:
        request = manager_pb2.GetOperationRequest(operation_id=held.added.operation_id)
        state = (await self.thread.manager.get_operation(request)).operation
        return is_terminal(state) or (held.waits_for_ever and state.status == AWAITING)

    # --- restarts ---

    @rule(is_killed=st.booleans(), is_later=st.sampled_from([False, False, True]))
    def restart(self, is_killed: bool, is_later: bool) -> None:
        self.thread.close(is_killed=is_killed)
        if is_later:
            self.clock.ahead += timedelta(hours=2)
            for held in self.model.operations.values():
                if held.kind == "far":
                    held.kind = "due"
        self.open()
        if is_killed:
            self._find_lost_acknowledgements()
        for name, held in self.model.operations.items():
            self._show(held, self._get(name))
            held.is_lazy = False
        for session, epoch in self.model.epochs.items():
            self._refused(ConflictError, partial(self._cancel, "any", session, epoch - 1))

    def _find_lost_acknowledgements(self) -> None:
        """What was acknowledged without a later write may be reported again: that is what a kill may lose."""
        listed = self.thread.call(self.thread.manager.list_operations(manager_pb2.ListOperationsRequest()))
        remembered = {operation.operation_id for operation in listed.operations}
        for name, held in self.model.operations.items():
            if held.is_lazy and not held.is_discarded:
                held.is_buried = held.is_buried and name not in remembered
                held.acknowledged_step = None

    # --- what holds at any time ---

    @invariant()
    def commands_ran_once(self) -> None:
        for name, held in self.model.operations.items():
            if held.kind == "bash":
                effects = self.workspace / name
                count = len(effects.read_text().splitlines()) if effects.exists() else 0
                assert count <= 1, f"{name} ran {count} times"
                assert count == 1 or held.seen.status != operation_pb2.OPERATION_STATUS_COMPLETED
                assert count == 0 or held.seen.status != CANCELED or held.seen.step > 2

    # --- requests ---

    def _operation(self, kind: str, session: str, name: str) -> operation_pb2.Operation:
        if kind == "bash":
            return bash(f"echo x >> {name}", session_id=session, operation_id=name)
        operation = operation_pb2.Operation(
            schema_version=1,
            operation_id=name,
            session_id=session,
            type={"due": "timer", "far": "timer", "skill": "skill_use"}.get(kind, "value"),
            type_version=1,
            status=operation_pb2.OPERATION_STATUS_READY,
            step=1,
            effect_class=operation_pb2.EFFECT_CLASS_PURE,
            call_id=f"call of {name}",
        )
        if operation.type == "timer":
            hours = 1 if kind == "far" else -1
            operation.timer.fire_time.CopyFrom(timestamp(self.clock.now() + timedelta(hours=hours)))
        elif kind == "skill":
            operation.skill_use.name = "missing"
        else:
            operation.value.value_json = f'"{name}"'
        return operation

    def _request(
        self, operations: list[operation_pb2.Operation], *, session: str, epoch: int, owner: str
    ) -> manager_pb2.AddOperationsRequest:
        return manager_pb2.AddOperationsRequest(
            instance_id=self.model.instance_id,
            owner=owner,
            fences=[manager_pb2.Fence(session_id=session, epoch=epoch)],
            assignments=[
                manager_pb2.OperationAssignment(operation=operation, workspace=str(self.workspace))
                for operation in operations
            ],
        )

    def _add(
        self, operations: list[operation_pb2.Operation], *, session: str, epoch: int, owner: str
    ) -> manager_pb2.AddOperationsResponse:
        request = self._request(operations, session=session, epoch=epoch, owner=owner)
        response = self.thread.call(self.thread.manager.add_operations(request))
        assert response.instance_id == self.model.instance_id
        self.model.fence(session, epoch, owner)
        self.model.made_durable()
        return response

    def _cancel(self, name: str, session: str, epoch: int, *, is_discarded: bool = False) -> operation_pb2.Operation:
        fence = manager_pb2.Fence(session_id=session, epoch=epoch)
        request = manager_pb2.CancelOperationRequest(operation_id=name, fence=fence, discard=is_discarded)
        return self.thread.call(self.thread.manager.cancel_operation(request)).operation

    def _get(self, name: str) -> operation_pb2.Operation:
        request = manager_pb2.GetOperationRequest(operation_id=name)
        return self.thread.call(self.thread.manager.get_operation(request)).operation

    def _show(self, held: ModelOperation, state: operation_pb2.Operation) -> None:
        held.show(state)

    def _pick(self, pick: int) -> ModelOperation:
        held = list(self.model.operations.values())
        return held[pick % len(held)]

    def _refused(self, expected: type[HarnessError], ask: Callable[[], object]) -> None:
        with pytest.raises(expected):
            ask()


class LocalMachine(ManagerMachine):
    def opening(self) -> Opening:
        return local_manager


class ServedMachine(ManagerMachine):
    def opening(self) -> Opening:
        return proxied_manager


SHORT = settings(max_examples=12, stateful_step_count=25, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=300, stateful_step_count=60, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_local_manager_keeps_what_it_promised() -> None:
    run_state_machine_as_test(LocalMachine, settings=SHORT)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_local_manager_keeps_what_it_promised_for_long() -> None:
    run_state_machine_as_test(LocalMachine, settings=LONG)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_served_manager_keeps_what_it_promised() -> None:
    run_state_machine_as_test(ServedMachine, settings=settings(SHORT, max_examples=5))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_served_manager_keeps_what_it_promised_for_long() -> None:
    run_state_machine_as_test(ServedMachine, settings=settings(LONG, max_examples=100))
