"""A coordinator's one connection to one operation manager, shared by all its sessions.

Owns the watch and the order of what is sent. It keeps no operation state: after a break every session hands over what
it has unsettled, so whatever was waiting to be sent is dropped without loss.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from harness import faults
from harness.coordinator.protocol import (
    Acknowledge,
    Dispatch,
    ManagerConnected,
    ManagerLost,
    OperationRefused,
    OperationReported,
    SendCancel,
    Stimulus,
)
from harness.errors import ConflictError, HarnessError, UnavailableError
from harness.operations import OperationManager, is_terminal
from harness.primitives.messages import find_unknown_field, find_unset_choice
from harness.session_store import OPERATION_SCHEMA_VERSION
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

logger = logging.getLogger(__name__)

BEFORE_DISPATCH = faults.declare("coordinator.dispatch.before", "operations are recorded, their manager was not told")
AFTER_DISPATCH = faults.declare("coordinator.dispatch.after", "a manager has accepted operations, nobody has noted it")
BEFORE_UPDATE = faults.declare("coordinator.update.before", "a manager's report came, its session does not know")
AFTER_UPDATE = faults.declare("coordinator.update.after", "a session was told of a manager's report")
BEFORE_ACKNOWLEDGE = faults.declare("coordinator.acknowledge.before", "a report is recorded, not acknowledged")
AFTER_ACKNOWLEDGE = faults.declare("coordinator.acknowledge.after", "a report is acknowledged")

FIRST_RECONNECT_S = 0.05
MAX_RECONNECT_S = 2.0
RECONNECT_GROWTH = 1.5

_ALL_SESSIONS = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """Something to tell the manager on behalf of a session."""

    session_id: str
    epoch: int
    workspace: str
    effect: Dispatch | SendCancel | Acknowledge


class ManagerLink:
    """Carries effects to a manager and reports back."""

    def __init__(
        self,
        manager_name: str,
        manager: OperationManager,
        *,
        owner: str,
        deliver: Callable[[str, Stimulus], None],
        drop_session: Callable[[str], None],
    ) -> None:
        """Prepare; `run` connects.

        Args:
            manager_name: The name that operations are assigned to.
            manager: The manager; stays the caller's to close.
            owner: The coordinator's name, by which the manager knows whose sessions to report.
            deliver: Takes a session ID (empty: every session) and what happened.
            drop_session: Called for a session that another coordinator owns now.
        """
        self.manager_name = manager_name
        self.manager = manager
        self.instance_id = ""
        self._owner = owner
        self._deliver = deliver
        self._drop_session = drop_session
        self._outgoing: deque[Outgoing] = deque()
        self._has_outgoing = asyncio.Event()
        self._accepted: dict[str, asyncio.Event] = {}

    def send(self, outgoing: Outgoing) -> None:
        """Queue something for the manager; dropped where it isn't connected, since reconnecting hands all over again.

        The queue is bounded by what the sessions have unsettled: each effect belongs to one operation.
        """
        if self.instance_id:
            self._outgoing.append(outgoing)
            self._has_outgoing.set()

    async def wait_accepted(self, operation_id: str) -> None:
        """Return once the manager has accepted an operation; the caller sets the deadline."""
        await self._accepted.setdefault(operation_id, asyncio.Event()).wait()

    async def run(self) -> None:
        """Connect, watch and send for ever; reconnect with back-off."""
        delay_s = FIRST_RECONNECT_S
        while True:
            try:
                await self._serve_connection()
            # Whatever a manager answers, a full disk or a bad token too: it is this manager's trouble and no other's.
            except* HarnessError as group:
                logger.warning(
                    "operation manager connection ended",
                    extra={"manager_name": self.manager_name, "reason": _reasons(group)},
                )
            if self.instance_id:
                delay_s = FIRST_RECONNECT_S
            self._disconnect()
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(delay_s * RECONNECT_GROWTH, MAX_RECONNECT_S)

    async def _serve_connection(self) -> None:
        stream = self.manager.watch_operations(manager_pb2.WatchOperationsRequest(owner=self._owner))
        async with asyncio.TaskGroup() as tasks:
            sender = tasks.create_task(self._send_all())
            try:
                await self._receive_all(stream)
            finally:
                sender.cancel()
        raise UnavailableError("the operation manager ended its watch", reason="WATCH_ENDED")

    async def _receive_all(self, stream: AsyncIterator[manager_pb2.WatchOperationsResponse]) -> None:
        attachments: dict[str, dict[str, bytearray]] = defaultdict(dict)
        async for message in stream:
            match message.WhichOneof("event"):
                case "hello":
                    self.instance_id = message.hello.instance_id
                    connected = ManagerConnected(manager_name=self.manager_name, instance_id=self.instance_id)
                    self._deliver(_ALL_SESSIONS, connected)
                case "attachment":
                    chunk = message.attachment
                    content = attachments[chunk.operation_id].setdefault(chunk.blob.digest, bytearray())
                    del content[chunk.offset :]
                    content += chunk.data
                case "update":
                    operation = message.update.operation
                    contents = attachments.pop(operation.operation_id, {})
                    if is_terminal(operation):
                        self._accepted.pop(operation.operation_id, None)
                    self._report(operation.session_id, operation, {key: bytes(data) for key, data in contents.items()})
                case _:
                    pass

    async def _send_all(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            batch = list(self._outgoing)
            self._outgoing.clear()
            await self._add([one for one in batch if isinstance(one.effect, Dispatch)])
            for one in batch:
                if isinstance(one.effect, SendCancel):
                    await self._cancel(one, one.effect)
            await self._acknowledge([one.effect for one in batch if isinstance(one.effect, Acknowledge)])

    async def _add(self, batch: list[Outgoing]) -> None:
        """Add the operations of many sessions in one call; a session that lost its lease is dropped."""
        while batch:
            faults.reach(BEFORE_DISPATCH)
            try:
                response = await self.manager.add_operations(self._add_request(batch))
            except ConflictError as error:
                stale = error.metadata.get("session_id", "")
                if not any(one.session_id == stale for one in batch):
                    raise
                self._drop_session(stale)
                batch = [one for one in batch if one.session_id != stale]
                continue
            faults.reach(AFTER_DISPATCH)
            sessions = {
                operation.operation_id: one.session_id for one in batch for operation in _dispatch(one).operations
            }
            for result in response.results:
                self._take_added(sessions[result.operation_id], result)
            return

    def _add_request(self, batch: list[Outgoing]) -> manager_pb2.AddOperationsRequest:
        fences = {one.session_id: one.epoch for one in batch}
        return manager_pb2.AddOperationsRequest(
            instance_id=_dispatch(batch[0]).instance_id,
            owner=self._owner,
            fences=[manager_pb2.Fence(session_id=key, epoch=epoch) for key, epoch in fences.items()],
            assignments=[
                manager_pb2.OperationAssignment(operation=operation, workspace=one.workspace)
                for one in batch
                for operation in _dispatch(one).operations
            ],
        )

    def _take_added(self, session_id: str, result: manager_pb2.AddResult) -> None:
        if result.WhichOneof("result") == "refusal":
            self._deliver(session_id, OperationRefused(operation_id=result.operation_id, error=result.refusal))
            return
        if is_terminal(result.operation):
            self._accepted.pop(result.operation_id, None)
        else:
            self._accepted.setdefault(result.operation_id, asyncio.Event()).set()
        self._report(session_id, result.operation, {})

    def _report(self, session_id: str, operation: operation_pb2.Operation, attachments: Mapping[str, bytes]) -> None:
        """Deliver a state that the manager reports, unless a later release made it.

        Such a state can't be committed, and would hold up whatever else happens in its session. It is not acknowledged
        either: the manager keeps it, and reports it again to a coordinator that knows it.
        """
        novelty = _find_novelty(operation)
        if novelty is None:
            faults.reach(BEFORE_UPDATE)
            self._deliver(session_id, OperationReported(operation=operation, attachments=attachments))
            faults.reach(AFTER_UPDATE)
            return
        logger.error(
            "report of a later release was left with its manager",
            extra={
                "manager_name": self.manager_name,
                "session_id": session_id,
                "operation_id": operation.operation_id,
                "field": novelty,
            },
        )

    async def _cancel(self, outgoing: Outgoing, effect: SendCancel) -> None:
        request = manager_pb2.CancelOperationRequest(
            operation_id=effect.operation_id,
            fence=manager_pb2.Fence(session_id=outgoing.session_id, epoch=outgoing.epoch),
            reason=effect.reason,
        )
        try:
            response = await self.manager.cancel_operation(request)
        except ConflictError:
            self._drop_session(outgoing.session_id)
            return
        if response.HasField("operation"):
            self._report(outgoing.session_id, response.operation, {})

    async def _acknowledge(self, effects: list[Acknowledge]) -> None:
        if not effects:
            return
        acknowledgements = [
            manager_pb2.Acknowledgement(operation_id=one.operation_id, step=one.step, discarded=one.is_discarded)
            for one in effects
        ]
        faults.reach(BEFORE_ACKNOWLEDGE)
        await self.manager.acknowledge_updates(manager_pb2.AcknowledgeUpdatesRequest(acknowledgements=acknowledgements))
        faults.reach(AFTER_ACKNOWLEDGE)

    def _disconnect(self) -> None:
        if not self.instance_id:
            return
        self.instance_id = ""
        self._outgoing.clear()
        self._has_outgoing.clear()
        self._deliver(_ALL_SESSIONS, ManagerLost(manager_name=self.manager_name))


def _dispatch(outgoing: Outgoing) -> Dispatch:
    assert isinstance(outgoing.effect, Dispatch)
    return outgoing.effect


def _find_novelty(operation: operation_pb2.Operation) -> str | None:
    """Return what of an operation this release does not know, or None."""
    if operation.schema_version > OPERATION_SCHEMA_VERSION:
        return "schema_version"
    unknown = find_unknown_field(operation)
    # A tombstone has no state.
    return unknown or (find_unset_choice(operation) if operation.WhichOneof("state") else None)


def _reasons(group: BaseExceptionGroup[HarnessError]) -> str:
    return ", ".join(one.reason if isinstance(one, HarnessError) else type(one).__name__ for one in group.exceptions)
