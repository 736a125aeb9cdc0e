"""Answers reports of operations that no session's state holds any more, from what the store recorded."""

from __future__ import annotations

from harness.coordinator.manager_link import Outgoing
from harness.coordinator.operation_rules import acknowledgement
from harness.errors import FailedPreconditionError, NotFoundError
from harness.operations import is_terminal
from harness.session_store import SessionStore
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2


class ReportResolver:
    """Looks settled operations up."""

    def __init__(self, store: SessionStore) -> None:
        """Keep the store; it stays the caller's."""
        self._store = store

    async def resolve(self, reported: operation_pb2.Operation) -> Outgoing | None:
        """Return the acknowledgement that a report is due, or None while the store holds it as running.

        A report for a session that is deleted, or of an operation that was never recorded, is discarded: nobody will
        ever want it.
        """
        request = store_pb2.ListOperationsRequest(session_id=reported.session_id, operation_id=reported.operation_id)
        try:
            recorded = list((await self._store.list_operations(request)).operations)
        except NotFoundError:
            recorded = []
        except FailedPreconditionError as error:
            if error.reason != "SESSION_DELETED":
                raise
            recorded = []
        ended = recorded[0] if recorded else _never_recorded(reported)
        if not is_terminal(ended):
            return None
        return Outgoing(session_id=reported.session_id, epoch=0, workspace="", effect=acknowledgement(ended, reported))


def _never_recorded(reported: operation_pb2.Operation) -> operation_pb2.Operation:
    return operation_pb2.Operation(
        operation_id=reported.operation_id,
        manager_name=reported.manager_name,
        status=operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN,
    )
