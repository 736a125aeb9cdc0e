"""Whatever is done in whatever order, and however often the store restarts, it shows what a simple model says."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import AlreadyExistsError, ConflictError, HarnessError
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.state_check import check_state
from tests.contract.session_store_suite.exports import exported, stream
from tests.contract.session_store_suite.forks import fork
from tests.contract.session_store_suite.watches import until_current, watch_of
from tests.support.session_records import (
    Author,
    completed,
    final,
    items_of,
    new_session,
    operation,
    response,
    session_of,
    text_input,
    turn,
    waiting,
)
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

# A step is a kind and two numbers, which choose among what is there.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "input", "call", "final", "fork", "delete", "stale", "import", "restart"]),
        st.integers(0, 30),
        st.integers(0, 30),
    ),
    min_size=5,
    max_size=30,
)


@dataclass
class ModelSession:
    items: list[item_pb2.Item] = field(default_factory=list)
    turn_id: str = ""
    open_calls: list[tuple[str, str]] = field(default_factory=list)
    """Turn and call; each waits for an operation named after the call."""


class World:
    """A store and the model of it."""

    def __init__(self) -> None:
        self.sessions: dict[str, ModelSession] = {}
        self.dead: set[str] = set()
        self.made = 0

    def name(self, prefix: str) -> str:
        self.made += 1
        return f"{prefix}{self.made}"

    def choose(self, number: int) -> str | None:
        names = sorted(self.sessions)
        return names[number % len(names)] if names else None

    async def step(self, store: SqliteSessionStore, kind: str, first: int, second: int) -> None:
        session_id = self.choose(first)
        if kind == "create" or session_id is None:
            session_id = self.name("s")
            await new_session(store, session_id)
            self.sessions[session_id] = ModelSession()
            return
        model = self.sessions[session_id]
        author = Author(store, session_id, sequence=len(model.items))
        match kind:
            case "input":
                await self._input(author, model, second)
            case "call":
                await self._call(author, model)
            case "final":
                await self._final(author, model, second)
            case "fork":
                await self._fork(store, session_id, model, second)
            case "delete":
                await store.delete_session(store_pb2.DeleteSessionRequest(session_id=session_id, force=True))
                del self.sessions[session_id]
                self.dead.add(session_id)
            case "stale":
                await self._stale(author)
            case _:
                await self._import(store, session_id)

    async def _input(self, author: Author, model: ModelSession, number: int) -> None:
        seen = {item.input.input_id: item for item in model.items if item.HasField("input")}
        input_id, text = f"i{number}", "a" if number % 2 else "b"
        if number % 3 == 0:
            text = "c" + author.session_id
        try:
            await author.send(author.request(text_input(input_id, text), commit_id=self.name("k")))
        except AlreadyExistsError as err:
            first = seen[input_id]
            is_same = first.input.content.parts[0].text.text == text
            assert err.reason == ("DUPLICATE_INPUT" if is_same else "INPUT_ID_CONFLICT")
            assert err.metadata["sequence"] == str(first.sequence)
        else:
            assert input_id not in seen
            await self._grow(author, model, 1)

    async def _call(self, author: Author, model: ModelSession) -> None:
        turn_id, call_id = self.name("t"), self.name("c")
        await author.send(
            author.request(
                turn(turn_id, model.turn_id),
                response(turn_id, [call_id]),
                waiting(turn_id, call_id, call_id),
                operations=[operation(author.session_id, call_id, call_id)],
                commit_id=self.name("k"),
            )
        )
        model.turn_id = turn_id
        model.open_calls.append((turn_id, call_id))
        await self._grow(author, model, 3)

    async def _final(self, author: Author, model: ModelSession, number: int) -> None:
        if not model.open_calls:
            return
        turn_id, call_id = model.open_calls.pop(number % len(model.open_calls))
        await author.send(
            author.request(
                final(turn_id, call_id, call_id),
                operations=[completed(author.session_id, call_id, call_id)],
                commit_id=self.name("k"),
            )
        )
        await self._grow(author, model, 1)

    async def _fork(self, store: SqliteSessionStore, parent_id: str, parent: ModelSession, number: int) -> None:
        cut = number % (len(parent.items) + 1)
        child_id = self.name("f")
        made = await fork(store, parent_id, child_id, cut=cut)
        cut = made.ancestry[0].cut_sequence
        items = await items_of(store, child_id)
        assert items[:cut] == parent.items[:cut]
        statuses = [item.tool_call_status for item in items[:cut] if item.HasField("tool_call_status")]
        finished = {status.call_id for status in statuses if status.HasField("result")}
        still_open = [status.call_id for status in statuses if status.call_id not in finished]
        assert [item.WhichOneof("item") for item in items[cut:]] == ["fork", *["tool_call_status"] * len(still_open)]
        assert [item.tool_call_status.call_id for item in items[cut + 1 :]] == still_open
        turns = [item.turn.turn_id for item in items[:cut] if item.HasField("turn")]
        self.sessions[child_id] = ModelSession(items=items, turn_id=turns[-1] if turns else "")

    async def _stale(self, author: Author) -> None:
        author.sequence += 1
        try:
            await author.send(author.request(text_input("never"), commit_id=self.name("k")))
        except ConflictError as err:
            assert err.reason == "SEQUENCE_CONFLICT"
        else:
            raise AssertionError("a commit behind the end was taken")

    async def _import(self, store: SqliteSessionStore, session_id: str) -> None:
        copy_id = self.name("m")
        await store.import_session(stream(await exported(store, session_id), copy_id))
        model = self.sessions[session_id]
        items = await items_of(store, copy_id)
        assert items[: len(model.items)] == model.items
        closed = [item.tool_call_status.call_id for item in items[len(model.items) :]]
        assert sorted(closed) == sorted(call_id for _, call_id in model.open_calls)
        self.sessions[copy_id] = ModelSession(items=items, turn_id=model.turn_id)

    async def _grow(self, author: Author, model: ModelSession, count: int) -> None:
        page = await author.store.list_items(
            store_pb2.ListItemsRequest(session_id=author.session_id, after_sequence=len(model.items))
        )
        assert len(page.items) == count
        model.items.extend(page.items)

    async def check(self, store: SqliteSessionStore) -> None:
        for session_id, model in self.sessions.items():
            assert await items_of(store, session_id, page_size=3) == model.items
            session = await session_of(store, session_id)
            assert session.last_sequence == len(model.items)
            middle = session.revision // 2
            changes = await until_current(watch_of(store, session_id, after_revision=middle))
            watched = [item for change in changes for item in change.items]
            assert watched == [item for item in model.items if item.revision > middle]
        for session_id in self.dead:
            try:
                await session_of(store, session_id)
            except HarnessError as err:
                assert err.reason == "SESSION_DELETED"
        listed = await store.list_sessions(store_pb2.ListSessionsRequest(page_size=500))
        assert [session.session_id for session in listed.sessions] == sorted(self.sessions)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
async def test_store_shows_what_the_model_says(steps: list[tuple[str, int, int]]) -> None:
    world = World()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "sessions.db"
        waiting_steps = list(steps)
        while waiting_steps:
            async with SqliteSessionStore.open(path) as store:
                while waiting_steps:
                    kind, first, second = waiting_steps.pop(0)
                    if kind == "restart":
                        break
                    await world.step(store, kind, first, second)
                await world.check(store)
        assert check_state(path).findings == ()
