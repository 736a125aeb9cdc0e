"""What a model says reaches watchers as it says it, so that a retried attempt can be told from a continued one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from harness.llm import (
    AttemptFailed,
    Completed,
    LLMEvent,
    LLMRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from harness.primitives.streams import closing
from tests.support.world import World, embedded_world
from unreal_agent.coordinator.v1 import coordinator_service_pb2 as coordinator_pb2
from unreal_agent.llm.v1 import llm_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2


class Speaker:
    """A model that says one thing in each turn, in these pieces."""

    def __init__(self, *events: LLMEvent) -> None:
        self.events: Sequence[LLMEvent] = events
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def respond(self, request: LLMRequest) -> AsyncGenerator[LLMEvent, None]:
        await self.may_go_on.wait()
        for event in self.events:
            yield event
            await asyncio.sleep(0)
        output = llm_pb2.ModelOutput(stop_reason=llm_pb2.STOP_REASON_COMPLETE, provider="speaker", model="m1")
        output.items.add(message=llm_pb2.OutputMessage(text="Hello."))
        yield Completed(output=output)

    async def aclose(self) -> None:
        """Nothing is open."""


async def watched(world: World, asked: asyncio.Event | None = None) -> list[coordinator_pb2.WatchSessionResponse]:
    """Return all events of a watch until the session rests."""
    request = coordinator_pb2.WatchSessionRequest(session_id="s1", include_deltas=True, until_idle=True)
    events: list[coordinator_pb2.WatchSessionResponse] = []
    async with asyncio.timeout(20), closing(world.coordinator.watch_session(request)) as watch:
        async for event in watch:
            events.append(event)
            if asked is not None and any(item.HasField("turn") for item in event.change.items):
                asked.set()
    return events


async def deltas_of(directory: Path, *events: LLMEvent) -> tuple[list[coordinator_pb2.ModelDelta], item_pb2.Turn, int]:
    """Return what a watcher is sent of one turn, the turn, and the session's epoch."""
    speaker = Speaker(*events)
    speaker.may_go_on.clear()
    async with embedded_world(directory, speaker) as world:
        await world.create()
        await world.say("hi")
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watched(world, speaker.may_go_on))
        (turn,) = [item.turn for item in await world.items() if item.HasField("turn")]
        found = await world.coordinator.get_session(coordinator_pb2.GetSessionRequest(session_id="s1"))
        deltas = [one.model_delta for one in watching.result() if one.HasField("model_delta")]
        return deltas, turn, found.session.epoch


async def test_each_delta_names_epoch_turn_attempt_and_place(tmp_path: Path) -> None:
    deltas, turn, epoch = await deltas_of(
        tmp_path,
        ReasoningDelta(attempt=1, text="hm "),
        ReasoningDelta(attempt=1, text="so"),
        TextDelta(attempt=1, text="Hel"),
        TextDelta(attempt=1, text="lo."),
        ToolCallDelta(attempt=1, index=0, name="Bash", arguments='{"comm'),
        ToolCallDelta(attempt=1, index=1, name="Bash", arguments="{}"),
        ToolCallDelta(attempt=1, index=0, name="", arguments='and":""}'),
    )

    def delta(offset: int, **said: object) -> coordinator_pb2.ModelDelta:
        # One field of the choice is named.
        made = coordinator_pb2.ModelDelta(**said)  # type: ignore[arg-type]
        made.turn_id, made.epoch, made.attempt, made.offset = turn.turn_id, epoch, 1, offset
        return made

    call = coordinator_pb2.ToolCallDelta
    assert deltas == [
        delta(0, reasoning="hm "),
        delta(3, reasoning="so"),
        delta(0, text="Hel"),
        delta(3, text="lo."),
        delta(0, tool_call=call(index=0, name="Bash", arguments='{"comm')),
        delta(0, tool_call=call(index=1, name="Bash", arguments="{}")),
        delta(6, tool_call=call(index=0, arguments='and":""}')),
    ]


async def test_a_retried_attempt_begins_anew_and_the_failed_one_is_void(tmp_path: Path) -> None:
    failure = llm_pb2.Failure(error_class=llm_pb2.ERROR_CLASS_OVERLOAD, message="busy")
    deltas, _, _ = await deltas_of(
        tmp_path,
        TextDelta(attempt=1, text="Hel"),
        AttemptFailed(attempt=llm_pb2.Attempt(number=1, failure=failure), retry_delay_s=0),
        TextDelta(attempt=2, text="Hel"),
        TextDelta(attempt=2, text="lo."),
    )
    assert [(one.attempt, one.offset, one.text) for one in deltas if one.text] == [
        (1, 0, "Hel"),
        (2, 0, "Hel"),
        (2, 3, "lo."),
    ]
    (void,) = [one for one in deltas if one.HasField("attempt_failure")]
    assert (void.attempt, void.attempt_failure) == (1, failure)
    assert deltas.index(void) == 1


async def test_long_pieces_are_sent_in_parts_that_join(tmp_path: Path) -> None:
    text = "word " * 4_000
    deltas, _, _ = await deltas_of(tmp_path, TextDelta(attempt=1, text=text))
    assert len(deltas) > 1
    assert "".join(one.text for one in deltas) == text
    assert [one.offset for one in deltas] == [sum(len(one.text) for one in deltas[:at]) for at in range(len(deltas))]


async def test_a_slow_watcher_loses_deltas_and_never_items(tmp_path: Path) -> None:
    speaker = Speaker(*(TextDelta(attempt=1, text=f"{number} ") for number in range(3_000)))
    async with embedded_world(tmp_path, speaker) as world:
        await world.create()
        request = coordinator_pb2.WatchSessionRequest(session_id="s1", include_deltas=True)
        async with asyncio.timeout(20), closing(world.coordinator.watch_session(request)) as slow:
            await anext(slow)  # it is there, and looks away
            for number in range(3):
                assert (await world.run(f"again {number}")).session_state == session_pb2.SESSION_STATE_IDLE
            wanted = await world.items()
            items: list[item_pb2.Item] = []
            deltas: list[coordinator_pb2.ModelDelta] = []
            while len(items) < len(wanted):
                event = await anext(slow)
                items += event.change.items
                if event.HasField("model_delta"):
                    deltas.append(event.model_delta)
    assert items == wanted
    assert 0 < len(deltas) < 3_000
    assert any(one.offset > len("0 ") for one in deltas[:1]), "the gap shows in the offset"


async def test_nobody_who_does_not_ask_is_sent_any(tmp_path: Path) -> None:
    async with embedded_world(tmp_path, Speaker(TextDelta(attempt=1, text="Hello."))) as world:
        await world.create()
        await world.say("hi")
        request = coordinator_pb2.WatchSessionRequest(session_id="s1", until_idle=True)
        async with asyncio.timeout(20), closing(world.coordinator.watch_session(request)) as watch:
            assert not [event async for event in watch if event.HasField("model_delta")]
