"""What a command writes: size, encoding, terminal sequences, memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from harness.operations.local_manager import LocalOperationManager
from tests.support.operations import adding, bash, end_of, run, states
from unreal_agent.operation.v1 import operation_pb2


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "workspace").mkdir()
    return tmp_path / "workspace"


@pytest.fixture
async def manager(tmp_path: Path) -> AsyncIterator[LocalOperationManager]:
    async with LocalOperationManager.open(tmp_path / "state", name="local") as opened:
        yield opened


# --- B03: size ---


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held since its peak was last reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.slow
async def test_huge_output_costs_no_memory(manager: LocalOperationManager, workspace: Path) -> None:
    await run(manager, bash("true"), workspace)
    Path("/proc/self/clear_refs").write_text("5")  # the peak of earlier tests is not this one's
    before = psutil.Process().memory_info().rss
    state = (await run(manager, bash("yes | head -c 2000000000"), workspace)).bash
    grown = psutil.Process().memory_info().rss - before
    assert grown < 50 << 20
    assert peak_memory_bytes() - before < 300 << 20
    shown = len(state.stdout.head) + len(state.stdout.tail)
    assert (state.stdout.total_bytes, shown) == (2_000_000_000, 40_000)
    assert state.stdout.omitted_bytes == 2_000_000_000 - 40_000
    Path(state.stdout.path).unlink()


@pytest.mark.parametrize("character", ["\u2500", "\U0001f600"])
@pytest.mark.parametrize("before", [8, 9, 10, 11, 12])
async def test_cut_falls_between_characters(
    manager: LocalOperationManager, workspace: Path, character: str, before: int
) -> None:
    text = "x" * before + character * 3 + "y" * 12
    operation = bash(f"printf '%s' '{text}'", max_output_chars=20)
    stdout = (await run(manager, operation, workspace)).bash.stdout
    kept = len(stdout.head.encode()) + len(stdout.tail.encode())
    assert "\ufffd" not in stdout.head + stdout.tail
    assert (stdout.head, stdout.tail) == (text[:10], text[-10:])
    assert stdout.omitted_bytes == stdout.total_bytes - kept == len(text.encode()) - kept
    assert not stdout.is_lossy


async def test_output_of_exactly_the_limit_is_whole(manager: LocalOperationManager, workspace: Path) -> None:
    stdout = (await run(manager, bash(f"printf '%s' '{'ä' * 20}'", max_output_chars=20), workspace)).bash.stdout
    assert (stdout.head, stdout.tail, stdout.omitted_bytes, stdout.total_bytes) == ("ä" * 20, "", 0, 40)


# --- B04: encoding ---


async def test_bytes_that_are_no_utf8_are_replaced_and_kept_in_the_file(
    manager: LocalOperationManager, workspace: Path
) -> None:
    stdout = (await run(manager, bash(r"printf 'ok\xf0\x28end'"), workspace)).bash.stdout
    assert (stdout.head, stdout.is_lossy) == ("ok\ufffd(end", True)
    assert Path(stdout.path).read_bytes() == b"ok\xf0\x28end"


async def test_random_bytes_are_no_failure(manager: LocalOperationManager, workspace: Path) -> None:
    state = (await run(manager, bash("head -c 300 /dev/urandom"), workspace)).bash
    assert (state.exit_code, state.stdout.total_bytes) == (0, 300)


async def test_character_written_in_two_pieces_is_one(manager: LocalOperationManager, workspace: Path) -> None:
    stdout = (await run(manager, bash(r"printf '\xe4'; sleep 0.1; printf '\xbd\xa0'"), workspace)).bash.stdout
    assert (stdout.head, stdout.is_lossy) == ("\u4f60", False)


# --- B13: long lines, both streams ---


@pytest.mark.parametrize("redirect", ["", ">&2"])
async def test_long_lines_are_counted_on_both_streams(
    manager: LocalOperationManager, workspace: Path, redirect: str
) -> None:
    command = f"{{ head -c 70000 /dev/zero | tr '\\0' x; echo; echo tail; }} {redirect}"
    state = (await run(manager, bash(command), workspace)).bash
    captured = state.stderr if redirect else state.stdout
    assert captured.total_bytes == 70_006
    assert captured.tail.endswith("x\ntail\n")
    assert state.exit_code == 0


async def test_ten_megabytes_without_a_newline_on_both_streams(manager: LocalOperationManager, workspace: Path) -> None:
    command = "head -c 10000000 /dev/zero | tr '\\0' y & head -c 10000000 /dev/zero | tr '\\0' z >&2; wait"
    state = (await run(manager, bash(command), workspace)).bash
    assert (state.stdout.total_bytes, state.stderr.total_bytes) == (10_000_000, 10_000_000)
    assert state.stdout.head.startswith("yyyy") and state.stderr.tail.endswith("zzzz")


# --- B14: what only a terminal understands ---


async def test_terminal_sequences_are_dropped_before_the_limit(manager: LocalOperationManager, workspace: Path) -> None:
    command = (
        r"for i in $(seq 1 5000); do printf '\r\033[2K%d%%' $i; done; "
        r"printf '\n\033[31mred\033[0m\033]0;title\a\n'; printf 'a\r\nb\r\n'"
    )
    stdout = (await run(manager, bash(command, max_output_chars=100), workspace)).bash.stdout
    assert (stdout.head, stdout.omitted_bytes) == ("5000%\nred\na\nb\n", 0)
    raw = Path(stdout.path).read_bytes()
    assert b"\x1b[2K4999%" in raw and raw.endswith(b"a\r\nb\r\n")


# --- while it runs ---


async def test_manager_answers_while_output_is_written_and_read(
    manager: LocalOperationManager, workspace: Path
) -> None:
    busy = bash("yes '\033[31mred' | head -c 50000000", max_output_chars=1_000_000)
    await manager.add_operations(adding([busy], workspace))
    began_s = time.monotonic()
    await run(manager, bash("true"), workspace)
    assert time.monotonic() - began_s < 2
    ended = (await states(manager, busy.operation_id))[-1]
    assert ended.bash.stdout.total_bytes == 50_000_000
    assert len(ended.bash.stdout.head) == 500_000


async def test_lost_output_file_is_no_crash(manager: LocalOperationManager, workspace: Path) -> None:
    operation = bash("rm -rf $(dirname $(readlink /proc/$$/fd/1)); echo gone")
    await manager.add_operations(adding([operation], workspace))
    ended = await end_of(manager, operation.operation_id)
    assert ended.status == operation_pb2.OPERATION_STATUS_OUTCOME_UNKNOWN
    assert ended.error.reason == "OPERATION_DIRECTORY_MISSING"
