"""A whole agent for end-to-end tests, behind the protocol that every deployment offers.

Scenarios use a `World` only, so that the same files run embedded and against services.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.app import open_coordinator
from harness.clock import Clock, SystemClock
from harness.coordinator import Coordinator, CoordinatorConfig
from harness.llm import LLMAdapter
from harness.llm.models import window_tokens as known_window_tokens
from harness.llm.script_file import parse_script
from harness.llm.scripted import ScriptedAdapter
from harness.operations import OperationManager
from harness.operations.local_manager import LocalOperationManager
from harness.primitives.streams import closing
from harness.session_store import SessionStore
from harness.session_store.sqlite import SqliteSessionStore
from harness.tools.registry import default_registry
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

Script = Sequence[Mapping[str, object]]


def bash(command: str, **arguments: object) -> dict[str, object]:
    """Return a scripted Bash call."""
    return {"name": "Bash", "arguments": {"command": command, **arguments}}


def scripted(responses: Script) -> ScriptedAdapter:
    """Return an adapter that plays a script."""
    return ScriptedAdapter(parse_script(json.dumps({"responses": list(responses)})), clock=SystemClock())


def text_message(input_id: str, text: str, *, after_turn: bool = False) -> item_pb2.Input:
    """Return an input as a client sends it."""
    part = llm_pb2.ContentPart(text=llm_pb2.TextPart(text=text))
    return item_pb2.Input(
        input_id=input_id,
        delivery=item_pb2.DELIVERY_AFTER_TURN if after_turn else item_pb2.DELIVERY_UNSPECIFIED,
        content=item_pb2.Content(parts=[part]),
    )


@dataclass(slots=True)
class World:
    """An agent that a test talks to."""

    coordinator: Coordinator
    workspace: Path
    session_id: str = "s1"
    provider: str = "scripted"

    async def create(self, session_id: str = "s1", settings: session_pb2.SessionSettings | None = None) -> None:
        """Make a session in the world's workspace and talk to it from now on."""
        wanted = session_pb2.SessionSettings(provider=self.provider, model="m1", workspace=str(self.workspace))
        if settings is not None:
            wanted.MergeFrom(settings)
        await self.coordinator.create_session(
            coordinator_pb2.CreateSessionRequest(session_id=session_id, settings=wanted)
        )
        self.session_id = session_id

    async def say(
        self, text: str, *, input_id: str = "", after_turn: bool = False
    ) -> coordinator_pb2.SubmitInputResponse:
        """Submit a text, under a fresh ID unless one is given."""
        message = text_message(input_id or f"input-{uuid.uuid4()}", text, after_turn=after_turn)
        request = coordinator_pb2.SubmitInputRequest(session_id=self.session_id, input=message)
        return await self.coordinator.submit_input(request)

    async def stop(
        self, mode: item_pb2.StopMode.ValueType = item_pb2.STOP_MODE_HARD, *, input_id: str = "stop-1"
    ) -> None:
        """Record a stop."""
        await self.coordinator.stop_session(
            coordinator_pb2.StopSessionRequest(
                session_id=self.session_id, input_id=input_id, mode=mode, reason="the test stops it"
            )
        )

    async def until_rest(self, *, within_s: float = 20.0) -> session_pb2.Rest:
        """Wait until the session rests; return how."""
        request = coordinator_pb2.WatchSessionRequest(session_id=self.session_id, until_idle=True)
        async with asyncio.timeout(within_s), closing(self.coordinator.watch_session(request)) as events:
            async for event in events:
                if event.HasField("rest_reached"):
                    return event.rest_reached.rest
        raise AssertionError("the watch ended before the session was at rest")

    async def run(self, text: str, *, within_s: float = 20.0) -> session_pb2.Rest:
        """Submit a text and wait until the session rests."""
        await self.say(text)
        return await self.until_rest(within_s=within_s)

    async def watch_until(
        self, condition: Callable[[coordinator_pb2.WatchSessionResponse], bool], *, within_s: float = 20.0
    ) -> None:
        """Watch from the beginning until an event satisfies a condition."""
        request = coordinator_pb2.WatchSessionRequest(
            session_id=self.session_id, include_deltas=True, include_output=True
        )
        async with asyncio.timeout(within_s), closing(self.coordinator.watch_session(request)) as events:
            async for event in events:
                if condition(event):
                    return

    async def items(self) -> list[item_pb2.Item]:
        """Return the whole history."""
        items: list[item_pb2.Item] = []
        while True:
            after = items[-1].sequence if items else 0
            request = store_pb2.ListItemsRequest(session_id=self.session_id, after_sequence=after)
            page = (await self.coordinator.list_items(coordinator_pb2.ListItemsRequest(request=request))).page
            items += page.items
            if not page.more:
                return items

    async def operations(self) -> list[operation_pb2.Operation]:
        """Return the operations of tool calls in their newest state."""
        request = store_pb2.ListOperationsRequest(session_id=self.session_id, page_size=1000)
        operations: list[operation_pb2.Operation] = []
        while True:
            response = await self.coordinator.list_operations(coordinator_pb2.ListOperationsRequest(request=request))
            operations += [one for one in response.page.operations if one.call_id]
            request.page_token = response.page.next_page_token
            if not request.page_token:
                return operations

    async def context(self) -> coordinator_pb2.BuildContextResponse:
        """Return what the model would be sent now."""
        return await self.coordinator.build_context(coordinator_pb2.BuildContextRequest(session_id=self.session_id))

    async def results(self) -> dict[str, item_pb2.CallResult]:
        """Return the final result of each call; fails where a call has two."""
        found: dict[str, item_pb2.CallResult] = {}
        for item in await self.items():
            if item.HasField("tool_call_status") and item.tool_call_status.HasField("result"):
                assert item.tool_call_status.call_id not in found, "a call has two final results"
                found[item.tool_call_status.call_id] = item.tool_call_status.result
        return found


def result_text(result: item_pb2.CallResult) -> str:
    """Return the text of a result."""
    return "".join(part.text.text for part in result.parts)


@asynccontextmanager
async def embedded_world(
    directory: Path,
    responses: Script | LLMAdapter,
    *,
    config: CoordinatorConfig | None = None,
    wrap_store: Callable[[SessionStore], SessionStore] = lambda store: store,
    wrap_manager: Callable[[OperationManager], OperationManager] = lambda manager: manager,
    clock: Clock | None = None,
    window_tokens: Callable[[str], int] = known_window_tokens,
    open_adapter: Callable[[str], LLMAdapter] | None = None,
) -> AsyncIterator[World]:
    """Run an agent in this process over real parts in `directory`; open it again to restart."""
    workspace = directory / "workspace"
    workspace.mkdir(exist_ok=True)
    adapter = scripted(responses) if isinstance(responses, Sequence) else responses
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            SqliteSessionStore.open(directory / "state" / "sessions.sqlite", clock=clock)
        )
        manager = await stack.enter_async_context(
            LocalOperationManager.open(directory / "state" / "operations", name="local", clock=clock)
        )
        coordinator = await stack.enter_async_context(
            open_coordinator(
                store=wrap_store(store),
                managers={"local": wrap_manager(manager)},
                open_adapter=open_adapter or (lambda _: adapter),
                tools=default_registry(),
                window_tokens=window_tokens,
                config=config or CoordinatorConfig(grace_s=0.3),
                clock=clock,
            )
        )
        yield World(coordinator=coordinator, workspace=workspace)
