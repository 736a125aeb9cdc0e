"""Contract of the operation managers and of the step machines that they run.

Owns the execution of operations. It knows no session history, no model and no tool. Messages are those of
`operation/v1` and `operationmanager/v1`; their comments are the specification.

A step machine is pure: `(operation, event) -> (operation, dispatches)`. The manager journals the new state, then
performs the dispatches, and feeds what they report back as events. After a restart it feeds `Recovered`, and the
machine says, by its effect class, what may be done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.operationmanager.v1 import operation_manager_service_pb2 as manager_pb2

EventT_contra = TypeVar("EventT_contra", contravariant=True)
DispatchT_co = TypeVar("DispatchT_co", covariant=True)

TERMINAL_STATUSES = frozenset(
    {
        operation_pb2.OPERATION_STATUS_COMPLETED,
        operation_pb2.OPERATION_STATUS_FAILED,
        operation_pb2.OPERATION_STATUS_CANCELED,
        operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN,
    }
)


def is_terminal(operation: operation_pb2.Operation) -> bool:
    """Return whether nothing can follow the operation's status."""
    return operation.status in TERMINAL_STATUSES


class OperationManager(Protocol):
    """Runs operations durably.

    Methods raise `harness.errors` classes with the reasons named in the service's comments. Cancelling a caller never
    cancels an operation. Async iterators end their work when they are closed.
    """

    async def get_server_info(self, request: manager_pb2.GetServerInfoRequest) -> manager_pb2.GetServerInfoResponse:
        """Say who answers; names the instance."""
        ...

    async def add_operations(self, request: manager_pb2.AddOperationsRequest) -> manager_pb2.AddOperationsResponse:
        """Accept operations durably and return their newest states; idempotent by operation ID."""
        ...

    async def cancel_operation(
        self, request: manager_pb2.CancelOperationRequest
    ) -> manager_pb2.CancelOperationResponse:
        """Start a cancellation; idempotent."""
        ...

    async def get_operation(self, request: manager_pb2.GetOperationRequest) -> manager_pb2.GetOperationResponse:
        """Return one operation's newest state."""
        ...

    async def list_operations(self, request: manager_pb2.ListOperationsRequest) -> manager_pb2.ListOperationsResponse:
        """Return a page of the operations that are remembered in full."""
        ...

    def watch_operations(
        self, request: manager_pb2.WatchOperationsRequest
    ) -> AsyncIterator[manager_pb2.WatchOperationsResponse]:
        """Yield a hello, what is not acknowledged, then each new state, for ever."""
        ...

    async def acknowledge_updates(
        self, request: manager_pb2.AcknowledgeUpdatesRequest
    ) -> manager_pb2.AcknowledgeUpdatesResponse:
        """Take note that states were recorded; idempotent."""
        ...

    def read_output(self, request: manager_pb2.ReadOutputRequest) -> AsyncIterator[manager_pb2.ReadOutputResponse]:
        """Yield an operation's output or attachment in pieces."""
        ...

    def upload_workspace(
        self, requests: AsyncIterator[manager_pb2.UploadWorkspaceRequest]
    ) -> AsyncIterator[manager_pb2.UploadWorkspaceResponse]:
        """Put files into a workspace, yielding progress."""
        ...

    def download_workspace(
        self, request: manager_pb2.DownloadWorkspaceRequest
    ) -> AsyncIterator[manager_pb2.DownloadWorkspaceResponse]:
        """Yield the files of a workspace."""
        ...

    async def aclose(self) -> None:
        """Stop watching and give everything back; running commands run on. May be called twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[DispatchT_co]):
    """What a step machine decided."""

    operation: operation_pb2.Operation
    """The new state, with a larger `step`; the same object where nothing changed."""

    dispatches: Sequence[DispatchT_co] = ()
    """What to do once the state is journalled, in order."""


class StepMachine(Protocol[EventT_contra, DispatchT_co]):
    """Behaviour of one operation type and version; pure, holds no state of its own."""

    @property
    def operation_type(self) -> str:
        """The type that it runs."""
        ...

    @property
    def type_version(self) -> int:
        """The version that it runs."""
        ...

    @property
    def effect_classes(self) -> Sequence[operation_pb2.EffectClass.ValueType]:
        """What may be done after a crash between start and result: the classes that an operation may have.

        PURE and IDEMPOTENT ones may be run again, here or by another instance; a PROBEABLE one is asked for first; an
        AT_MOST_ONCE one is never started again once it may have been.
        """
        ...

    def validate(self, operation: operation_pb2.Operation) -> str | None:
        """Return why an operation can't be accepted in one line, or None."""
        ...

    def advance(self, operation: operation_pb2.Operation, event: EventT_contra) -> Step[DispatchT_co]:
        """Return the next state and what to do. Never mutates `operation`."""
        ...
