"""A model provider of your own: anything that turns a request into words."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

from examples.embedding import ask, open_agent
from harness.llm import Completed, LLMAdapter, LLMEvent, LLMRequest, TextDelta
from unreal_agent.llm.v1 import llm_pb2


# [snippet]
class Echo:
    """Says what it was told. Yields what it says as it says it, then once the whole answer, which is recorded."""

    async def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        text = request.entries[-1].user.parts[0].text.text.upper()
        yield TextDelta(attempt=1, text=text)
        output = llm_pb2.ModelOutput(stop_reason=llm_pb2.STOP_REASON_COMPLETE, provider="echo", model=request.model)
        output.items.add(message=llm_pb2.OutputMessage(text=text))
        yield Completed(output=output)

    async def aclose(self) -> None:
        """Nothing is open."""


def open_adapter(provider: str) -> LLMAdapter:
    return Echo()


# [/snippet]


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with open_agent(Path(directory) / "state", open_adapter) as coordinator:
            print(await ask(coordinator, "echo", "Is anybody there?", Path(directory)))


if __name__ == "__main__":
    asyncio.run(main())
