"""State directories of real runs, damaged at seeded places: no history is shortened silently, the doctor says where."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.errors import DataLossError, HarnessError
from harness.operations import journal_check
from harness.session_store import get_blob_bytes
from harness.session_store.sqlite import SqliteSessionStore
from harness.session_store.sqlite.manager_check import check_against_manager
from harness.session_store.sqlite.state_check import check_state
from tests.support.cli import Cli
from tests.support.session_records import Author, blob_part, items_of, session_of, text_input
from unreal_agent.session.v1 import item_pb2
from unreal_agent.sessionstore.v1 import session_store_service_pb2 as store_pb2

SESSIONS = ("s1", "s2", "f")
LOG_COMMITS = 12

Damage = Callable[[Path, random.Random], str]
"""Damages a state directory and says how."""


@dataclass(frozen=True, slots=True)
class Sound:
    """A directory that a process left in the middle of its work, and what must be read from it."""

    state: Path
    older: Path
    """The same directory, a run earlier."""

    items: Mapping[str, list[item_pb2.Item]]
    blob: bytes
    digest: str


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """Make real runs with commands, a fork, a blob and commits that are in the log only."""
    cli = Cli(tmp_path_factory.mktemp("damage"))
    call = {"name": "Bash", "arguments": {"command": "seq 1 3000"}}
    script = cli.script([{"text": "hm", "tool_calls": [call, call]}, {"text": "done"}] * 2)
    for session in ("s1", "s2"):
        done = cli.run("run", "--provider", "scripted", "--script", script, "--session", session, "-p", "go")
        assert done.code == 0, done.stderr
    older = cli.directory / "older"
    shutil.copytree(cli.state, older)
    done = cli.run("run", "--provider", "scripted", "--script", script, "--session", "s1", "-p", "again")
    assert done.code == 0, done.stderr
    return asyncio.run(_left(cli.state, older, cli.directory / "left"))


async def _left(state: Path, older: Path, left: Path) -> Sound:
    blob = random.Random(1).randbytes(700_000)
    async with SqliteSessionStore.open(state / "sessions.db") as store:
        author = Author(store, "s2", sequence=(await session_of(store, "s2")).last_sequence)
        image = await author.put(blob)
        await author.commit(text_input("look", "look", blob_part(image)))
    async with SqliteSessionStore.open(state / "sessions.db") as store:
        await store.fork_session(
            store_pb2.ForkSessionRequest(request_id="r", parent_session_id="s1", session_id="f", cut_sequence=6)
        )
        author = Author(store, "s1", sequence=(await session_of(store, "s1")).last_sequence)
        for number in range(LOG_COMMITS):
            await author.commit(text_input(f"more{number}", f"{number} " + "words " * 300))
        # As a process leaves it that is killed now.
        shutil.copytree(state, left)
        items = {session: await items_of(store, session) for session in SESSIONS}
    return Sound(state=left, older=older, items=items, blob=blob, digest=image.digest)


def doctor(state: Path) -> list[str]:
    """Return all that the parts' checks find."""
    lines: list[str] = []
    checks: list[Callable[[], Sequence[str]]] = [
        lambda: check_state(state / "sessions.db").findings,
        lambda: journal_check.check_state(state / "operations").findings,
        lambda: check_against_manager(state / "sessions.db", state / "operations"),
    ]
    for check in checks:
        try:
            lines += check()
        except HarnessError as error:
            lines.append(error.message)
    return lines


async def read_all(sound: Sound, state: Path) -> tuple[list[str], list[str]]:
    """Open the store and read everything; return sessions that are whole, and what is refused.

    A history that is neither is a failure: it would have been shortened or changed silently.
    """
    whole, refused = [], []
    try:
        async with SqliteSessionStore.open(state / "sessions.db") as store:
            for session, items in sound.items.items():
                try:
                    found = await items_of(store, session)
                    blob = await get_blob_bytes(store, "s2", sound.digest) if session == "s2" else sound.blob
                except HarnessError as error:
                    refused.append(error.message)
                    continue
                assert found == items, f"{session} has {len(found)} of {len(items)} items"
                assert blob == sound.blob
                whole.append(session)
    except HarnessError as error:
        refused.append(error.message)
    return whole, refused


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(name: str) -> Damage:
    def damage(state: Path, rng: random.Random) -> str:
        path = state / name
        offset = rng.randrange(100, path.stat().st_size)
        byte = path.read_bytes()[offset]
        _overwrite(path, offset, bytes((byte ^ 1 << rng.randrange(8),)))
        return f"{name}: bit at {offset}"

    return damage


def zero(name: str, size: int = 512) -> Damage:
    def damage(state: Path, rng: random.Random) -> str:
        path = state / name
        offset = rng.randrange(0, path.stat().st_size // size) * size
        _overwrite(path, offset, bytes(size))
        return f"{name}: zeros at {offset}"

    return damage


def truncate(name: str) -> Damage:
    def damage(state: Path, rng: random.Random) -> str:
        path = state / name
        size = rng.randrange(4096, path.stat().st_size - 4096)
        with path.open("r+b") as file:
            file.truncate(size)
        return f"{name}: cut at {size}"

    return damage


DAMAGES: Mapping[str, Damage] = {
    "flip in the store": flip("sessions.db"),
    "zeros in the store": zero("sessions.db"),
    "cut store": truncate("sessions.db"),
}


def run_damage(sound: Sound, damage: Damage, tmp_path: Path, seed: int) -> None:
    """Damage a copy: what is read is what was written, or an error; where it's an error the doctor knows too."""
    state = tmp_path / str(seed)
    shutil.copytree(sound.state, state)
    # Most of the content must be in the file that is damaged.
    with closing(sqlite3.connect(state / "sessions.db")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    how = damage(state, random.Random(seed))
    lines = doctor(state)
    try:
        _, refused = asyncio.run(read_all(sound, state))
    except BaseException as error:
        error.add_note(f"{how}; doctor: {lines}")
        raise
    assert lines or not refused, f"{how}: the doctor finds nothing, refused was {refused}"
    shutil.rmtree(state)


@pytest.mark.parametrize("kind", DAMAGES)
def test_no_damage_of_the_store_shortens_a_history_silently(sound: Sound, tmp_path: Path, kind: str) -> None:
    for seed in range(12):
        run_damage(sound, DAMAGES[kind], tmp_path, seed)


@pytest.mark.long
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("kind", DAMAGES)
def test_no_damage_at_many_places_shortens_a_history_silently(sound: Sound, tmp_path: Path, kind: str) -> None:
    for seed in range(1_000, 1_400):
        run_damage(sound, DAMAGES[kind], tmp_path, seed)


def log_frames(state: Path) -> int:
    return ((state / "sessions.db-wal").stat().st_size - 32) // 4120


@pytest.mark.parametrize("where", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("how", ["bit", "zeros"])
def test_damaged_log_is_refused_before_it_is_written_to(sound: Sound, tmp_path: Path, where: float, how: str) -> None:
    """Behind the damage lie commits that were acknowledged; SQLite alone would go on without them."""
    state = tmp_path / "state"
    shutil.copytree(sound.state, state)
    log = state / "sessions.db-wal"
    offset = 32 + int(log_frames(state) * where) * 4120 + 1_000
    _overwrite(log, offset, bytes(4120) if how == "zeros" else bytes((log.read_bytes()[offset] ^ 1,)))
    before = log.read_bytes()
    assert any("write-ahead log" in line and "damaged at frame" in line for line in doctor(state))
    _, refused = asyncio.run(read_all(sound, state))
    assert any("damaged at frame" in line for line in refused)
    assert log.read_bytes() == before


def test_damaged_beginning_of_the_log_is_refused(sound: Sound, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(sound.state, state)
    _overwrite(state / "sessions.db-wal", 0, bytes(32))
    assert any("damaged at its beginning" in line for line in doctor(state))
    assert asyncio.run(read_all(sound, state))[1] != []


def test_commit_that_was_being_written_is_no_damage(sound: Sound, tmp_path: Path) -> None:
    """A power cut leaves a part of the last commit; nobody was told of it."""
    state = tmp_path / "state"
    shutil.copytree(sound.state, state)
    log = state / "sessions.db-wal"
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 100)
    assert doctor(state) == []

    async def last() -> int:
        async with SqliteSessionStore.open(state / "sessions.db") as store:
            return len(await items_of(store, "s1"))

    assert asyncio.run(last()) == len(sound.items["s1"]) - 1


def test_older_copy_of_the_store_contradicts_the_journal(sound: Sound, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(sound.state, state)
    for path in state.glob("sessions.db*"):
        path.unlink()
    shutil.copy(sound.older / "sessions.db", state)
    lines = doctor(state)
    assert any("session 's1'" in line and "epoch" in line for line in lines)
    assert any("is in the journal and not in the store" in line for line in lines)


def test_older_copy_of_the_store_is_not_gone_on_with(sound: Sound, tmp_path: Path) -> None:
    """Its next operation has the name of one that ran, and would be answered with that one's result."""
    cli = Cli(tmp_path)
    shutil.copytree(sound.older, cli.state)
    shutil.rmtree(cli.state / "operations")
    shutil.copytree(sound.state / "operations", cli.state / "operations")
    script = cli.script([{"text": "hm"}])
    arguments = ("run", "--provider", "scripted", "--script", script, "--session", "s1", "-p", "go")
    told = cli.run(*arguments)
    assert told.code == 1
    assert "session 's1' went on after this state of" in told.stderr
    assert len(told.stderr.splitlines()) == 1
    assert cli.run("sessions", "show", "s1").code == 0
    (cli.state / "operations").rename(tmp_path / "away")
    assert cli.run(*arguments).code == 0


def test_older_copy_of_the_journal_contradicts_the_store(sound: Sound, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(sound.state, state)
    shutil.copy(sound.older / "operations" / "journal.sqlite3", state / "operations")
    assert any("session 's1'" in line and "not in its journal" in line for line in doctor(state))


def test_cut_output_is_found_with_its_place(sound: Sound, tmp_path: Path) -> None:
    state = tmp_path / "left"
    shutil.copytree(sound.state, state)
    # Recorded is the place where it was made.
    output = next((sound.state.parent / "state").glob("operations/operations/*/1/out"))
    whole = output.read_bytes()
    output.write_bytes(whole[:100])
    try:
        lines = doctor(state)
    finally:
        output.write_bytes(whole)
    assert any("its output has 100 bytes" in line and str(output) in line for line in lines)


def test_damaged_claim_and_exit_record_are_found(sound: Sound, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(sound.state, state)
    first, second, *_ = sorted((state / "operations" / "operations").iterdir())
    (first / "1" / "claim").write_bytes(b"[1, 2")
    (second / "1" / "exit").write_bytes(b"exi")
    lines = doctor(state)
    assert any(first.name in line and "its claim can't be read" in line for line in lines)
    assert any(second.name in line and "its exit record is damaged" in line for line in lines)


def test_one_damaged_session_leaves_the_others_usable(sound: Sound, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(sound.state, state)
    with closing(sqlite3.connect(state / "sessions.db")) as connection, connection:
        connection.execute(
            "DELETE FROM items WHERE sequence > 5 AND session_key ="
            " (SELECT session_key FROM sessions WHERE session_id = 's1')"
        )

    async def use() -> list[str]:
        async with SqliteSessionStore.open(state / "sessions.db") as store:
            with pytest.raises(DataLossError) as caught:
                await items_of(store, "s1")
            author = Author(store, "s2", sequence=(await session_of(store, "s2")).last_sequence)
            await author.commit(text_input("go on"))
            return [caught.value.message]

    (message,) = asyncio.run(use())
    assert message.startswith("item 6 of session 's1' is missing")
    assert any("session 's1' lacks items 6 to" in line for line in doctor(state))
