"""A client in twenty lines: makes a session, submits an input, watches to the end. Arguments: ADDRESS TEXT."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid

from clients.coordinator import CoordinatorClient
from unreal_agent.coordinator.v1.coordinator_service_pb2 import (
    CreateSessionRequest,
    SubmitInputRequest,
    WatchSessionRequest,
)
from unreal_agent.session.v1.item_pb2 import Input
from unreal_agent.session.v1.session_pb2 import SessionSettings


# [client]
async def ask(address: str, text: str) -> None:
    session_id = f"example-{uuid.uuid4()}"
    async with CoordinatorClient(address) as coordinator:
        settings = SessionSettings(workspace=os.getcwd())
        await coordinator.create_session(CreateSessionRequest(session_id=session_id, settings=settings))
        message = Input(input_id="first")  # sent again under the same ID, it is accepted once
        message.content.parts.add().text.text = text
        await coordinator.submit_input(SubmitInputRequest(session_id=session_id, input=message))
        watch = WatchSessionRequest(session_id=session_id, until_idle=True)
        async for response in coordinator.watch_session(watch):
            for item in response.change.items:
                for part in item.tool_call_status.result.parts:
                    print(f"  {part.text.text}")
                for said in item.model_response.output.items:
                    print(said.message.text)


# [/client]


if __name__ == "__main__":
    asyncio.run(ask(*sys.argv[1:]))
