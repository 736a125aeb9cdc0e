"""An agent inside a program of your own: store, operation manager and coordinator, opened and asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from harness.app import open_coordinator
from harness.clock import SystemClock
from harness.coordinator import Coordinator, CoordinatorConfig
from harness.llm import LLMAdapter
from harness.llm.script_file import parse_script
from harness.llm.scripted import ScriptedAdapter
from harness.operations.local_manager import LocalOperationManager
from harness.operations.manager_settings import LocalManagerSettings
from harness.primitives.primitives import RemoteJobHandler
from harness.session_store.sqlite import SqliteSessionStore
from harness.tools import ToolRegistry, default_registry
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2


@asynccontextmanager
async def open_agent(
    directory: Path,
    open_adapter: Callable[[str], LLMAdapter],
    *,
    tools: ToolRegistry | None = None,
    handlers: Sequence[RemoteJobHandler] = (),
) -> AsyncIterator[Coordinator]:
    """Run an agent whose state lies in a directory, for as long as the block runs."""
    settings = LocalManagerSettings(handlers=handlers)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(SqliteSessionStore.open(directory / "sessions.db"))
        manager = await stack.enter_async_context(
            LocalOperationManager.open(directory / "operations", name="local", settings=settings)
        )
        yield await stack.enter_async_context(
            open_coordinator(
                store=store,
                managers={"local": manager},
                open_adapter=open_adapter,
                tools=tools or default_registry(),
                config=CoordinatorConfig(),
            )
        )


async def ask(coordinator: Coordinator, session_id: str, prompt: str, workspace: Path) -> str:
    """Make a session that works in a directory, ask it, and return all that was said, results included."""
    settings = session_pb2.SessionSettings(provider="own", model="any", workspace=str(workspace))
    await coordinator.create_session(coordinator_pb2.CreateSessionRequest(session_id=session_id, settings=settings))
    text = llm_pb2.ContentPart(text=llm_pb2.TextPart(text=prompt))
    # The same ID again, after a crash or a lost answer, is a duplicate: nothing is done twice.
    message = item_pb2.Input(input_id="prompt-1", content=item_pb2.Content(parts=[text]))
    await coordinator.submit_input(coordinator_pb2.SubmitInputRequest(session_id=session_id, input=message))
    said = []
    watch = coordinator_pb2.WatchSessionRequest(session_id=session_id, until_idle=True)
    async for response in coordinator.watch_session(watch):
        for item in response.change.items:
            said += [entry.message.text for entry in item.model_response.output.items if entry.HasField("message")]
            said += [part.text.text for part in item.tool_call_status.result.parts]
    return "\n".join(said)


def play(script: str) -> Callable[[str], LLMAdapter]:
    """Return what opens a model that plays a script, in YAML or JSON."""
    return lambda _: ScriptedAdapter(parse_script(script), clock=SystemClock())
