"""Contract of the coordinator: what a user's program talks to.

A coordinator runs sessions: it accepts inputs durably, runs model turns, turns tool calls into operations and delivers
their results. It owns no durable state: the session store does. Messages are those of `coordinator/v1`; their comments
are the specification.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import session_pb2


class Coordinator(Protocol):
    """Sessions, inputs and live watches.

    Methods raise `harness.errors` classes with the reasons named in the service's comments. A caller that goes away
    cancels nothing that was accepted. Async iterators end their work when they are closed.
    """

    async def get_server_info(
        self, request: coordinator_pb2.GetServerInfoRequest
    ) -> coordinator_pb2.GetServerInfoResponse:
        """Say who answers, and which providers, tools and managers there are."""
        ...

    async def create_session(
        self, request: coordinator_pb2.CreateSessionRequest
    ) -> coordinator_pb2.CreateSessionResponse:
        """Make a session; idempotent by session ID."""
        ...

    async def submit_input(self, request: coordinator_pb2.SubmitInputRequest) -> coordinator_pb2.SubmitInputResponse:
        """Accept an EXTERNAL input; returns once it is durable; idempotent by input ID."""
        ...

    def watch_session(
        self, request: coordinator_pb2.WatchSessionRequest
    ) -> AsyncIterator[coordinator_pb2.WatchSessionResponse]:
        """Yield every change after a revision, then new ones; with `until_idle` it ends at rest."""
        ...

    async def get_session(self, request: coordinator_pb2.GetSessionRequest) -> coordinator_pb2.GetSessionResponse:
        """Return a session, its settings and what it has used."""
        ...

    async def list_sessions(self, request: coordinator_pb2.ListSessionsRequest) -> coordinator_pb2.ListSessionsResponse:
        """Return a page of sessions."""
        ...

    async def delete_session(
        self, request: coordinator_pb2.DeleteSessionRequest
    ) -> coordinator_pb2.DeleteSessionResponse:
        """Delete a session; idempotent."""
        ...

    async def fork_session(self, request: coordinator_pb2.ForkSessionRequest) -> coordinator_pb2.ForkSessionResponse:
        """Make a fork; idempotent."""
        ...

    async def stop_session(self, request: coordinator_pb2.StopSessionRequest) -> coordinator_pb2.StopSessionResponse:
        """Record a stop; its end is watched."""
        ...

    async def cancel_operation(
        self, request: coordinator_pb2.CancelOperationRequest
    ) -> coordinator_pb2.CancelOperationResponse:
        """Record the cancellation or abandonment of one operation; its end is watched."""
        ...

    async def update_settings(
        self, request: coordinator_pb2.UpdateSettingsRequest
    ) -> coordinator_pb2.UpdateSettingsResponse:
        """Record a change of settings."""
        ...

    async def retry_turn(self, request: coordinator_pb2.RetryTurnRequest) -> coordinator_pb2.RetryTurnResponse:
        """Try the failed turn again."""
        ...

    async def build_context(self, request: coordinator_pb2.BuildContextRequest) -> coordinator_pb2.BuildContextResponse:
        """Return what the model would be sent now, with the report."""
        ...

    async def list_items(self, request: coordinator_pb2.ListItemsRequest) -> coordinator_pb2.ListItemsResponse:
        """Return a page of items."""
        ...

    async def list_operations(
        self, request: coordinator_pb2.ListOperationsRequest
    ) -> coordinator_pb2.ListOperationsResponse:
        """Return a page of operations in their newest recorded state."""
        ...

    def read_output(
        self, request: coordinator_pb2.ReadOutputRequest
    ) -> AsyncIterator[coordinator_pb2.ReadOutputResponse]:
        """Yield an operation's output in pieces."""
        ...

    async def put_blob(
        self, requests: AsyncIterator[coordinator_pb2.PutBlobRequest]
    ) -> coordinator_pb2.PutBlobResponse:
        """Store a blob for a session."""
        ...

    def get_blob(self, request: coordinator_pb2.GetBlobRequest) -> AsyncIterator[coordinator_pb2.GetBlobResponse]:
        """Yield a blob in pieces."""
        ...

    def export_session(
        self, request: coordinator_pb2.ExportSessionRequest
    ) -> AsyncIterator[coordinator_pb2.ExportSessionResponse]:
        """Yield one consistent revision of a session."""
        ...

    async def import_session(
        self, requests: AsyncIterator[coordinator_pb2.ImportSessionRequest]
    ) -> coordinator_pb2.ImportSessionResponse:
        """Make a session from an export."""
        ...

    def upload_workspace(
        self, requests: AsyncIterator[coordinator_pb2.UploadWorkspaceRequest]
    ) -> AsyncIterator[coordinator_pb2.UploadWorkspaceResponse]:
        """Put files into a session's workspace."""
        ...

    def download_workspace(
        self, request: coordinator_pb2.DownloadWorkspaceRequest
    ) -> AsyncIterator[coordinator_pb2.DownloadWorkspaceResponse]:
        """Yield the files of a session's workspace."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """How a coordinator behaves; read once, at the edge."""

    name: str = "coordinator"
    """Configured name; a new process of the same name takes over the sessions of the old one at once."""

    address: str = ""
    """Where other coordinators reach this one; empty where nobody can."""

    default_settings: session_pb2.SessionSettings = field(default_factory=session_pb2.SessionSettings)
    """Fills empty fields of a new session's settings."""

    grace_s: float = 1.0
    """How long results of one response are gathered before the next turn."""

    heartbeat_interval_s: float = 600.0
    """How long calls run before the model is woken with a note; 0: never."""

    lease_s: float = 10.0
    """Length of the incarnation's lease; nothing is started after two thirds of it without renewal."""

    idle_s: float = 30.0
    """How long a session that has nothing to do, or must wait for long, stays in memory."""

    long_wait_s: float = 60.0
    """A session that wakes later than in this leaves memory meanwhile: the store offers it when it is due."""

    intermediate_state_delay_s: float = 0.5
    """How long an operation's intermediate state waits for a commit to ride on before it gets one of its own."""

    takes_runnable_sessions: bool = False
    """Goes on with every session of the store that has work in hand, not only with those that are asked for."""

    compaction_threshold: float = 0.8
    """Share of the model's window from which on room is made: old output is pruned, answered turns are summarised."""

    repeated_rounds: int = 6
    """After so many rounds of the same calls with the same results the model is told, after twice as many the session
    is stopped; 0: never."""

    max_running_operations: int = 64
    """Operations of one session that run at once."""
