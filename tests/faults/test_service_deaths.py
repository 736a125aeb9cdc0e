"""Each service dies, or is stopped in order, while a turn is in flight and while commands run: nobody notices."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.primitives.streams import closing
from tests.support.invariants import call_ids, check_history
from tests.support.stack import COORDINATOR, MANAGER, STORE, Stack, three_services
from tests.support.world import Script, World, bash, result_text
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2

COUNTED = "echo $UNREAL_AGENT_OPERATION >> effects"
# It outlasts the second answer, however long a service takes to come back.
COUNTER = "for i in $(seq 1 40); do echo line $i; sleep 0.04; done; until [ -e goes_on ]; do sleep 0.05; done"
SCRIPT: Script = [
    {"text": "two at once", "tool_calls": [bash(f"{COUNTED}; {COUNTER}"), bash(f"{COUNTED}; echo quick")]},
    {"text": "it still runs", "delay_seconds": 0.4},
    {"text": "one more", "delay_seconds": 0.4, "tool_calls": [bash(f"{COUNTED}; echo last")]},
    {"text": "all is done", "delay_seconds": 0.4},
]
FLAGS = {COORDINATOR: ["--lease-seconds", "2"]}
GRACE_S = 5.0
Moment = Callable[[coordinator_pb2.WatchSessionResponse], bool]


def in_a_turn(event: coordinator_pb2.WatchSessionResponse) -> bool:
    """A request is in flight."""
    return any(item.HasField("turn") for item in event.change.items)


def while_a_command_runs(event: coordinator_pb2.WatchSessionResponse) -> bool:
    """A command prints."""
    return b"line 3" in event.output_delta.data


def _cases() -> list[Any]:
    """Return every service, ending and moment; in the short run an end in order comes at one moment of each service."""
    short = {(STORE, in_a_turn), (MANAGER, while_a_command_runs), (COORDINATOR, in_a_turn)}
    return [
        pytest.param(
            *(name, ending, moment),
            id=f"{name}-{ending}-{moment.__name__}",
            marks=[] if ending == "killed" or (name, moment) in short else pytest.mark.long,
        )
        for name, ending, moment in product(
            (STORE, MANAGER, COORDINATOR), ("killed", "stopped"), (in_a_turn, while_a_command_runs)
        )
    ]


class Watcher:
    """Watches a session as a person's screen does, through whatever happens, and keeps what it saw."""

    def __init__(self) -> None:
        self.items: list[item_pb2.Item] = []
        self.revisions: list[int] = []
        self.rest: session_pb2.Rest | None = None
        self.moment = asyncio.Event()

    async def watch(self, world: World, moment: Moment) -> None:
        """Watch to rest."""
        request = coordinator_pb2.WatchSessionRequest(
            session_id=world.session_id, include_output=True, include_deltas=True, until_idle=True
        )
        async with closing(world.coordinator.watch_session(request)) as events:
            async for event in events:
                if event.HasField("change"):
                    self.items += event.change.items
                    self.revisions.append(event.change.revision)
                if moment(event):
                    self.moment.set()
                if any("it still runs" in str(item.model_response.output) for item in event.change.items):
                    (world.workspace / "goes_on").touch()
                if event.HasField("rest_reached"):
                    self.rest = event.rest_reached.rest


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("name", "ending", "moment"), _cases())
async def test_the_watch_goes_on_and_nothing_is_done_twice(
    tmp_path: Path, name: str, ending: str, moment: Moment
) -> None:
    async with three_services(tmp_path, SCRIPT, flags=FLAGS) as stack, stack.world() as world:
        await world.create()
        watcher = Watcher()
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            await world.say("do it", input_id="task")
            tasks.create_task(watcher.watch(world, moment))
            await watcher.moment.wait()
            await _end(stack, name, ending)
            await stack.start(name)
            again = await world.say("do it", input_id="task")
            assert again.duplicate
        assert watcher.rest is not None
        assert watcher.rest.session_state == session_pb2.SESSION_STATE_IDLE, watcher.rest.reason
        await _check(world, watcher)


@pytest.mark.timeout(90)
async def test_everything_dies_at_once_again_and_again(tmp_path: Path) -> None:
    async with three_services(tmp_path, SCRIPT, flags=FLAGS) as stack, stack.world() as world:
        await world.create()
        watcher = Watcher()
        async with asyncio.timeout(80), asyncio.TaskGroup() as tasks:
            await world.say("do it", input_id="task")
            tasks.create_task(watcher.watch(world, while_a_command_runs))
            await watcher.moment.wait()
            for _ in range(2):
                for name in (COORDINATOR, STORE, MANAGER):
                    await stack.kill(name)
                async with asyncio.TaskGroup() as starts:
                    for name in (COORDINATOR, STORE, MANAGER):
                        starts.create_task(stack.start(name))
        await _check(world, watcher)


async def _end(stack: Stack, name: str, ending: str) -> None:
    if ending == "killed":
        await stack.kill(name)
        return
    begin = asyncio.get_running_loop().time()
    assert await stack.terminate(name) == 0, stack.log(name)
    assert asyncio.get_running_loop().time() - begin < GRACE_S


async def _check(world: World, watcher: Watcher) -> None:
    items, operations = await world.items(), await world.operations()
    check_history(items, operations)
    assert watcher.items == items, "the watch has a gap or a repeat"
    assert watcher.revisions == sorted(set(watcher.revisions)), "a revision was repeated"
    assert [item.input.input_id for item in items if item.input.kind == item_pb2.INPUT_KIND_EXTERNAL] == ["task"]
    answers = [item for item in items if item.HasField("model_response")]
    assert answers[-1].model_response.output.items[0].message.text == "all is done"
    assert len(call_ids(items)) == 3
    effects = Counter((world.workspace / "effects").read_text().split())
    assert effects == Counter(one.operation_id for one in operations), "a command ran twice or never"
    counters = [text for text in map(result_text, (await world.results()).values()) if "line 1\n" in text]
    (counter,) = counters
    assert re.findall(r"line (\d+)", counter) == [str(number) for number in range(1, 41)]
