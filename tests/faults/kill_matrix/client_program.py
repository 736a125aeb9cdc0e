"""The client under fire: several sessions at once, inputs under stable IDs, watches that go on behind the last change.

All that it knows after its death is its diary. It ends by itself when told to by a file and everything rests.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import random
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from clients.coordinator import CoordinatorClient
from harness import faults
from harness.primitives.streams import closing
from tests.faults.kill_matrix.diary import Diary, DiaryReader, Line
from tests.faults.kill_matrix.scripted_model import results_in, task_text, tasks_in
from tests.support.world import text_message
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

LONGEST_PAUSE_S = 1.0


def item_digest(item: item_pb2.Item) -> str:
    """Return what tells an item from every other."""
    return hashlib.sha256(item.SerializeToString(deterministic=True)).hexdigest()[:16]


class Memory:
    """What the diary says of one session."""

    def __init__(self) -> None:
        """Know nothing."""
        self.revision = 0
        self.sequence = 0
        self.sent: list[str] = []
        self.accepted: dict[str, int] = {}
        self.is_over = False

    def take(self, line: Line) -> None:
        """Take in a line."""
        match line["what"]:
            case "sent":
                self.sent.append(line["input_id"])
            case "accepted":
                self.accepted[line["input_id"]] = line["sequence"]
            case "change":
                self.revision = line["revision"]
                self.sequence = max([self.sequence, *(sequence for sequence, _ in line["items"])])
            case "over":
                self.is_over = True
            case _:
                pass


class Conversation:
    """One session."""

    def __init__(self, client: CoordinatorClient, diary: Diary, options: argparse.Namespace, session_id: str) -> None:
        """Prepare."""
        self._client = client
        self._diary = diary
        self._options = options
        self._session_id = session_id
        self._is_resting = False
        self._has_news = asyncio.Event()

    async def hold(self, memory: Memory) -> None:
        """Run the session from where its diary ends until its last input is answered."""
        workspace: Path = self._options.workspaces / self._session_id
        workspace.mkdir(exist_ok=True)
        settings = session_pb2.SessionSettings(provider="openai-compatible", model="m1", workspace=str(workspace))
        await self._client.create_session(
            coordinator_pb2.CreateSessionRequest(session_id=self._session_id, settings=settings)
        )
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(memory))
            await self._submit_all(memory)
            await self._settled(memory)
            watch.cancel()
        await self._note_context()
        self._write({"what": "over"})

    async def _submit_all(self, memory: Memory) -> None:
        for number in itertools.count(1):
            input_id = f"input-{number}"
            chance = random.Random(f"{self._session_id}/{input_id}")
            # The last one that was accepted is sent again too: it must be a duplicate.
            if input_id not in memory.accepted or len(memory.accepted) == number:
                await self._submit(memory, input_id, is_after_turn=chance.random() < 0.3)
                if number >= self._options.inputs or self._options.stop_file.exists():
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(chance.uniform(0, LONGEST_PAUSE_S)):
                        await self._settled(memory)

    async def _submit(self, memory: Memory, input_id: str, *, is_after_turn: bool) -> None:
        message = text_message(input_id, task_text(self._session_id, input_id), after_turn=is_after_turn)
        self._write({"what": "sent", "input_id": input_id})
        answer = await self._client.submit_input(
            coordinator_pb2.SubmitInputRequest(session_id=self._session_id, input=message)
        )
        self._write(
            {"what": "accepted", "input_id": input_id, "sequence": answer.sequence, "duplicate": answer.duplicate}
        )
        memory.accepted[input_id] = answer.sequence

    async def _settled(self, memory: Memory) -> None:
        """Return once everything that was accepted is seen, and the session rests."""
        while memory.sequence < max(memory.accepted.values()) or not self._is_resting:
            self._has_news.clear()
            await self._has_news.wait()

    async def _watch(self, memory: Memory) -> None:
        request = coordinator_pb2.WatchSessionRequest(
            session_id=self._session_id, after_revision=memory.revision, include_output=True
        )
        async with closing(self._client.watch_session(request)) as events:
            async for event in events:
                if not event.HasField("change"):
                    continue
                change = event.change
                if change.items or change.operations:
                    line = self._change_line(change)
                    self._write(line)
                    memory.take(line)
                self._is_resting = change.is_current and change.rest.state == session_pb2.REST_STATE_AT_REST
                self._has_news.set()

    @staticmethod
    def _change_line(change: store_pb2.WatchSessionResponse) -> Line:
        return {
            "what": "change",
            "revision": change.revision,
            "items": [(item.sequence, item_digest(item)) for item in change.items],
            "operations": [(one.operation_id, one.step) for one in change.operations],
            "written_s": max((item.record_time.ToNanoseconds() / 1e9 for item in change.items), default=0.0),
            "ended_s": max((one.end_time.ToNanoseconds() / 1e9 for one in change.operations), default=0.0),
        }

    async def _note_context(self) -> None:
        context = await self._client.build_context(coordinator_pb2.BuildContextRequest(session_id=self._session_id))
        parts = [part.text.text for entry in context.entries for part in (*entry.user.parts, *entry.tool_result.parts)]
        text = "\n".join(parts)
        self._write({"what": "context", "inputs": dict(tasks_in(text)), "results": dict(results_in(text))})

    def _write(self, line: Line) -> None:
        line["at_s"], line["session"] = time.monotonic(), self._session_id
        self._diary.write(line)


async def converse(options: argparse.Namespace) -> None:
    """Hold conversations, one after the other in each place, until told to stop."""
    memories: defaultdict[str, Memory] = defaultdict(Memory)
    diary = Diary(options.diary)
    for line in DiaryReader(options.diary).new_lines():
        if "session" in line:
            memories[line["session"]].take(line)
    diary.write({"what": "begun", "at_s": time.monotonic()})
    async with CoordinatorClient(options.address, patience_s=120) as client, asyncio.TaskGroup() as tasks:
        for place in range(options.sessions):
            tasks.create_task(_one_place(client, diary, options, memories, place))


async def _one_place(
    client: CoordinatorClient,
    diary: Diary,
    options: argparse.Namespace,
    memories: defaultdict[str, Memory],
    place: int,
) -> None:
    for number in itertools.count():
        session_id = f"s{place}-{number}"
        if memories[session_id].is_over:
            continue
        is_fresh = not memories[session_id].sent
        if is_fresh and number and options.stop_file.exists():
            return
        await Conversation(client, diary, options, session_id).hold(memories[session_id])


def main() -> int:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--diary", type=Path, required=True)
    parser.add_argument("--workspaces", type=Path, required=True)
    parser.add_argument("--stop-file", type=Path, required=True)
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--inputs", type=int, default=12)
    options = parser.parse_args()
    faults.install_from_environment()
    asyncio.run(converse(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
