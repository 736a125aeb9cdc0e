"""The `scripted` provider of a server: plays to each session the script that its label names."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from clients.cli.model_providers import SCRIPT_LABEL
from harness.clock import Clock
from harness.errors import HarnessError
from harness.llm import LLMAdapter, LLMError, LLMEvent, LLMRequest
from harness.llm.script_file import load_script
from harness.llm.scripted import ScriptedAdapter
from harness.session_store import SessionStore
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

MAX_SCRIPTS = 256
"""Scripts, and sessions' labels, that are remembered."""


class SessionScripts:
    """An `LLMAdapter`. A label is a file of this machine: only for servers that nobody else reaches."""

    def __init__(self, store: SessionStore, otherwise: LLMAdapter | None, clock: Clock) -> None:
        """Play `otherwise`, which it closes, to sessions without the label; None: their turns fail."""
        self._store = store
        self._otherwise = otherwise
        self._clock = clock
        self._paths: OrderedDict[str, str] = OrderedDict()
        self._scripts: OrderedDict[tuple[str, int], LLMAdapter] = OrderedDict()

    async def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        """Play the session's script; see `LLMAdapter.respond`."""
        try:
            adapter = await self._adapter(request.session_id)
        except HarnessError as error:
            raise _failed(error.message) from error
        async with aclosing(adapter.respond(request)) as events:
            async for event in events:
                yield event

    async def aclose(self) -> None:
        """Close the server's own script."""
        if self._otherwise is not None:
            await self._otherwise.aclose()

    async def _adapter(self, session_id: str) -> LLMAdapter:
        path = await self._path(session_id)
        if path:
            return await self._own(Path(path))
        if self._otherwise is None:
            raise _failed(f"the session names no script: set its label {SCRIPT_LABEL!r} to a file")
        return self._otherwise

    async def _own(self, path: Path) -> LLMAdapter:
        """Return what plays a file as it is now."""
        key = (str(path), await asyncio.to_thread(_change_time_ns, path))
        if key not in self._scripts:
            script = await asyncio.to_thread(load_script, path)
            self._scripts[key] = ScriptedAdapter(script, clock=self._clock)
            if len(self._scripts) > MAX_SCRIPTS:
                self._scripts.popitem(last=False)
        return self._scripts[key]

    async def _path(self, session_id: str) -> str:
        # Labels are given with the session and never change.
        if session_id not in self._paths:
            found = await self._store.get_session(store_pb2.GetSessionRequest(session_id=session_id))
            self._paths[session_id] = found.session.initial_settings.labels.get(SCRIPT_LABEL, "")
            if len(self._paths) > MAX_SCRIPTS:
                self._paths.popitem(last=False)
        return self._paths[session_id]


def _change_time_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0  # loading says what is wrong


def _failed(message: str) -> LLMError:
    return LLMError(llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_SCRIPT, message=f"scripted: {message}"))
