"""A store or a journal with anything wrong in its file says so, and tells no other history than was written."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.errors import HarnessError
from tests.support.damaged_files import (
    read_journal,
    read_store,
    spoil_bytes,
    spoil_record,
    spoil_value,
    write_journal,
    write_store,
)

Spoil = Callable[[Path, int], str]

STORE_RECORDS = (
    *(("items", "record"), ("items", "record"), ("session_records", "record"), ("sessions", "rest")),
    *(("blob_chunks", "data"), ("tokens", "record")),
)
JOURNAL_RECORDS = (("operations", "operation"),)

STORE_DAMAGE: dict[str, Spoil] = {
    "record": lambda path, seed: spoil_record(path, STORE_RECORDS, seed),
    "value": spoil_value,
    "bytes": spoil_bytes,
}
JOURNAL_DAMAGE: dict[str, Spoil] = {
    "record": lambda path, seed: spoil_record(path, JOURNAL_RECORDS, seed),
    "value": spoil_value,
    "bytes": spoil_bytes,
}


def _check_words(what: str, refusals: list[HarnessError]) -> None:
    for error in refusals:
        assert error.reason and 0 < len(error.message) < 2_000, f"{what}: {error!r}"
        if error.code == "DATA_LOSS":
            assert any(sign in error.message for sign in ("'", "/", "blob ")), f"{what}: no place in {error.message}"


async def _spoil_stores(directory: Path, how: str, runs: range) -> None:
    sound, path = directory / "sound.db", directory / "sessions.db"
    await write_store(sound)
    for seed in runs:
        for old in directory.glob("sessions.db*"):
            old.unlink()
        shutil.copy(sound, path)
        what = f"{how} {seed}: {STORE_DAMAGE[how](path, seed)}"
        try:
            async with asyncio.timeout(20):
                refusals = await read_store(path)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        _check_words(what, refusals)


async def _spoil_journals(directory: Path, how: str, runs: range) -> None:
    sound, state, workspace = directory / "sound", directory / "state", directory / "workspace"
    workspace.mkdir()
    await write_journal(sound, workspace)
    for seed in runs:
        shutil.rmtree(state, ignore_errors=True)
        shutil.copytree(sound, state)
        what = f"{how} {seed}: {JOURNAL_DAMAGE[how](state / 'journal.sqlite3', seed)}"
        try:
            async with asyncio.timeout(20):
                refusals = await read_journal(state, workspace)
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        _check_words(what, refusals)


@pytest.mark.slow
@pytest.mark.parametrize("how", STORE_DAMAGE)
async def test_damaged_store_is_told_and_tells_nothing_else(tmp_path: Path, how: str) -> None:
    await _spoil_stores(tmp_path, how, range(20))


@pytest.mark.slow
@pytest.mark.parametrize("how", JOURNAL_DAMAGE)
async def test_damaged_journal_is_told_and_ends_nothing(tmp_path: Path, how: str) -> None:
    await _spoil_journals(tmp_path, how, range(12))


async def test_a_blob_whose_content_became_a_number_is_told_of(tmp_path: Path) -> None:
    """It was found for long: nothing was shown in its place."""
    await _spoil_stores(tmp_path, "value", range(1_268, 1_269))


@pytest.mark.long
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("how", STORE_DAMAGE)
async def test_damaged_stores_are_told_for_long(tmp_path: Path, how: str) -> None:
    await _spoil_stores(tmp_path, how, range(1_000, 1_400))


@pytest.mark.long
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("how", JOURNAL_DAMAGE)
async def test_damaged_journals_are_told_for_long(tmp_path: Path, how: str) -> None:
    await _spoil_journals(tmp_path, how, range(1_000, 1_400))
