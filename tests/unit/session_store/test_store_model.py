"""Whatever is done in whatever order, and however often the store restarts, it shows what a simple model says."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.errors import (
    AlreadyExistsError,
    ConflictError,
    FailedPreconditionError,
    HarnessError,
    NotFoundError,
    OutOfRangeError,
    UnavailableError,
)
from harness.session_store import get_blob_bytes
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.state_check import check_state
from tests.contract.session_store_suite.exports import exported, stream
from tests.contract.session_store_suite.forks import fork
from tests.contract.session_store_suite.leases import offers
from tests.contract.session_store_suite.watches import until_current, watch_of
from tests.support.session_records import (
    VERSIONS,
    Author,
    at_rest,
    blob_part,
    completed,
    final,
    incarnation,
    items_of,
    new_session,
    operation,
    operations_of,
    response,
    session_of,
    text_input,
    turn,
    waiting,
    working,
)
from unreal_agent.operation.v1 import operation_pb2
from unreal_agent.session.v1 import item_pb2, session_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

KINDS = (
    *("create", "input", "input", "call", "final", "fork", "delete", "stale", "import", "restart"),
    *("image", "lease", "lease", "release", "incarnate", "repeat", "reuse"),
)
NAMES = ("a", "b")
LONG = Duration(seconds=600)

# A step is a kind and two numbers, which choose among what is there.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 30),
        st.integers(0, 30),
    ),
    min_size=10,
    max_size=40,
)


@dataclass
class ModelSession:
    items: list[item_pb2.Item] = field(default_factory=list)
    turn_id: str = ""
    open_calls: list[tuple[str, str]] = field(default_factory=list)
    """Turn and call; each waits for an operation named after the call."""

    operations: dict[str, operation_pb2.Operation] | None = field(default_factory=dict)
    """Its own; None: those of an import, which ends what was open."""

    images: dict[str, bytes] = field(default_factory=dict)
    """What it can read, by digest."""

    epoch: int = 0
    owner: session_pb2.Incarnation | None = None
    rest: session_pb2.Rest = field(default_factory=at_rest)
    last_commit: tuple[store_pb2.CommitRequest, store_pb2.CommitResponse] | None = None


class World:
    """A store and the model of it."""

    def __init__(self) -> None:
        self.sessions: dict[str, ModelSession] = {}
        self.dead: set[str] = set()
        self.made = 0
        self.numbers = dict.fromkeys(NAMES, 1)

    def is_owned(self, model: ModelSession) -> bool:
        """Return whether the owner's incarnation was not replaced; leases are long."""
        return model.owner is not None and model.owner == incarnation(model.owner.name, self.numbers[model.owner.name])

    async def send(self, author: Author, model: ModelSession, request: store_pb2.CommitRequest) -> None:
        response = await author.send(request)
        model.last_commit = (request, response)
        model.rest = request.rest

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
        author.epoch = model.epoch if self.is_owned(model) else 0
        await getattr(self, f"_{kind}")(author, model, second)

    async def _incarnate(self, author: Author, model: ModelSession, number: int) -> None:
        name = NAMES[number % len(NAMES)]
        self.numbers[name] += 1
        who = incarnation(name, self.numbers[name])
        await author.store.renew_lease(store_pb2.RenewLeaseRequest(incarnation=who, lease=LONG))

    async def _repeat(self, author: Author, model: ModelSession, number: int) -> None:
        """Send the latest commit again, whoever owns the session now: it is answered as at first."""
        if model.last_commit is not None:
            request, answer = model.last_commit
            expected = store_pb2.CommitResponse()
            expected.CopyFrom(answer)
            expected.duplicate = True
            assert await author.store.commit(request) == expected

    async def _delete(self, author: Author, model: ModelSession, number: int) -> None:
        session_id = author.session_id
        await self._refuse_deletion(author, model)
        request = store_pb2.DeleteSessionRequest(session_id=session_id, force=True, epoch=author.epoch)
        await author.store.delete_session(request)
        del self.sessions[session_id]
        self.dead.add(session_id)

    async def _input(self, author: Author, model: ModelSession, number: int) -> None:
        seen = {item.input.input_id: item for item in model.items if item.HasField("input")}
        input_id, text = f"i{number}", "a" if number % 2 else "b"
        if number % 3 == 0:
            text = "c" + author.session_id
        try:
            rest = working() if number % 5 == 0 else at_rest()
            request = author.request(text_input(input_id, text), commit_id=self.name("k"), rest=rest)
            await self.send(author, model, request)
        except AlreadyExistsError as err:
            first = seen[input_id]
            is_same = first.input.content.parts[0].text.text == text
            assert err.reason == ("DUPLICATE_INPUT" if is_same else "INPUT_ID_CONFLICT")
            assert err.metadata["sequence"] == str(first.sequence)
        else:
            assert input_id not in seen
            await self._grow(author, model, 1)

    async def _call(self, author: Author, model: ModelSession, number: int) -> None:
        turn_id, call_id = self.name("t"), self.name("c")
        started = operation(author.session_id, call_id, call_id)
        await self.send(
            author,
            model,
            author.request(
                turn(turn_id, model.turn_id),
                response(turn_id, [call_id]),
                waiting(turn_id, call_id, call_id),
                operations=[started],
                commit_id=self.name("k"),
            ),
        )
        if model.operations is not None:
            model.operations[call_id] = started
        model.turn_id = turn_id
        model.open_calls.append((turn_id, call_id))
        await self._grow(author, model, 3)

    async def _final(self, author: Author, model: ModelSession, number: int) -> None:
        if not model.open_calls:
            return
        turn_id, call_id = model.open_calls.pop(number % len(model.open_calls))
        ended = completed(author.session_id, call_id, call_id)
        request = author.request(final(turn_id, call_id, call_id), operations=[ended], commit_id=self.name("k"))
        await self.send(author, model, request)
        if model.operations is not None:
            model.operations[call_id] = ended
        await self._grow(author, model, 1)

    async def _fork(self, author: Author, parent: ModelSession, number: int) -> None:
        store, parent_id = author.store, author.session_id
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
        images = {digest: parent.images[digest] for item in items[:cut] for digest in _images_in(item)}
        self.sessions[child_id] = ModelSession(items=items, turn_id=turns[-1] if turns else "", images=images)

    async def _image(self, author: Author, model: ModelSession, number: int) -> None:
        content = f"image {number}".encode()
        blob = await author.put(content)
        image = text_input(self.name("picture"), "look", blob_part(blob))
        await self.send(author, model, author.request(image, blobs=[blob], commit_id=self.name("k")))
        model.images[blob.digest] = content
        await self._grow(author, model, 1)

    async def _lease(self, author: Author, model: ModelSession, number: int) -> None:
        name = NAMES[number % len(NAMES)]
        who = incarnation(name, self.numbers[name])
        request = store_pb2.AcquireLeaseRequest(
            session_id=author.session_id, incarnation=who, versions=VERSIONS, lease=LONG
        )
        was_owned = self.is_owned(model)
        try:
            acquired = await author.store.acquire_lease(request)
        except UnavailableError as err:
            assert (err.reason, was_owned) == ("NOT_OWNER", True) and model.owner != who
            return
        assert not was_owned or model.owner == who
        if model.owner != who:
            assert acquired.was_taken_over == (model.owner is not None)
            assert not acquired.was_taken_over or acquired.former_owner == model.owner
            model.epoch += 1
        model.owner = who
        assert (acquired.session.epoch, acquired.session.owner) == (model.epoch, who)

    async def _release(self, author: Author, model: ModelSession, number: int) -> None:
        if model.owner is None or not self.is_owned(model):
            return
        release = store_pb2.ReleaseLeaseRequest(
            incarnation=model.owner, session_id=author.session_id, epoch=model.epoch
        )
        for _ in range(2):
            await author.store.release_lease(release)
        model.owner = None

    async def _refuse_deletion(self, author: Author, model: ModelSession) -> None:
        """Try what must not delete: without force what works, or under another epoch than the owner's."""
        store, session_id, epoch = author.store, author.session_id, author.epoch
        if model.rest.state != session_pb2.REST_STATE_AT_REST:
            request = store_pb2.DeleteSessionRequest(session_id=session_id, epoch=epoch)
            await _refused(FailedPreconditionError, store.delete_session(request))
        if self.is_owned(model):
            request = store_pb2.DeleteSessionRequest(session_id=session_id, epoch=epoch + 1, force=True)
            await _refused(ConflictError, store.delete_session(request))

    async def _reuse(self, author: Author, model: ModelSession, number: int) -> None:
        """Ask for IDs that are taken for ever."""
        if self.dead:
            store, session_id, dead = author.store, author.session_id, sorted(self.dead)[0]
            await _refused(FailedPreconditionError, new_session(store, dead))
            await _refused(FailedPreconditionError, fork(store, session_id, dead))
            await _refused(FailedPreconditionError, fork(store, dead, self.name("f")))
            await _refused(FailedPreconditionError, items_of(store, dead))

    async def _stale(self, author: Author, model: ModelSession, number: int) -> None:
        epoch = author.epoch
        author.epoch = model.epoch + 1
        await _refused(ConflictError, author.send(author.request(text_input("never"), commit_id=self.name("k"))))
        author.epoch = epoch
        author.sequence += 1
        try:
            await author.send(author.request(text_input("never"), commit_id=self.name("k")))
        except ConflictError as err:
            assert err.reason == "SEQUENCE_CONFLICT"
        else:
            raise AssertionError("a commit behind the end was taken")

    async def _import(self, author: Author, model: ModelSession, number: int) -> None:
        store, session_id = author.store, author.session_id
        copy_id = self.name("m")
        await store.import_session(stream(await exported(store, session_id), copy_id))
        items = await items_of(store, copy_id)
        assert items[: len(model.items)] == model.items
        closed = [item.tool_call_status.call_id for item in items[len(model.items) :]]
        assert sorted(closed) == sorted(call_id for _, call_id in model.open_calls)
        copy = await session_of(store, copy_id)
        assert copy.rest.state == session_pb2.REST_STATE_AT_REST
        self.sessions[copy_id] = ModelSession(
            items=items,
            turn_id=model.turn_id,
            operations=None,
            images=dict(model.images),
            epoch=model.epoch,
            rest=copy.rest,
        )

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
            assert session.rest.state == model.rest.state
            assert session.epoch == model.epoch
            assert (session.owner if session.HasField("owner") else None) == (
                model.owner if self.is_owned(model) else None
            )
            if model.operations is not None:
                assert await operations_of(store, session_id) == list(model.operations.values())
            for digest, content in self.all_images().items():
                if digest in model.images:
                    assert await get_blob_bytes(store, session_id, digest) == content
                else:
                    await _refused(NotFoundError, get_blob_bytes(store, session_id, digest))
            await _refused(OutOfRangeError, anext(watch_of(store, session_id, after_revision=session.revision + 1)))
            middle = session.revision // 2
            changes = await until_current(watch_of(store, session_id, after_revision=middle))
            watched = [item for change in changes for item in change.items]
            assert watched == [item for item in model.items if item.revision > middle]
        for session_id in self.dead:
            try:
                await session_of(store, session_id)
            except HarnessError as err:
                assert err.reason == "SESSION_DELETED"
        assert await _listed(store) == sorted(self.sessions)
        wanted = [
            name
            for name, model in self.sessions.items()
            if model.rest.state == session_pb2.REST_STATE_WORKING and not self.is_owned(model)
        ]
        async with aclosing(_runnable(store)) as watch:
            assert await offers(watch, len(wanted)) == sorted(wanted)

    def all_images(self) -> dict[str, bytes]:
        """Return every image of every session."""
        return {digest: content for model in self.sessions.values() for digest, content in model.images.items()}


def _images_in(item: item_pb2.Item) -> list[str]:
    return [part.image.blob.digest for part in item.input.content.parts if part.HasField("image")]


async def _refused(expected: type[HarnessError], asked: Awaitable[object]) -> None:
    with pytest.raises(expected):
        await asked


async def _listed(store: SqliteSessionStore) -> list[str]:
    names: list[str] = []
    token, more = "", True
    while more:
        page = await store.list_sessions(store_pb2.ListSessionsRequest(page_size=2, page_token=token))
        names += [session.session_id for session in page.sessions]
        token, more = page.next_page_token, bool(page.next_page_token)
    return names


async def _runnable(store: SqliteSessionStore) -> AsyncGenerator[store_pb2.WatchRunnableResponse, None]:
    request = store_pb2.WatchRunnableRequest(incarnation=incarnation("watcher"), versions=VERSIONS, capacity=1_000)
    async for offered in store.watch_runnable(request):
        yield offered


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
async def test_store_shows_what_the_model_says(steps: list[tuple[str, int, int]]) -> None:
    await _live(steps)


@pytest.mark.long
@pytest.mark.timeout(3_600)
@settings(max_examples=2_000, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
async def test_store_shows_what_the_model_says_for_long(steps: list[tuple[str, int, int]]) -> None:
    await _live(steps)


async def _live(steps: list[tuple[str, int, int]]) -> None:
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
